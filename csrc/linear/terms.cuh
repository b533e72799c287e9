// What the products of half terms share: the way back from scaled sums, and when the terms were not enough.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace attention_ext {

// x * 2^exponent, in two steps: the power may be out of float's range where the result is not.
__device__ __forceinline__ float times_power_of_two(float x, int exponent) {
  exponent = min(max(exponent, -252), 252);  // beyond is 0 or infinity, or the row is marked
  const int first = exponent / 2, second = exponent - first;
  return x * __int_as_float((first + 127) << 23) * __int_as_float((second + 127) << 23);
}

// 2^(exponent - largest), at most 1: the scaled sums of a row compare with each other once the columns' exponents are back, and those of
// a column once the rows' are.
__device__ __forceinline__ float beside_largest(int exponent, int largest) {
  return __int_as_float((max(exponent - largest, -126) + 127) << 23);
}

// The least that the largest of `count` such sums of one row, or of one column, must be for all to be right beside it. Errors of up to
// 2^-25 in an element of either operand (low's least bit is 2^-24) beside 2^15 in the other, K of them: 2^-9.5 sqrt(K); what float
// loses in more than 512 products is no less than that beside 2^22 times it. Of a few sums all may be small by chance.
__device__ __forceinline__ float least_right_sum(int64_t K, int count) {
  return (count < 4 ? 23.0f : 5793.0f) * sqrtf(static_cast<float>(K));
}

}  // namespace attention_ext
