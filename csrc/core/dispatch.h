// From a dtype that is known at run time to the C++ type of its elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "core/tensors.h"

namespace attention_ext {

template <class T>
constexpr DataType kDataType = sizeof(T) == 8 ? DataType::kDouble : DataType::kFloat;
template <>
constexpr DataType kDataType<__half> = DataType::kHalf;
template <>
constexpr DataType kDataType<__nv_bfloat16> = DataType::kBFloat16;

// Returns launch(T()) for the T of `Types` that `type` names. `launch` takes `auto element` and uses its type alone.
template <class... Types, class Launch>
cudaError_t dispatch_among(DataType type, const Launch& launch) {
  cudaError_t status = cudaErrorInvalidValue;  // none of them
  static_cast<void>(((type == kDataType<Types> && (status = launch(Types()), true)) || ...));
  return status;
}

template <class Launch>
cudaError_t dispatch_type(DataType type, const Launch& launch) {
  return dispatch_among<__half, __nv_bfloat16, float, double>(type, launch);
}

template <class Launch>
cudaError_t dispatch_half_type(DataType type, const Launch& launch) {
  return dispatch_among<__half, __nv_bfloat16>(type, launch);
}

}  // namespace attention_ext
