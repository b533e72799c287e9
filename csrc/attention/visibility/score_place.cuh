// Where a block tile lies in the scores of its slice, for the kernels that work on all of them.
#pragma once

#include "core/slice.h"
#include "gemm/tile_order.cuh"

namespace attention_ext {

struct ScorePlace {
  int64_t n, slice_index;    // the matrix
  int slice_row, slice_col;  // of the tile's first element, from the beginning of the slice
  int row, col;              // the same as query and key numbers
  int rows, cols;            // that exist from there on
  bool hidden;               // wholly above the diagonal
};

template <class Tile>
__device__ __forceinline__ ScorePlace score_place(const Slice& slice, bool causal, const TileIndex& index) {
  ScorePlace at;
  at.n = slice.batch_begin + index.batch;
  at.slice_index = index.batch;
  at.slice_row = index.m * Tile::kM;
  at.slice_col = index.n * Tile::kN;
  at.row = static_cast<int>(slice.row_begin) + at.slice_row;
  at.col = static_cast<int>(slice.col_begin) + at.slice_col;
  at.rows = static_cast<int>(slice.row_count) - at.slice_row;
  at.cols = static_cast<int>(slice.col_count) - at.slice_col;
  at.hidden = causal && at.col > at.row + Tile::kM - 1;
  return at;
}

}  // namespace attention_ext
