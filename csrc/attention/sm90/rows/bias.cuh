// A bias of the query's dtype on its way to the scores of a consumer warp: 16 rows of a block of keys, read a block ahead.
#pragma once

#include "attention/sm90/rows/tile.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"

namespace attention_ext {

// Where shared memory has room (kBiasStrips) it waits in the warp's strips, from which one instruction brings the pairs of four
// 8 x 8 matrices to the lanes that have these scores. Elsewhere it waits in registers, and lanes exchange it.
template <class Tile>
class RowsBias {
 public:
  using T = typename Tile::T;
  static constexpr int kScores = Tile::kN / 2;

  // g_mask: the block's first key of the mask, which is key `first`; offset(i): to row i of the warp. keys: that the mask has from
  // there on, a multiple of 8; for keys after these its last chunk is read again. from_memory: as RowsOrder has it.
  template <class Offset>
  __device__ __forceinline__ void read(uint32_t s_strip, const T* g_mask, Offset offset, int first, int keys,
                                       bool from_memory) {
    const int lane = threadIdx.x % 32, last = min(keys, Tile::kN) - 8;
    if constexpr (Tile::kBiasStrips) {
#pragma unroll
      for (int step = 0; step < Tile::kN / Tile::kStep; ++step) {
        const T* g_chunk = g_mask + min(step * Tile::kStep + lane % 8 * 8, last);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 8 + 4 * i;  // eight lanes read 128 bytes of a row
          cp_async_16(s_strip + step * Tile::kStripBytes + swizzled(row, lane % 8), g_chunk + offset(row));
        }
      }
      cp_async_commit();
      // Of the block before it, which comes after, a line a lane into L2, as it takes long from memory.
      constexpr int kLine = kLineBytes / sizeof(T), kLines = Tile::kN / kLine;
      static_assert(16 * kLines == 32, "a line a lane");
      if (from_memory && first > 0) prefetch_line(g_mask + offset(lane / kLines) + lane % kLines * kLine - Tile::kN);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) chunks_[half].load(g_mask + offset(lane / 4 + 8 * half), keys);
      keep_order();  // the reads are not to be put off
    }
  }

  // x: scores of the block, scaled.
  __device__ __forceinline__ void add_to(float (&x)[kScores], uint32_t s_strip) const {
    if constexpr (Tile::kBiasStrips) {
      const int lane = threadIdx.x % 32;
      cp_async_wait<0>();
      __syncwarp();  // what the other lanes have read is there
#pragma unroll
      for (int step = 0; step < Tile::kN / Tile::kStep; ++step) {
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk += 2) {
          uint32_t pairs[4];  // rows 0 to 7 and 8 to 15 of a chunk, and of the next one, as scores lie
          load_matrices(s_strip + step * Tile::kStripBytes + swizzled(lane % 16, chunk + lane / 16), pairs);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            add_bias(x, (step * 8 + chunk) * 4 + 2 * i, unpack_pair(pairs[i], static_cast<const T*>(nullptr)));
          }
        }
      }
      __syncwarp();  // the strips have been read
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) chunks_[half].add_to(x, half, static_cast<const T*>(nullptr));
    }
  }

 private:
  BiasChunks<kScores> chunks_[2];
};

}  // namespace attention_ext
