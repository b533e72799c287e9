// Exponential, logarithm and reductions over a warp.
#pragma once

namespace attention_ext {

__device__ __forceinline__ float negative_infinity(float) { return __int_as_float(0xff800000); }
__device__ __forceinline__ double negative_infinity(double) { return __longlong_as_double(0xfff0000000000000LL); }

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Whether products will do for scores until their maxima are known, scale being a factor of their exponents: it is positive as a
// float, and log2(e) times it does not overflow.
__host__ __device__ constexpr bool scales_exponents(float scale) { return scale > 0.0f && scale < 1e30f; }

// 2^x by the special function unit, relative error 2^-22; -inf gives 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// a / b as the operator rounds it, where b and the quotient are far from the ends of float's range: without the operator's call for
// others, around which products of a warpgroup would not stay under way.
__device__ __forceinline__ float quotient(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(inverse) : "f"(b));
  inverse = fmaf(inverse, fmaf(-b, inverse, 1.0f), inverse);
  const float near = a * inverse;
  return fmaf(inverse, fmaf(-b, near, a), near);
}

// 2^((x - reference) * unit). The difference comes first: where the two are equal it is 0 however large they are, which the fused
// multiply-add x * unit - reference * unit is not.
__device__ __forceinline__ float exp2_difference(float x, float reference, float unit) {
  return exp2_approx((x - reference) * unit);
}

// e^(x - reference), as exact as tensors of T ask for: half types by the special function unit. The difference is taken before
// the factor log2 e, which would overflow a score of finfo.min.
template <class T>
__device__ __forceinline__ float exp_difference(float x, float reference) {
  if constexpr (sizeof(T) == 2) {
    return exp2_approx((x - reference) * kLog2E);
  } else {
    return expf(x - reference);
  }
}
template <class T>
__device__ __forceinline__ double exp_difference(double x, double reference) {
  return exp(x - reference);
}

__device__ __forceinline__ float natural_log(float x) { return logf(x); }
__device__ __forceinline__ double natural_log(double x) { return log(x); }

// Drop NaN, as fmaxf does: the row sum keeps it.
__device__ __forceinline__ float maximum(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return fmax(a, b); }

// Over groups of kLanes adjacent lanes; all 32 take part, and all get their group's result. The order of additions is fixed.
template <int kLanes = 32, class A>
__device__ __forceinline__ A warp_max(A x) {
#pragma unroll
  for (int lane_mask = kLanes / 2; lane_mask > 0; lane_mask /= 2) x = maximum(x, __shfl_xor_sync(0xffffffffu, x, lane_mask));
  return x;
}
template <int kLanes = 32, class A>
__device__ __forceinline__ A warp_sum(A x) {
#pragma unroll
  for (int lane_mask = kLanes / 2; lane_mask > 0; lane_mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane_mask);
  return x;
}

}  // namespace attention_ext
