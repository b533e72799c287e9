// What the products of half terms share: the way back from scaled sums, and when the terms were not enough.
#pragma once

#include <cuda_runtime.h>

namespace attention_ext {

// x * 2^exponent, in two steps: the power may be out of float's range where the result is not.
__device__ __forceinline__ float times_power_of_two(float x, int exponent) {
  exponent = min(max(exponent, -252), 252);  // beyond is 0 or infinity, or the row is marked
  const int first = exponent / 2, second = exponent - first;
  return x * __int_as_float((first + 127) << 23) * __int_as_float((second + 127) << 23);
}

// The least that the largest of some scaled sums of a row must be for them to be right. Errors of up to 2^-25 in an element of either
// operand (low's least bit is 2^-24) beside 2^15 in the other, K of them: 2^-9.5 sqrt(K); float's own precision beside 2^24 times that.
__device__ __forceinline__ float least_right_sum(int64_t K) { return 23170.0f * sqrtf(static_cast<float>(K)); }

}  // namespace attention_ext
