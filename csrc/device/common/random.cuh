// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3") and dropout drawn from
// it.
#pragma once

#include <cstdint>

#include "core/slice.h"

namespace attention_ext {

struct RandomWords {
  uint32_t word[4];
};

__device__ __forceinline__ RandomWords philox(uint2 key, uint4 counter) {
  constexpr uint32_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;  // from the paper's table 2
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;          // golden ratio, sqrt(3) - 1
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(kMultiply0, counter.x), low0 = kMultiply0 * counter.x;
    const uint32_t high1 = __umulhi(kMultiply1, counter.z), low1 = kMultiply1 * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key.x += kWeyl0;
    key.y += kWeyl1;
  }
  return {{counter.x, counter.y, counter.z, counter.w}};
}

// Which of the weights (n, row, 4 quad .. 4 quad + 3) dropout keeps, a bit each, from the lowest.
__device__ __forceinline__ uint32_t kept_of_quad(const Dropout& dropout, int64_t seed, int64_t n, int row, int quad) {
  const uint64_t key = static_cast<uint64_t>(seed), batch = static_cast<uint64_t>(n);
  const RandomWords random = philox(make_uint2(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)),
                                    make_uint4(static_cast<uint32_t>(quad), static_cast<uint32_t>(row),
                                               static_cast<uint32_t>(batch), static_cast<uint32_t>(batch >> 32)));
  uint32_t kept = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) kept |= static_cast<uint32_t>(static_cast<uint64_t>(random.word[e]) >= dropout.threshold) << e;
  return kept;
}

// Sets to zero what dropout drops of the four weights (n, row, col .. col + 3); col is a multiple of 4.
// Forward and backward call this one function, so they drop the same elements whatever their tiles.
template <class A>
__device__ __forceinline__ void drop_quad(A (&weights)[4], const Dropout& dropout, int64_t seed, int64_t n, int row, int col) {
  const uint32_t kept = kept_of_quad(dropout, seed, n, row, col / 4);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if ((kept >> e & 1) == 0) weights[e] = 0;
  }
}

// The same for one of the two rows of a fragment as wgmma leaves it (attention/visibility/score_modifier.cuh), whose keys begin
// with quad `first_quad` of the row. Two lanes hold a quad: one draws for the even quads of both, one for the odd ones. All lanes.
template <int kCount>
__device__ __forceinline__ void drop_fragment(float (&x)[kCount], int half, const Dropout& dropout, int64_t seed, int64_t n,
                                              int row, int first_quad) {
  const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
  for (int i = 2 * half; i < kCount; i += 8) {
    const int quad = first_quad + i / 4 * 2 + threadIdx.x % 4 / 2 + (odd ? 2 : 0);
    const uint32_t keep = kept_of_quad(dropout, seed, n, row, quad);
    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, odd ? keep : keep >> 2, 1);  // what the other lane drew for this one
    const uint32_t first = odd ? theirs : keep, second = odd ? keep >> 2 : theirs;
    if ((first & 1) == 0) x[i] = 0.0f;
    if ((first & 2) == 0) x[i + 1] = 0.0f;
    if ((second & 1) == 0) x[i + 4] = 0.0f;
    if ((second & 2) == 0) x[i + 5] = 0.0f;
  }
}

}  // namespace attention_ext
