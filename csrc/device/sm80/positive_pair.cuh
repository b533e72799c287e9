// Pairs of a half type with 0 for what is negative: on the way from float (cvt.relu), or afterwards. NaN stays NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace attention_ext {

// pack_pair (device/common/types.cuh).
template <class T>
__device__ __forceinline__ uint32_t pack_positive_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_positive_pair<__half>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t pack_positive_pair<__nv_bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <class T>
__device__ __forceinline__ uint32_t positive_pair(uint32_t pair);
template <>
__device__ __forceinline__ uint32_t positive_pair<__half>(uint32_t pair) {
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0u));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t positive_pair<__nv_bfloat16>(uint32_t pair) {
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(0u));
  return pair;
}

}  // namespace attention_ext
