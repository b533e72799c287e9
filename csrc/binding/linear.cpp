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
// Of the input's dtype or, unless `same_dtype`, the accumulator's.
Vector check_vector(const char* argument, const OptionalTensor& tensor, const Sizes& sizes, const Tensor& input,
                    bool same_dtype = false) {
  if (!tensor.has_value() || !tensor->defined()) return {};
  const ScalarType own = input.scalar_type(), wide = accumulator_type(data_type("input", input)), type = tensor->scalar_type();
  if (!same_dtype && type != own && type != wide) {
    fail(argument, own == wide ? "dtype " + text(wide) : "the input's dtype " + text(own) + " or " + text(wide), text(type));
  }
  check_shape(argument, *tensor, sizes, same_dtype ? own : type, input, 0);
  const bool repeated = sizes.empty() || sizes[0] == 1;
  return {data_of(*tensor), repeated ? 0 : tensor->stride(0), data_type(argument, *tensor)};
}

// input (M, K), weight (N, K), bias (N,) or none, of one dtype and device.
LinearParams check_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  LinearParams params = {};
  params.type = data_type("input", input);
  if (input.dim() != 2) fail("input", "a matrix (rows, K)", shape_of(input) + " of rank " + std::to_string(input.dim()));
  check_limits("input", input, 2);
  check_defined("weight", weight);
  if (weight.scalar_type() != input.scalar_type()) {
    fail("weight", "the input's dtype " + text(input.scalar_type()), text(weight.scalar_type()));
  }
  if (!same_device(weight, input)) fail("weight", "the input's device " + device_of(input), device_of(weight));
  if (weight.dim() != 2) {
    fail("weight", "a matrix (features, K)", shape_of(weight) + " of rank " + std::to_string(weight.dim()));
  }
  check_limits("weight", weight, 2);
  params.M = input.size(0);
  params.N = weight.size(0);
  params.K = input.size(1);
  if (weight.size(1) != params.K) {
    fail("weight", "a matrix of as many columns as the input's K = " + std::to_string(params.K), shape_of(weight));
  }
  const Vector vector = check_vector("bias", bias, {params.N}, input, true);
  params.bias = vector.data;
  params.bias_stride = vector.stride;
  Views views(false);
  views.add(params.input, input);
  views.add(params.weight, weight);
  params.input.group = params.weight.group = 1;
  return params;
}

// What PyTorch refuses by a ValueError.
void check_batch_norm(const Tensor& input, bool training, double eps) {
  if (!(eps > 0.0 || (eps == 0.0 && !training))) {
    throw std::invalid_argument(
        sentence("eps", training ? "a positive number when training" : "a number that is not negative", text(eps)));
  }
  if (training && input.size(0) == 1) {
    throw std::invalid_argument(sentence("input", "more than 1 value per channel when training", shape_of(input)));
  }
}

void run_linear(const char* op, const LinearParams& params, LinearKernel kernel, int32_t device) {
  Tensor workspace = allocate_bytes(linear_workspace(params, kernel), device);
  check_status(op, linear(params, kernel, data_of(workspace), current_stream(device)), device);
}

// The kernel of a name, or for "auto" the table's choice.
LinearKernel kernel_of(const std::string& name, const LinearParams& params, int32_t device, std::string* reason = nullptr) {
  const BatchDims one = {{1}, 1};
  const int64_t element = element_bytes(params.type);
  const LinearProblem problem = {params.M,
                                 params.N,
                                 params.K,
                                 params.type,
                                 operand_of(one, params.input, params.M, element),
                                 operand_of(one, params.weight, params.N, element)};
  return static_cast<LinearKernel>(choose_row(kLinearKernels, name, problem, device_info(device), 0, reason));
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
  check_defined("input", input);
  const int32_t device = input.get_device_index();
  if (input.scalar_type() != ScalarType::Float) fail("input", "dtype float32", text(input.scalar_type()));
  if (input.dim() < 1) fail("input", "rank 1 or more", shape_of(input) + " of rank 0");
  const OperatorScope scope(device);
  Sizes sizes = sizes_of(input);
  const Tensor matrix = matrix_of(input, device);
  LinearParams params = check_linear(matrix, weight, bias);
  sizes.back() = params.N;
  Tensor out = allocate(sizes, contiguous_strides(sizes), ScalarType::Float, device);
  params.out = data_of(out);
  run_linear(op, params, kernel_of(kernel_name, params, device), device);
  return out;
}

// The kernel that makes the product of a linear operator for these arguments, and why; of input its rows as a matrix.
std::tuple<std::string, std::string> linear_plan(Tensor input, Tensor weight, OptionalTensor bias) {
  check_defined("input", input);
  const int32_t device = input.get_device_index();
  std::string reason;
  const LinearKernel kernel = kernel_of("auto", check_linear(input, weight, bias), device, &reason);
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
  check_defined("input", input);
  LinearParams params = check_linear(input, weight, bias);
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
  const bool has_mean = running_mean.has_value(), has_var = running_var.has_value();
  if (has_mean != has_var) {
    fail(has_mean ? "running_var" : "running_mean",
         std::string("a tensor together with ") + (has_mean ? "running_mean" : "running_var"), "None");
  }
  fill(check_vector("bn_weight", bn_weight, {N}, input), norm.weight, norm.weight_stride, norm.weight_type);
  fill(check_vector("bn_bias", bn_bias, {N}, input), norm.bias, norm.bias_stride, norm.bias_type);
  fill(check_vector("running_mean", running_mean, {N}, input), norm.running_mean, norm.running_mean_stride,
       norm.running_mean_type);
  fill(check_vector("running_var", running_var, {N}, input), norm.running_var, norm.running_var_stride, norm.running_var_type);
  check_defined("scale", scale);
  const Sizes scale_sizes = sizes_of(scale);
  if (scale_sizes.size() > 1 || (scale_sizes.size() == 1 && scale_sizes[0] != 1 && scale_sizes[0] != N)) {
    fail("scale", "shape (), (1,) or " + text(Sizes{N}), shape_of(scale));
  }
  fill(check_vector("scale", scale, scale_sizes, input), norm.scale, norm.scale_stride, norm.scale_type);
  check_batch_norm(input, training, eps);
  if (!training && !has_mean) fail("running_mean", "a tensor where training is False", "None");

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

  run_linear(op, params, kernel_of(kernel_name, params, device), device);
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
