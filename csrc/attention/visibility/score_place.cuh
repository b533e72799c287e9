// Where a block tile lies in the scores of its slice, for the kernels that work on all of them; and which tiles there are, for CTAs
// that stay and take every n-th.
#pragma once

#include "attention/visibility/key_range.cuh"
#include "core/slice.h"
#include "gemm/tile_order.cuh"

namespace attention_ext {

struct ScorePlace {
  int64_t n, slice_index;    // the matrix
  int slice_row, slice_col;  // of the tile's first element, from the beginning of the slice
  int row, col;              // the same as query and key numbers
  int rows, cols;            // that exist from there on
  KeyRange range;            // of the slice's keys
  bool hidden;               // from all of the tile's rows
};

// Index: of matrices; uint32_t where N is known to fit.
template <class Tile, class Index = int64_t>
__device__ __forceinline__ ScorePlace score_place(const Slice& slice, const Sequence& sequence, const TileIndex& index) {
  ScorePlace at;
  at.n = slice.batch_begin + index.batch;
  at.slice_index = index.batch;
  at.slice_row = index.m * Tile::kM;
  at.slice_col = index.n * Tile::kN;
  at.row = static_cast<int>(slice.row_begin) + at.slice_row;
  at.col = static_cast<int>(slice.col_begin) + at.slice_col;
  at.rows = static_cast<int>(slice.row_count) - at.slice_row;
  at.cols = static_cast<int>(slice.col_count) - at.slice_col;
  at.range = key_range(sequence, static_cast<Index>(at.n), slice.col_begin + slice.col_count);
  at.hidden = at.col >= at.range.end_of_tile(at.row, Tile::kM);
  return at;
}

// The tiles of a slice's scores, matrix after matrix and in the order of tile_of, without those above the diagonal of a causal
// call: if these had numbers too, some CTAs that take every n-th tile would meet many of them and some none.
// kAllKeys: the slice's keys begin with the first; to know it saves registers.
template <class Tile, bool kAllKeys>
struct ScoreTiles {
  static constexpr int kRatio = Tile::kN / Tile::kM;
  static_assert(Tile::kN % Tile::kM == 0 && kRatio <= 2, "kRatio row tiles more see a column tile more");

  __host__ __device__ constexpr ScoreTiles(const Slice& slice, bool causal)
      : above_(!kAllKeys && causal && slice.col_begin > slice.row_begin
                   ? static_cast<int>((slice.col_begin - slice.row_begin) / Tile::kM)
                   : 0),
        m_tiles(static_cast<int>((slice.row_count + Tile::kM - 1) / Tile::kM) - above()),
        n_tiles(static_cast<int>((slice.col_count + Tile::kN - 1) / Tile::kN)),
        first_(causal ? static_cast<int>((first_key_row(slice) + Tile::kM + Tile::kN - 1) / Tile::kM) : kRatio * n_tiles) {}

  __host__ __device__ constexpr unsigned of_matrix() const { return before(m_tiles); }

  __device__ __forceinline__ TileIndex at(unsigned tile) const {
    constexpr int kGroup = 8;  // of row tiles, as in tile_of
    const unsigned batch = tile / of_matrix();
    tile -= batch * of_matrix();
    int group = 0;
    for (int end = (m_tiles + kGroup - 1) / kGroup; end - group > 1;) {
      const int middle = (group + end) / 2;
      (before(middle * kGroup) <= tile ? group : end) = middle;
    }
    const int begin = group * kGroup, rows = min(m_tiles - begin, kGroup);
    int in_group = static_cast<int>(tile - before(begin)), n = columns(begin);
    if (in_group < n * rows) return {batch, above() + begin + in_group % rows, in_group / rows};
    // Columns that only the last of the group's row tiles see.
    in_group -= n * rows;
    for (;; ++n) {
      const int m = kRatio * (n + 1) - first_, seen = begin + rows - m;
      if (in_group < seen) return {batch, above() + m + in_group, n};
      in_group -= seen;
    }
  }

 private:
  __host__ __device__ constexpr int above() const { return kAllKeys ? 0 : above_; }
  // The first row that counts, from the slice's first key.
  __host__ __device__ constexpr int64_t first_key_row(const Slice& slice) const {
    return kAllKeys ? slice.row_begin : slice.row_begin + above_ * Tile::kM - slice.col_begin;
  }
  // Column tiles that row tile m sees.
  __host__ __device__ constexpr int columns(int m) const {
    const int seen = (first_ + m) / kRatio;
    return seen < n_tiles ? seen : n_tiles;
  }
  // Tiles of the matrix's row tiles before m.
  __host__ __device__ constexpr unsigned before(int m) const {
    const int all = kRatio * n_tiles - first_, some = all < 0   ? 0
                                                      : all < m ? all
                                                                : m;  // of the row tiles: those that do not see all
    return shares(first_ + some) - shares(first_) + static_cast<unsigned>(m - some) * n_tiles;
  }
  // The sum of i / kRatio over [0, end), end at least 1.
  static __host__ __device__ constexpr unsigned shares(int end) {
    return kRatio == 2 ? static_cast<unsigned>(end / 2) * static_cast<unsigned>((end - 1) / 2)
                       : static_cast<unsigned>(end) * static_cast<unsigned>(end - 1) / 2;
  }

  // Row tiles that see none of the slice's keys, and, counted from the first that does, row tiles, column tiles, and what makes
  // row tile m see (first_ + m) / kRatio column tiles, or all there are.
  int above_, m_tiles, n_tiles, first_;
};

// Whether all rows and keys of the tile exist, and every row sees every key.
template <class Tile>
__device__ __forceinline__ bool wholly_visible(const ScorePlace& at) {
  return at.rows >= Tile::kM && at.col + Tile::kN <= at.range.end_of_row(at.row);
}

}  // namespace attention_ext
