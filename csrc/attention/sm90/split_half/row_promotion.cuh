// How a row of out grows, segment of 64 keys by segment: the online softmax with powers of two for references, which are exact.
#pragma once

#include "attention/sm90/split_half/split_half.h"
#include "attention/softmax/online_softmax.cuh"
#include "core/arithmetic.h"
#include "device/common/batch.cuh"
#include "gemm/split_half/epilogue.cuh"

namespace attention_ext {

__device__ __forceinline__ SplitHalfRowState no_keys_yet() { return {negative_infinity(0.0f), 0.0f, -(1 << 30), 0}; }

// A row's power of two, sum and their changes: what a thread keeps of one of its two rows.
struct RowPromotion {
  SplitHalfRowState state;
  float factor;  // of the step's products

  // By a segment whose values have this exponent. Returns what the row so far is to be multiplied by.
  __device__ __forceinline__ float step(const SplitHalfSegment& segment, int exponent) {
    if (segment.reference == negative_infinity(0.0f)) {
      factor = 0.0f;
      return 1.0f;
    }
    const float reference = maximum(state.reference, segment.reference);
    state.sum =
        state.sum * exp2_approx(state.reference - reference) + fabsf(segment.sum) * exp2_approx(segment.reference - reference);
    state.keys = state.keys == 0 && segment.sum < 0.0f ? 1 : 2;
    state.reference = reference;
    const int power = static_cast<int>(segment.reference) + exponent, top = max(state.top, power);
    const float before = relative_to_largest(state.top, top);
    factor = relative_to_largest(power, top);
    state.top = top;
    return before;
  }
};

// What turns a row of products, relative to 2^top, into the row of out.
struct RowResult {
  float quotient;  // 0 for a row that sees no key
  int power;

  RowResult() = default;
  __device__ __forceinline__ RowResult(const SplitHalfRowState& state, float factor) {
    const bool none = state.reference == negative_infinity(0.0f);
    quotient = none ? 0.0f : factor / state.sum;
    power = none ? 0 : state.top - static_cast<int>(state.reference) - 15;
  }
  __device__ __forceinline__ float of(float product) const {
    return quotient == 0.0f ? 0.0f : times_power_of_two(product * quotient, power);
  }
};

// The row's log-sum-exp; marks it where it is to be made anew (SplitHalfStage::marks).
__device__ __forceinline__ void store_row_result(const SplitHalfStage& p, const MatrixView& lse, int64_t n, int64_t row,
                                                 const SplitHalfRowState& state) {
  const bool none = state.reference == negative_infinity(0.0f);
  if (state.keys == 1 || (!none && state.reference < kFarBelow + 256.0f))
    p.marks[n * ceil_div(p.L, kExactRows) + row / kExactRows] = 1;
  static_cast<float*>(lse.data)[batch_offset(p.batch, lse, static_cast<uint32_t>(n), 0) + row * lse.row_stride] =
      none ? state.reference : fmaf(state.reference, kLn2, natural_log(state.sum));
}

}  // namespace attention_ext
