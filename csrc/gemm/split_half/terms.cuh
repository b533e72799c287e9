// An element as its two half terms, given the largest magnitude of those that share its exponent.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace attention_ext {

struct SplitHalfScale {
  int exponent;  // the largest is in [2^14, 2^15) times 2^exponent: 15 would leave no room to round up
  bool finite;

  // largest: its bits.
  __device__ __forceinline__ explicit SplitHalfScale(uint32_t largest) : finite(largest < 0x7f800000u) {
    exponent = largest == 0 || !finite ? 0 : ilogbf(__uint_as_float(largest)) - 14;
    // In two steps, as 2^-exponent may be out of float's range.
    first_ = power_of_two(-exponent / 2);
    second_ = power_of_two(-exponent - -exponent / 2);
  }

  // x becomes x / 2^exponent, which is to be rounded to the high term, low what that leaves, to be rounded as well. Returns what
  // both leave of an element so small that low is subnormal, where it is no share of the element: 2^-25.
  __device__ __forceinline__ float split(float& x, float& low) const {
    constexpr float kLowNormal = 0.25f;
    x = x * first_ * second_;
    low = x - __half2float(__float2half_rn(x));
    return fabsf(x) < kLowNormal ? low - __half2float(__float2half_rn(low)) : 0.0f;
  }

 private:
  static __device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }
  float first_, second_;
};

}  // namespace attention_ext
