// linear_float32 and linear_batchnorm_softmax on CUDA, for torch's stable ABI. A body: check, allocate, fill, launch.
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "binding/checks.h"
#include "binding/choice.h"
#include "core/tensors.h"
#include "linear/params.h"

namespace attention_ext {
namespace {

// A vector of one number per feature, or none.
struct Vector {
  const void* data = nullptr;
  int64_t stride = 0;
  DataType type = DataType::kFloat;
};
// Of the input's dtype or the accumulator's.
Vector check_vector(const char* op, const char* argument, const OptionalTensor& tensor, int64_t N, const Tensor& input) {
  if (!tensor.has_value() || !tensor->defined()) return {};
  check_tensor(op, argument, *tensor, 0, input.get_device_index());
  check_sizes(op, argument, *tensor, {N});
  const ScalarType type = tensor->scalar_type(), wide = accumulator_type(data_type(op, "input", input));
  if (type != input.scalar_type()) check_type(op, argument, *tensor, wide);
  return {data_of(*tensor), tensor->stride(0), data_type(op, argument, *tensor)};
}

// input (M, K), weight (N, K), bias (N,) or none, of one dtype and device.
LinearParams check_linear(const char* op, const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const int32_t device = input.get_device_index();
  check_tensor(op, "input", input, 2, device);
  if (input.dim() != 2) fail(op, "input", "a matrix (rows, K)", "shape " + text(sizes_of(input)));
  LinearParams params = {};
  params.type = data_type(op, "input", input);
  check_tensor(op, "weight", weight, 2, device);
  check_type(op, "weight", weight, input.scalar_type());
  if (weight.dim() != 2) fail(op, "weight", "a matrix (features, K)", "shape " + text(sizes_of(weight)));
  params.M = input.size(0);
  params.N = weight.size(0);
  params.K = input.size(1);
  check_sizes(op, "weight", weight, {params.N, params.K});
  if (bias.has_value() && bias->defined()) check_type(op, "bias", *bias, input.scalar_type());
  const Vector vector = check_vector(op, "bias", bias, params.N, input);
  params.bias = vector.data;
  params.bias_stride = vector.stride;
  Views views(op, false);
  views.add(params.input, input);
  views.add(params.weight, weight);
  params.input.group = params.weight.group = 1;
  return params;
}

// What PyTorch refuses by a ValueError.
void check_batch_norm(const char* op, const Tensor& input, bool training, double eps) {
  const auto refuse = [&](const std::string& argument, const std::string& expected, const std::string& got) {
    throw std::invalid_argument("attention_ext: " + argument + ": expected " + expected + ", got " + got + " (" + op + ")");
  };
  if (training && input.size(0) == 1) {
    refuse("input", "more than 1 value per channel when training", "shape " + text(sizes_of(input)));
  }
  if (training && !(eps > 0.0)) refuse("eps", "a positive number when training", std::to_string(eps));
  if (!(eps >= 0.0)) refuse("eps", "a number that is not negative", std::to_string(eps));
}

void run_linear(const char* op, const LinearParams& params, LinearKernel kernel, int32_t device) {
  Tensor workspace = allocate_bytes(linear_workspace(params, kernel), device);
  check_status(op, linear(params, kernel, data_of(workspace), current_stream(device)), device);
}

// The kernel of a name, or for "auto" the table's choice.
LinearKernel kernel_of(const char* op, const std::string& name, const LinearParams& params, int32_t device,
                       std::string* reason = nullptr) {
  const BatchDims one = {{1}, 1};
  const int64_t element = element_bytes(params.type);
  const LinearProblem problem = {params.M,
                                 params.N,
                                 params.K,
                                 params.type,
                                 operand_of(one, params.input, params.M, element),
                                 operand_of(one, params.weight, params.N, element)};
  return static_cast<LinearKernel>(choose_row(op, kLinearKernels, name, problem, device_info(device), 0, reason));
}

// (..., K) as a matrix (rows, K), a copy where strides ask for one.
Tensor matrix_of(const Tensor& input, int32_t device) {
  const Sizes sizes = sizes_of(input);
  if (sizes.size() == 2) return input;
  int64_t rows = 1;
  for (size_t dim = 0; dim + 1 < sizes.size(); ++dim) rows *= sizes[dim];
  try {
    return torch::stable::reshape(input, {rows, sizes.back()});
  } catch (const std::exception&) {  // of which only the memory of the copy can be the cause
    out_of_memory(input.numel() * element_size(input.scalar_type()), device);
  }
}

Tensor linear_float32_by(Tensor input, Tensor weight, OptionalTensor bias, std::string kernel_name) {
  const char* op = "linear_float32";
  if (!input.defined()) fail(op, "input", "a tensor", "None");
  const int32_t device = input.get_device_index();
  check_tensor(op, "input", input, 1, device);
  check_type(op, "input", input, ScalarType::Float);
  const OperatorScope scope(device);
  Sizes sizes = sizes_of(input);
  const Tensor matrix = matrix_of(input, device);
  LinearParams params = check_linear(op, matrix, weight, bias);
  sizes.back() = params.N;
  Tensor out = allocate(sizes, contiguous_strides(sizes), ScalarType::Float, device);
  params.out = data_of(out);
  run_linear(op, params, kernel_of(op, kernel_name, params, device), device);
  return out;
}

// The kernel that makes the product of a linear operator for these arguments, and why; of input its rows as a matrix.
std::tuple<std::string, std::string> linear_plan(Tensor input, Tensor weight, OptionalTensor bias) {
  const char* op = "linear_plan";
  if (!input.defined()) fail(op, "input", "a tensor", "None");
  const int32_t device = input.get_device_index();
  std::string reason;
  const LinearKernel kernel = kernel_of(op, "auto", check_linear(op, input, weight, bias), device, &reason);
  return {kLinearKernels[static_cast<size_t>(kernel)].name, reason};
}

Tensor linear_float32(Tensor input, Tensor weight, OptionalTensor bias) {
  return linear_float32_by(input, weight, bias, "auto");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_batchnorm_softmax_by(Tensor input, Tensor weight, OptionalTensor bias,
                                                                       OptionalTensor bn_weight, OptionalTensor bn_bias,
                                                                       OptionalTensor running_mean, OptionalTensor running_var,
                                                                       Tensor scale, bool training, double eps,
                                                                       std::string kernel_name) {
  const char* op = "linear_batchnorm_softmax";
  if (!input.defined()) fail(op, "input", "a tensor", "None");
  LinearParams params = check_linear(op, input, weight, bias);
  const int32_t device = input.get_device_index();
  const OperatorScope scope(device);
  const int64_t M = params.M, N = params.N;
  BatchNormParams norm = {};
  norm.M = M;
  norm.N = N;
  norm.eps = eps;
  norm.type = params.type;
  const auto fill = [&](const Vector& vector, const void*& data, int64_t& stride, DataType& type) {
    data = vector.data;
    stride = vector.stride;
    type = vector.type;
  };
  fill(check_vector(op, "bn_weight", bn_weight, N, input), norm.weight, norm.weight_stride, norm.weight_type);
  fill(check_vector(op, "bn_bias", bn_bias, N, input), norm.bias, norm.bias_stride, norm.bias_type);
  fill(check_vector(op, "running_mean", running_mean, N, input), norm.running_mean, norm.running_mean_stride,
       norm.running_mean_type);
  fill(check_vector(op, "running_var", running_var, N, input), norm.running_var, norm.running_var_stride,
       norm.running_var_type);
  check_tensor(op, "scale", scale, 0, device);
  const Sizes scale_sizes = sizes_of(scale);
  if (scale_sizes.size() > 1 || (scale_sizes.size() == 1 && scale_sizes[0] != 1 && scale_sizes[0] != N)) {
    fail(op, "scale", "shape (), (1,) or (" + std::to_string(N) + ",)", text(scale_sizes));
  }
  norm.scale = data_of(scale);
  norm.scale_stride = scale_sizes.empty() || scale_sizes[0] == 1 ? 0 : scale.stride(0);
  norm.scale_type = data_type(op, "scale", scale);
  if (norm.scale_type != params.type) check_type(op, "scale", scale, accumulator_type(params.type));
  if (running_mean.has_value() != running_var.has_value() || !(training || running_mean.has_value())) {
    fail(op, running_mean.has_value() ? "running_var" : "running_mean", "a tensor where the other is one, or training is False",
         "None");
  }
  check_batch_norm(op, input, training, eps);

  const ScalarType accumulator = accumulator_type(params.type);
  Tensor out = allocate({M, N}, contiguous_strides({M, N}), input.scalar_type(), device);
  Tensor linear_out = allocate({M, N}, contiguous_strides({M, N}), accumulator, device);
  Tensor mean = allocate({N}, {1}, accumulator, device), var = allocate({N}, {1}, accumulator, device);
  const int64_t parts = (M + kStatisticsRows - 1) / kStatisticsRows, bytes = accumulator_bytes(params.type);
  Tensor statistics =
      allocate_bytes(training ? std::max<int64_t>(parts * N * 2 * bytes, 1) : 0, device);  // null: the running ones
  Tensor coefficients = allocate_bytes(4 * N * bytes, device);                             // center, factor, shift, scale
  params.out = data_of(linear_out);
  params.statistics = training ? data_of(statistics) : nullptr;
  norm.statistics = params.statistics;
  norm.mean = data_of(mean);
  norm.var = data_of(var);
  norm.center = data_of(coefficients);
  norm.factor = static_cast<char*>(norm.center) + N * bytes;
  norm.shift = static_cast<char*>(norm.center) + 2 * N * bytes;
  norm.scale_of = static_cast<char*>(norm.center) + 3 * N * bytes;
  NormSoftmaxParams softmax = {M,          N, params.out, norm.center, norm.factor, norm.shift, norm.scale_of, data_of(out),
                               params.type};

  run_linear(op, params, kernel_of(op, kernel_name, params, device), device);
  check_status(op, launch_batch_norm(norm, current_stream(device)), device);
  check_status(op, launch_norm_softmax(softmax, current_stream(device)), device);
  return {out, mean, var, linear_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_batchnorm_softmax(Tensor input, Tensor weight, OptionalTensor bias,
                                                                    OptionalTensor bn_weight, OptionalTensor bn_bias,
                                                                    OptionalTensor running_mean, OptionalTensor running_var,
                                                                    Tensor scale, bool training, double eps) {
  return linear_batchnorm_softmax_by(input, weight, bias, bn_weight, bn_bias, running_mean, running_var, scale, training, eps,
                                     "auto");
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CUDA, m) {
  m.impl("linear_float32", TORCH_BOX(&attention_ext::linear_float32));
  m.impl("linear_plan", TORCH_BOX(&attention_ext::linear_plan));
  m.impl("_linear_float32_by", TORCH_BOX(&attention_ext::linear_float32_by));
  m.impl("_linear_batchnorm_softmax_by", TORCH_BOX(&attention_ext::linear_batchnorm_softmax_by));
  m.impl("linear_batchnorm_softmax", TORCH_BOX(&attention_ext::linear_batchnorm_softmax));
}
