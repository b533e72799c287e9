// Which heads the backward makes anew in float.
#pragma once

#include "attention/sm90/split_half/backward.h"
#include "attention/sm90/split_half/exact_products.cuh"

namespace attention_ext {

// Whether a head is marked, or what its terms leave out may be too much for scores, or more than 2^-21 of the largest product of
// grad_out and value that there is: their norms, which one column may make by itself, do not tell.
__device__ __forceinline__ bool needs_exact(const SplitHalfExactBackwardParams& p, int64_t n) {
  const int64_t of_key = n / p.call.key_group * p.call.key_group;
  const SplitHalfFacts query = p.query[n], grad_out = p.grad_out[n], key = p.key[of_key], value = p.value[of_key];
  const float kept = p.call.dropout.seed == nullptr ? 1.0f : static_cast<float>(p.call.dropout.keep_scale);
  const bool enough_grads = left_out(grad_out, value) * kept <= 0x1p-21f * __uint_as_float(p.largest_grads[n]);
  return scores_need_exact(p.call, query, key) || !enough_grads || p.marks[n] != 0 || value.exact != 0 || grad_out.exact != 0;
}
__device__ __forceinline__ bool any_needs_exact(const SplitHalfExactBackwardParams& p, int64_t key_head) {
  bool any = false;
  for (int64_t head = 0; head < p.call.key_group; ++head) any = any || needs_exact(p, key_head * p.call.key_group + head);
  return any;
}

__device__ __forceinline__ float exact_probability(float score, float max, float sum) {
  return score == negative_infinity(0.0f) ? 0.0f : expf(score - max) / sum;
}

}  // namespace attention_ext
