// The end of a tile of the fused forward: the rows' sums; then log-sum-exp and output, or what a piece of the keys leaves.
// `row`: of this thread's first element in a 64 x n product; its other row is 8 below.
#pragma once

#include "attention/params.h"
#include "attention/sm90/fused/weights.cuh"
#include "attention/softmax/online_softmax.cuh"
#include "gemm/sm90/strip.cuh"

namespace attention_ext {

// sum: of this thread's own weights of its rows, in; of all weights of both warpgroups, out.
template <class Tile>
__device__ __forceinline__ void sum_rows(typename Tile::Shared& shared, int consumer, int row, float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    if (threadIdx.x % 4 == 0) shared.sum[consumer][row + 8 * half] = sum[half];
  }
  barrier_sync(kBarrierConsumers, 128 * Tile::kConsumers);
#pragma unroll
  for (int half = 0; half < 2; ++half) sum[half] = shared.sum[0][row + 8 * half] + shared.sum[1][row + 8 * half];
  barrier_sync(kBarrierConsumers, 128 * Tile::kConsumers);  // the sums are read, the next tile may write
}

// The log-sum-exp of a thread's rows to memory; s_reference: of the last block, which times `scale` is a score. The product is
// rounded, as the compiler would otherwise fuse it into the sum for one of the two rows and not for the other.
// It is read after the last barrier: warpgroup 1 writes its own anew only after warpgroup 0 has made the first weights of the next
// tile, and so has left this one.
__device__ __forceinline__ void store_lse(const ForwardParams& p, const FusedWork& work, const float* s_reference, float scale,
                                          int row, const float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half, row += 8) {
    if (threadIdx.x % 4 == 0 && row < work.rows) {
      static_cast<float*>(p.lse.data)[work.offset_of_row(p.batch, p.lse, row)] =
          log_sum_exp(__fmul_rn(s_reference[row], scale), sum[half]);
    }
  }
}

// out / sum to memory, columns from first_column on. s_strip: the warp's own rows of a tile in shared memory that nobody reads any
// more.
template <class Tile>
__device__ __forceinline__ void store_out(const ForwardParams& p, const FusedWork& work, uint32_t s_strip, int row,
                                          const float (&sum)[2], const float (&out)[32 * Tile::kValueSteps], int first_column) {
  using T = typename Tile::T;
  float row_factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float keep_scale = p.dropout.seed != nullptr ? static_cast<float>(p.dropout.keep_scale) : 1.0f;
    row_factor[half] = sum[half] == 0.0f ? 0.0f : keep_scale / sum[half];
  }
  const int lane = threadIdx.x % 32, warp_row = row - lane / 4;
  const int64_t found = work.offset_of_row(p.batch, p.out, warp_row + lane % 16);  // every lane finds a row's place
#pragma unroll
  for (int strip = 0; strip < Tile::kValueSteps; ++strip) {
    float values[Tile::kStep / 2];
#pragma unroll
    for (int i = 0; i < Tile::kStep / 2; ++i) {
      const float factor = row_factor[i / 2 % 2];
      values[i] = factor == 0.0f ? 0.0f : out[strip * (Tile::kStep / 2) + i] * factor;
    }
    for_each_chunk<T, 1>(values, s_strip, [&](int chunk_row, int chunk_col, const T* chunk) {
      T* g_row = static_cast<T*>(p.out.data) + __shfl_sync(0xffffffffu, found, chunk_row);
      const int col = first_column + strip * Tile::kStep + chunk_col, cols = static_cast<int>(p.Ev);
      if (warp_row + chunk_row < work.rows && col < cols) store_chunk(g_row, col, cols, p.out, chunk);
    });
  }
}

// What a piece of the keys has summed, for combine_pieces. s_reference: of the last block, read when store_lse would. Shares of
// columns have the same references and sums, which the first one writes. A piece without a block has no reference.
template <class Tile>
__device__ __forceinline__ void leave_piece(const ForwardParams& p, const KeyPieces& pieces, const FusedWork& work,
                                            const float* s_reference, int consumer, int row, int col, const float (&sum)[2],
                                            const float (&out)[32 * Tile::kValueSteps]) {
  const int first_column = work.first_column + consumer * Tile::kValueSteps * Tile::kStep;
  const int64_t first_row = static_cast<int64_t>(work.piece) * (static_cast<int>(p.L) * work.group);
#pragma unroll
  for (int half = 0; half < 2; ++half, row += 8) {
    if (row >= work.rows) continue;
    const float reference = sum[half] == 0.0f ? negative_infinity(0.0f) : s_reference[row];
    leave_row<8 * Tile::kValueSteps>(pieces, first_row + row, reference, sum[half], first_column, col,
                                     [&](int i) { return &out[4 * i + 2 * half]; });
  }
}

}  // namespace attention_ext
