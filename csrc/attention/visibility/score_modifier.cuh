// What turns scaled products into scores: mask, causal, keys that do not exist. For the kernels whose epilogue does it.
#pragma once

#include <type_traits>

#include "attention/pipeline/params.h"
#include "attention/visibility/score_place.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"

namespace attention_ext {

// x[e] += mask, or -inf where a bool mask is False, for columns col .. col + kCount - 1 below col_end of the mask's row.
template <class Stored, class Acc, int kCount>
__device__ __forceinline__ void add_mask(Acc (&x)[kCount], const MatrixView& mask, int64_t row_offset, int col, int col_end) {
  const Stored* g_mask = static_cast<const Stored*>(mask.data) + row_offset;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (col + e >= col_end) continue;
    const Stored stored = g_mask[(col + e) * mask.col_stride];
    if constexpr (std::is_same_v<Stored, uint8_t>) {
      if (stored == 0) x[e] = negative_infinity(Acc(0));
    } else {
      x[e] += static_cast<Acc>(to_accumulator(stored));
    }
  }
}

// x: the scaled products of adjacent columns of a tile, in; their scores, out: masked, -inf where a key is hidden or does not exist.
template <class T, class Acc, int kCount>
__device__ __forceinline__ void finish_scores(const QkScoresParams& p, const ScorePlace& at, int64_t mask_offset, int tile_row,
                                              int tile_col, Acc (&x)[kCount]) {
  const int row = at.row + tile_row, col = at.col + tile_col, col_end = at.col + at.cols;
  const int64_t mask_row = mask_offset + row * p.mask.row_stride;
  switch (p.mask_type) {
    case MaskType::kNone: break;
    case MaskType::kBool: add_mask<uint8_t>(x, p.mask, mask_row, col, col_end); break;
    case MaskType::kSameAsQuery: add_mask<T>(x, p.mask, mask_row, col, col_end); break;
    case MaskType::kFloat: add_mask<float>(x, p.mask, mask_row, col, col_end); break;
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if ((p.causal && col + e > row) || col + e >= col_end) x[e] = negative_infinity(Acc(0));
  }
}

}  // namespace attention_ext
