// Zeros in dK and dV for the keys that no query of a causal call sees, where there are more keys than queries.
//
// Memory bounds them, and no tile waits for them: in the row and the column kernel two warps of the loading warpgroup, which have
// nothing else to do, write them while the others multiply. A warp takes pieces of 64 keys of a matrix, 16 bytes a lane where the
// gradient's rows allow.
#pragma once

#include "attention/sm90/rows_backward/rows_backward.h"
#include "device/common/batch.cuh"

namespace attention_ext {

// `rows` rows of zeros, each of so many words, by a warp: as many lanes a row as hold it, up to all.
template <class Word>
__device__ __forceinline__ void write_zeros(Word* g_rows, int rows, int words, int64_t row_stride, int64_t word_stride) {
  const int lane = threadIdx.x % 32, lanes = words > 16 ? 32 : 1 << (32 - __clz(words - 1));
  const int step = 32 / lanes, first = lane / lanes;
  g_rows += first * row_stride + lane % lanes * word_stride;
#pragma unroll 1
  for (int row = first; row < rows; row += step, g_rows += step * row_stride) {
    Word* g_word = g_rows;
#pragma unroll 1
    for (int word = lane % lanes; word < words; word += lanes, g_word += lanes * word_stride) *g_word = Word{};
  }
}

// Of one gradient, with `cols` columns. worker: of as many warps of the launch.
__device__ __forceinline__ void clear_unseen(const RowsBackwardParams& p, const MatrixView& view, int cols, uint32_t worker,
                                             uint32_t workers) {
  const uint32_t pieces = unseen_pieces(p), all = pieces * static_cast<uint32_t>(p.N / p.key_group);
#pragma unroll 1
  for (uint32_t at = worker * p.unseen.shares + p.unseen.share; at < all; at += workers * p.unseen.shares) {
    const uint32_t head = at / pieces;
    const int key = p.unseen.first + static_cast<int>(at - head * pieces) * kUnseenPiece;
    const int rows = min(kUnseenPiece, static_cast<int>(p.S) - key);
    const int64_t place = batch_offset(p.batch, view, head * static_cast<uint32_t>(p.key_group), 0) + key * view.row_stride;
    const int bytes = p.wide_grads ? 4 : 2, of_word = 16 / bytes;  // columns
    if (view.vector && cols % of_word == 0) {
      write_zeros(reinterpret_cast<uint4*>(static_cast<char*>(view.data) + place * bytes), rows, cols / of_word,
                  view.row_stride / of_word, 1);
    } else if (p.wide_grads) {
      write_zeros(static_cast<uint32_t*>(view.data) + place, rows, cols, view.row_stride, view.col_stride);
    } else {
      write_zeros(static_cast<uint16_t*>(view.data) + place, rows, cols, view.row_stride, view.col_stride);
    }
  }
}

// The launch's share of them. By warps 2 and 3 of the loading warpgroup.
__device__ __forceinline__ void clear_unseen(const RowsBackwardParams& p, int warp) {
  if (p.unseen.shares == 0) return;
  const uint32_t worker = blockIdx.x * kUnseenWarps + warp - 2, workers = gridDim.x * kUnseenWarps;
  clear_unseen(p, p.grad_key, static_cast<int>(p.E), worker, workers);
  clear_unseen(p, p.grad_value, static_cast<int>(p.Ev), worker, workers);
}

}  // namespace attention_ext
