// The online softmax: a row's softmax over one block of keys after another, with a running maximum, the reference, and the sum of
// the exponentials relative to it (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
#pragma once

#include "device/common/math.cuh"

namespace attention_ext {

// What a block leaves of a row: the reference of its weights, and the factor that takes what came before to it.
struct RowReference {
  float reference, factor;
};

// Before the first block.
__device__ __forceinline__ RowReference no_reference() { return {negative_infinity(0.0f), 1.0f}; }

// Scores x of a block -> weights 2^((x - reference) * unit), for one of the two rows of a fragment as wgmma leaves it
// (score_modifier.cuh). `before`: of the block before this one. sum: of this thread's own weights of the row; it was relative to
// the reference before that.
template <int kCount>
__device__ __forceinline__ RowReference make_weights(float (&x)[kCount], int half, float unit, const RowReference& before,
                                                     float& sum) {
  float max = negative_infinity(0.0f);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) max = maximum(max, maximum(x[i + 2 * half], x[i + 2 * half + 1]));
  max = warp_max<4>(max);                                  // over the lanes of the row
  const float reference = maximum(max, before.reference);  // -inf where no key was visible so far; NaN is left to the weights
  const float subtract = reference == negative_infinity(0.0f) ? 0.0f : reference;
  const float factor = before.reference == reference ? 1.0f : exp2_difference(before.reference, subtract, unit);
  float added = 0.0f;
#pragma unroll
  for (int i = 2 * half; i < kCount; i += 4) {
    x[i] = exp2_difference(x[i], subtract, unit);
    x[i + 1] = exp2_difference(x[i + 1], subtract, unit);
    added += x[i] + x[i + 1];
  }
  sum = sum * (before.factor * factor) + added;
  return {reference, factor};
}

// The log-sum-exp of a row from the reference of its weights and their sum: -inf for a row without a visible key.
template <class Acc>
__device__ __forceinline__ Acc log_sum_exp(Acc reference, Acc sum) {
  return sum == Acc(0) ? negative_infinity(Acc(0)) : reference + natural_log(sum);
}

}  // namespace attention_ext
