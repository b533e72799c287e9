// What the epilogues of split_half products share: rescaling a sum, and the sums for which two half terms were not enough.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace attention_ext {

// x * 2^exponent, in two steps, as the power may be out of float's range where the result is not.
__device__ __forceinline__ float times_power_of_two(float x, int exponent) {
  exponent = min(max(exponent, -252), 252);  // beyond is 0 or infinity, or the row is marked
  const int first = exponent / 2, second = exponent - first;
  return x * __int_as_float((first + 127) << 23) * __int_as_float((second + 127) << 23);
}

// 2^(exponent - largest), at most 1. The sums of a row are comparable with each other once the columns' exponents are back in them,
// and those of a column once the rows' are.
__device__ __forceinline__ float relative_to_largest(int exponent, int largest) {
  return __int_as_float((max(exponent - largest, -126) + 127) << 23);
}

// The largest of `count` such sums of a row, or of a column, must be at least this for all of them to be accurate relative to it.
// The error of a sum, in units of 2^15 in the other operand: K elements each leave out up to 2^-25 (low's least bit is 2^-24),
// which is 2^-24.5 sqrt(K) where they are independent, and left_out of the row and of the column (SplitHalfRow) where elements are
// alike. The least sum is 2^22 times the error: what float loses in more than 512 products is no less than 2^-22. A few sums may
// all be small by chance: then it is 2^14 times the error, if there are more sums on the other side.
struct LeastAccurateSum {
  float independent, ratio;
  __device__ __forceinline__ LeastAccurateSum(int64_t K, int count, int others)
      : independent(4.2146848e-8f * sqrtf(static_cast<float>(K))), ratio(count < 4 && others >= 4 ? 0x1p29f : 0x1p37f) {}
  __device__ __forceinline__ float operator()(float left_out) const { return ratio * fmaxf(independent, left_out); }
};

}  // namespace attention_ext
