// dS as two half terms, as sums read it (MaskGradParams::score_exponents).
#pragma once

#include "device/common/types.cuh"
#include "gemm/split_half/epilogue.cuh"
#include "gemm/split_half/params.h"

namespace attention_ext {

// Where a float would lie: 64 columns of a row are 64 high terms, then 64 low ones, in units of 2^exponent of their tile.
struct ScoreTerms {
  float place;
};

// Adds a warp's columns of a row from `begin` on, nothing from `end` on: a lane has quads of columns, 128 columns apart. g_row: of
// whole tiles; g_exponents: of its tiles. Loads of kAtOnce quads are begun before one is waited for.
template <int kAtOnce, int kQuads>
__device__ __forceinline__ void add_terms(float (&sums)[kQuads][4], const ScoreTerms* g_row, const int32_t* g_exponents,
                                          int begin, int end) {
  constexpr int kBlock = kSplitHalfBlock;
  const int first = begin + static_cast<int>(threadIdx.x) % 32 * 4, in_block = first % kBlock;
  const int left = end - first;  // what is compared with it are constants
  const ScoreTerms* g_block = g_row + (first - in_block);
  const __half* g_high = reinterpret_cast<const __half*>(g_block) + in_block;
  g_exponents += first / kBlock;
#pragma unroll
  for (int begin_q = 0; begin_q < kQuads; begin_q += kAtOnce) {
    int exponents[kAtOnce];
    uint2 high[kAtOnce], low[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int col = (begin_q + i) * 128;
      exponents[i] = kRowOfZeros;
      high[i] = low[i] = {};
      if (col >= left) continue;
      exponents[i] = g_exponents[col / kBlock];
      high[i] = *reinterpret_cast<const uint2*>(g_high + 2 * col);
      low[i] = *reinterpret_cast<const uint2*>(g_high + 2 * col + kBlock);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int col = (begin_q + i) * 128;
      float x[4];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint32_t high_pair = pair == 0 ? high[i].x : high[i].y, low_pair = pair == 0 ? low[i].x : low[i].y;
        const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&high_pair)),
                     b = __half22float2(*reinterpret_cast<const __half2*>(&low_pair));
        x[2 * pair] = times_power_of_two(a.x + b.x, exponents[i]);
        x[2 * pair + 1] = times_power_of_two(a.y + b.y, exponents[i]);
      }
      if (exponents[i] == kTileOfFloats) {  // what two terms were not enough for
        load_quad<float>(x, reinterpret_cast<const float*>(g_block + col), in_block, kBlock, 1, true);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[begin_q + i][e] += col + e < left ? x[e] : 0.0f;
    }
  }
}

}  // namespace attention_ext
