// Philox4x32-7 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"): of their generators of four words
// the one with the fewest rounds that passes BigCrush.
#pragma once

#include <cstdint>

namespace attention_ext {

struct RandomWords {
  uint32_t word[4];
};

__device__ __forceinline__ RandomWords philox(uint2 key, uint4 counter) {
  constexpr uint32_t kMultiply0 = 0xD2511F53u, kMultiply1 = 0xCD9E8D57u;  // from the paper's table 2
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;          // golden ratio, sqrt(3) - 1
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint32_t high0 = __umulhi(kMultiply0, counter.x), low0 = kMultiply0 * counter.x;
    const uint32_t high1 = __umulhi(kMultiply1, counter.z), low1 = kMultiply1 * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key.x += kWeyl0;
    key.y += kWeyl1;
  }
  return {{counter.x, counter.y, counter.z, counter.w}};
}

}  // namespace attention_ext
