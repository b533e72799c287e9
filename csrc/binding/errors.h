// How an argument is refused: one sentence of the argument, what was expected and what came.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <charconv>
#include <cmath>
#include <stdexcept>
#include <string>

#include "binding/batch_dims.h"

namespace attention_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What attention_ext/_checks.py says, in its words: both check the same, one before a call runs and one when it does.
inline std::string sentence(const std::string& argument, const std::string& expected, const std::string& got) {
  return "attention_ext: " + argument + ": expected " + expected + ", got " + got;
}

[[noreturn]] inline void fail(const std::string& argument, const std::string& expected, const std::string& got) {
  throw std::runtime_error(sentence(argument, expected, got));
}

inline std::string text(const Sizes& sizes) {
  std::string out = "(";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return out + (sizes.size() == 1 ? ",)" : ")");
}

inline std::string text(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return "torch.float16";
    case ScalarType::BFloat16: return "torch.bfloat16";
    case ScalarType::Float: return "torch.float32";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::Bool: return "torch.bool";
    case ScalarType::Byte: return "torch.uint8";
    case ScalarType::Char: return "torch.int8";
    case ScalarType::Short: return "torch.int16";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    case ScalarType::ComplexHalf: return "torch.complex32";
    case ScalarType::ComplexFloat: return "torch.complex64";
    case ScalarType::ComplexDouble: return "torch.complex128";
    case ScalarType::Float8_e5m2: return "torch.float8_e5m2";
    case ScalarType::Float8_e4m3fn: return "torch.float8_e4m3fn";
    default: return "dtype number " + std::to_string(static_cast<int>(type));
  }
}

// As Python writes a float: the shortest digits that give the same number, in scientific notation where that is very large or
// small.
inline std::string text(double number) {
  if (!std::isfinite(number)) return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
  const double size = std::abs(number);
  const bool fixed = size == 0.0 || (size >= 1e-4 && size < 1e16);
  char digits[32];
  const auto [end, status] =
      std::to_chars(digits, digits + sizeof digits, number, fixed ? std::chars_format::fixed : std::chars_format::scientific);
  const std::string out(digits, end);
  return fixed && out.find('.') == std::string::npos ? out + ".0" : out;
}

inline Sizes sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

inline std::string shape_of(const Tensor& tensor) { return "shape " + text(sizes_of(tensor)); }

inline std::string device_of(const Tensor& tensor) {
  int32_t type = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_meta()) return "meta";
  const std::string name = tensor.is_cuda() ? "cuda" : "device type " + std::to_string(type);
  return name + ":" + std::to_string(index);
}

inline bool same_device(const Tensor& left, const Tensor& right) {
  return left.is_cuda() == right.is_cuda() && left.get_device_index() == right.get_device_index();
}

}  // namespace attention_ext
