// What the row kernel of the fused backward finds of a row on its first walk over the keys.
#pragma once

#include "attention/sm90/split_half/segment_weights.cuh"

namespace attention_ext {

// A sum with what its additions round away (Knuth's TwoSum): an error of delta is one of all of a row's dS.
struct CompensatedSum {
  float sum = 0.0f, rest = 0.0f;
  __device__ __forceinline__ void add(float part) {
    part += rest;
    const float total = sum + part, of_part = total - sum;
    rest = (sum - (total - of_part)) + (part - of_part);
    sum = total;
  }
  __device__ __forceinline__ void scale(float factor) {
    sum *= factor;
    rest *= factor;
  }
  __device__ __forceinline__ double of_row() const { return warp_sum<4>(static_cast<double>(sum) + rest); }
};

// What the first walk finds of a row: of all its weights, relative to 2^reference. Sums are of this thread's keys.
struct RowSums {
  float reference = negative_infinity(0.0f);
  CompensatedSum sum, delta;
  float single = 0.0f;  // dP of the row's only key, if it sees no other
  float keys = 0.0f;    // that it sees, if there is a mask

  // What came before is brought to a segment's reference, if that is larger. Returns the offset of the segment's exponents.
  __device__ __forceinline__ float step(float largest, float unit) {
    const bool none = largest == negative_infinity(0.0f);
    const float of_segment = none ? largest : maximum(ceilf(largest * unit), kFarBelow), now = maximum(reference, of_segment);
    const float factor = segment_factor(reference, now);
    sum.scale(factor);
    delta.scale(factor);
    reference = now;
    return now == negative_infinity(0.0f) ? 0.0f : -now;
  }
};

}  // namespace attention_ext
