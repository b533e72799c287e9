// What runs on the CPU beside PyTorch's operators, for torch's stable ABI: part of the library _C.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "binding/errors.h"
#include "linear/cpu/batch_norm.h"

namespace attention_ext {
namespace {

using OptionalTensor = std::optional<Tensor>;

Tensor allocate_like(const Tensor& like, const Sizes& sizes, const Sizes& strides) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                         static_cast<int32_t>(like.scalar_type()), aoti_torch_device_type_cpu(),
                                                         0, &handle));
  return Tensor(handle);
}

// Of the input's dtype: (cols,), or of one element where `one` allows it.
template <class T>
PerColumn<T> per_column(const char* argument, const OptionalTensor& tensor, const Tensor& input, bool one = false) {
  if (!tensor.has_value()) return {};
  const bool is_one = one && tensor->numel() == 1, fits = tensor->dim() == 1 && tensor->size(0) == input.size(1);
  if (tensor->scalar_type() != input.scalar_type() || !same_device(*tensor, input) || !(is_one || fits)) {
    fail(argument, "a number for each column, of the input's dtype and device", shape_of(*tensor));
  }
  return {static_cast<const T*>(tensor->const_data_ptr()), is_one ? 0 : tensor->stride(0)};
}

template <class T>
void batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& mean,
                const OptionalTensor& var, const Tensor& scale, double eps, Tensor& out, Tensor& used_mean, Tensor& used_var) {
  const auto data = [](Tensor& of) { return static_cast<T*>(of.mutable_data_ptr()); };
  BatchNormCpu<T> params = {input.size(0),
                            input.size(1),
                            static_cast<const T*>(input.const_data_ptr()),
                            data(out),
                            data(used_mean),
                            data(used_var),
                            per_column<T>("weight", weight, input),
                            per_column<T>("bias", bias, input),
                            per_column<T>("scale", scale, input, true),
                            eps};
  const auto parallel = [](int64_t begin, int64_t end, int64_t grain, const auto& part) {
    torch::stable::parallel_for(begin, end, grain, part);
  };
  if (mean.has_value()) {
    const PerColumn<T> from = per_column<T>("mean", mean, input), var_from = per_column<T>("var", var, input);
    for (int64_t col = 0; col < params.cols; ++col) {
      params.mean[col] = from.data[col * from.stride];
      params.var[col] = var_from.data[col * var_from.stride];
    }
  } else {
    column_statistics(params, parallel);
  }
  normalise(params, parallel);
}

// For float and double matrices that are contiguous; mean and var: of the columns where they are not given.
std::tuple<Tensor, Tensor, Tensor> batch_norm_cpu(Tensor input, OptionalTensor weight, OptionalTensor bias, OptionalTensor mean,
                                                  OptionalTensor var, Tensor scale, double eps) {
  const ScalarType type = input.scalar_type();
  if ((type != ScalarType::Float && type != ScalarType::Double) || input.dim() != 2 || !input.is_contiguous()) {
    fail("input", "a contiguous matrix of float32 or float64", shape_of(input) + " of " + text(type));
  }
  if (mean.has_value() != var.has_value())
    fail("var", "a tensor together with mean", var.has_value() ? "a tensor alone" : "None");
  const int64_t rows = input.size(0), cols = input.size(1);
  Tensor out = allocate_like(input, {rows, cols}, {std::max<int64_t>(cols, 1), 1});
  Tensor used_mean = allocate_like(input, {cols}, {1}), used_var = allocate_like(input, {cols}, {1});
  const auto run = type == ScalarType::Float ? batch_norm<float> : batch_norm<double>;
  run(input, weight, bias, mean, var, scale, eps, out, used_mean, used_var);
  return {out, used_mean, used_var};
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CPU, m) { m.impl("_batch_norm", TORCH_BOX(&attention_ext::batch_norm_cpu)); }
