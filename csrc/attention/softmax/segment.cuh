// How stage 1 makes exponentials of a segment of 64 keys: relative to a reference that the segments of a row mostly share.
#pragma once

#include "core/slice.h"
#include "device/common/math.cuh"

namespace attention_ext {

// The reference of a segment with this maximum: kReferenceStep. -inf stays -inf.
__device__ __forceinline__ float segment_reference(float max) { return floorf(max * (1.0f / kReferenceStep)) * kReferenceStep; }

// e^(scale * x - reference) is 2^(x * unit - offset), one multiply-add, where scores are below this: the roundings of unit and
// offset then come to 1.5e-4 of an exponent at most, twice that of a score itself. Above, the difference has to come before the
// factor: it is exact, and 0 where score and reference are equal.
constexpr float kLargeScore = 1024.0f;

// How the products x of a row's segment become exponentials, given the largest of the scores scale * x. Where that is `large`, each
// x is to be replaced by its exponent first.
struct SegmentExponent {
  float reference;
  bool large;

  __device__ __forceinline__ SegmentExponent(float largest_score, float scale) : scale_(scale) {
    reference = segment_reference(largest_score);
    large = !(fabsf(largest_score) < kLargeScore);
    subtract_ = reference == negative_infinity(0.0f) ? 0.0f : reference;  // -inf - -inf never arises
    unit_ = large ? 1.0f : scale * kLog2E;
    offset_ = large ? 0.0f : subtract_ * kLog2E;
  }
  // Of the score as it was rounded when the largest was found: a multiply-add would leave half a unit of its last place, beyond any
  // e^x.
  __device__ __forceinline__ float exponent(float x) const { return (__fmul_rn(scale_, x) - subtract_) * kLog2E; }
  __device__ __forceinline__ float weight(float x) const { return exp2_approx(fmaf(x, unit_, -offset_)); }

 private:
  float scale_, subtract_, unit_, offset_;
};

}  // namespace attention_ext
