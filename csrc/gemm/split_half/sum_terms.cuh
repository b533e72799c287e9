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

// The least that the largest of `count` such sums of one row, or of one column, must be for all to be right beside it. What the terms
// leave out, beside 2^15 in the other operand: in an element up to 2^-25 (low's least bit is 2^-24) and K of them in all, 2^-24.5
// sqrt(K) where they are independent, or, where elements are alike, what is left out of the row and of the column in all (SplitHalfRow).
// What float loses in more than 512 products is no less than that beside 2^22 times it. Of a few sums all may be small by chance: beside
// 2^14 times it then, if there are more on the other side.
struct LeastRightSum {
  float independent, beside;
  __device__ __forceinline__ LeastRightSum(int64_t K, int count, int others)
      : independent(4.2146848e-8f * sqrtf(static_cast<float>(K))), beside(count < 4 && others >= 4 ? 0x1p29f : 0x1p37f) {}
  __device__ __forceinline__ float operator()(float left_out) const { return beside * fmaxf(independent, left_out); }
};

}  // namespace attention_ext
