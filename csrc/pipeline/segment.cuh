// How stage 1 makes exponentials of a segment of 64 keys: relative to a reference that the segments of a row mostly share.
#pragma once

#include "../device/math.cuh"
#include "../params.h"

namespace attention_ext {

// The reference of a segment with this maximum: kReferenceStep. -inf stays -inf.
__device__ __forceinline__ float segment_reference(float max) { return floorf(max * (1.0f / kReferenceStep)) * kReferenceStep; }

// e^(scale * x - reference) is 2^(x * unit - offset), one multiply-add, where scores are below this: the rounding of offset, half a unit in
// its last place, is then at most 6e-5, as that of a score itself. Above, the difference has to come before the factor: it is exact,
// and 0 where score and reference are equal.
constexpr float kLargeScore = 1024.0f;
constexpr float kLog2E = 1.4426950408889634f;

// What is subtracted from the scores of a segment with this reference: -inf - -inf never arises.
__device__ __forceinline__ float subtrahend(float reference) { return reference == negative_infinity(0.0f) ? 0.0f : reference; }

}  // namespace attention_ext
