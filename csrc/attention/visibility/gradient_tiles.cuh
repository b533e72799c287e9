// The tiles of the backward's three products over one slice, dQ = dS . K, dK = dS^T . Q and dV = P^T . dO: one list, which CTAs
// that stay take from, and where each tile lies.
//
// dK and dV are sums over the rows of one query head of a key head after the other, from the first row tile that sees a key of the
// tile; dQ is a sum over the keys that a row of the tile sees. Order: of equally long tiles head by head, so that dK and dQ read dS
// together; else the longest first.
#pragma once

#include <algorithm>

#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/slice.h"

namespace attention_ext {

// Tile: kM by kN results, kK of the sum a step.
template <class Tile>
struct GradientTiles {
  struct Index {
    int of;         // which gradient
    unsigned head;  // key head or, of dQ, matrix, from the beginning of the slice
    int m, n;
  };
  struct Place {
    int of;
    unsigned n, slice_index;  // of the tile's first query head
    int m, col;               // of the tile's first element; m from the beginning of the slice
    int ms, cols;             // that exist from there on
    int k_begin;              // row or key, from the beginning of the slice
    int steps;                // of a query head
    int last_rows;            // of the other operand, that count in the last step
  };

  unsigned key_heads, matrices, group;  // groups, query heads, and these of a group
  int key_tiles, row_tiles;             // of a matrix, along m
  int key_columns, value_columns;       // tiles along n
  int E, Ev;
  bool by_head, in_turn, rows_first;

  // of_sum: query heads that a sum of dK or dV goes over, those of a key head or an equal part of them. The slice has a whole
  // number of such groups, or a part of one. of_rows, of_keys: whether to make dQ; dK and dV.
  GradientTiles(const Slice& slice, bool causal, int64_t of_sum, int64_t E, int64_t Ev, bool of_rows, bool of_keys)
      : E(static_cast<int>(E)), Ev(static_cast<int>(Ev)) {
    const auto tiles = [](int64_t length, int64_t of_tile) { return static_cast<int>(ceil_div(length, of_tile)); };
    const int64_t heads = of_keys ? std::min(of_sum, slice.batch_count) : 1, length = heads * slice.row_count;
    matrices = static_cast<unsigned>(slice.batch_count);
    group = static_cast<unsigned>(heads);
    key_heads = matrices / group;
    key_tiles = of_keys ? tiles(slice.col_count, Tile::kM) : 0;
    row_tiles = of_rows ? tiles(slice.row_count, Tile::kM) : 0;
    key_columns = tiles(E, Tile::kN);
    value_columns = tiles(Ev, Tile::kN);
    in_turn = length <= 2 * slice.col_count && slice.col_count <= 2 * length;  // sums are about as long
    by_head = in_turn && !causal;
    rows_first = slice.col_count > length;
  }
  __host__ __device__ unsigned of_key() const { return static_cast<unsigned>(key_columns + value_columns); }
  __host__ __device__ unsigned all() const {
    return key_heads * key_tiles * of_key() + matrices * row_tiles * static_cast<unsigned>(key_columns);
  }

  // keys: that there are, up to the end of the slice's. batch_begin: of the matrices that are listed, if not the slice's.
  __device__ __forceinline__ Place place(unsigned tile, const Slice& slice, const Sequence& sequence, int64_t keys) const {
    return place(tile, slice, sequence, keys, slice.batch_begin);
  }
  __device__ __forceinline__ Place place(unsigned tile, const Slice& slice, const Sequence& sequence, int64_t keys,
                                         int64_t batch_begin) const {
    const Index index = at(tile);
    const bool is_row = index.of == kGradQuery;
    Place place;
    place.of = index.of;
    place.slice_index = is_row ? index.head : index.head * group;
    place.n = static_cast<unsigned>(batch_begin) + place.slice_index;
    place.m = index.m * Tile::kM;
    place.col = index.n * Tile::kN;
    place.ms = static_cast<int>(is_row ? slice.row_count : slice.col_count) - place.m;
    place.cols = (index.of == kGradValue ? Ev : E) - place.col;
    const int row_begin = static_cast<int>(slice.row_begin), col_begin = static_cast<int>(slice.col_begin);
    const KeyRange range = key_range(sequence, place.n, keys);
    int end;
    if (is_row) {
      place.k_begin = 0;
      end = range.end_of_tile(row_begin + place.m, Tile::kM) - col_begin;
    } else {
      // Tiles of scores above this one were not written, as no row of theirs sees a key of this tile.
      place.k_begin = max(range.first_row(col_begin + place.m) - row_begin, 0) / Tile::kM * Tile::kM;
      end = static_cast<int>(slice.row_count);
    }
    const int ks = max(end - place.k_begin, 0);
    place.steps = (ks + Tile::kK - 1) / Tile::kK;
    // Keys from the batch row's last one on are not to be read, whatever memory holds there: a dS of 0 would not hide NaN.
    place.last_rows = is_row && sequence.key_lengths != nullptr ? ks - (place.steps - 1) * Tile::kK : Tile::kK;
    return place;
  }

 private:
  __device__ __forceinline__ Index at(unsigned tile) const {
    if (by_head) {  // dV, dK, then dQ of the key head's query heads
      const unsigned keys = key_tiles * of_key(), rows = group * row_tiles * key_columns;
      const unsigned head = tile / (keys + rows), in_head = tile - head * (keys + rows);
      if (in_head < keys) {
        const unsigned values = static_cast<unsigned>(key_tiles * value_columns);
        if (in_head < values) return split(kGradValue, head, in_head, value_columns);
        return split(kGradKey, head, in_head - values, key_columns);
      }
      const unsigned in_rows = in_head - keys, row_tile = in_rows / key_columns;
      const unsigned matrix = row_tile / row_tiles;
      return {kGradQuery, head * group + matrix, static_cast<int>(row_tile - matrix * row_tiles),
              static_cast<int>(in_rows - row_tile * key_columns)};
    }
    // The first keys and the last rows have the longest sums: these come first, in turn or all of one kind before the other.
    const unsigned keys = key_heads * of_key(), rows = matrices * key_columns;
    const unsigned turns = in_turn ? static_cast<unsigned>(min(key_tiles, row_tiles)) : 0;
    unsigned m, rest;
    bool is_row;
    if (tile < turns * (keys + rows)) {
      m = tile / (keys + rows);
      rest = tile - m * (keys + rows);
      is_row = rest >= keys;
      if (is_row) rest -= keys;
    } else {
      tile -= turns * (keys + rows);
      const unsigned of_first = rows_first ? (row_tiles - turns) * rows : (key_tiles - turns) * keys;
      is_row = (tile >= of_first) != rows_first;
      if (tile >= of_first) tile -= of_first;
      const unsigned width = is_row ? rows : keys;
      m = tile / width;
      rest = tile - m * width;
      m += turns;
    }
    if (is_row) {
      return {kGradQuery, rest / key_columns, row_tiles - 1 - static_cast<int>(m), static_cast<int>(rest % key_columns)};
    }
    const unsigned head = rest / of_key(), n = rest - head * of_key();
    const bool is_value = n < static_cast<unsigned>(value_columns);
    return {is_value ? kGradValue : kGradKey, head, static_cast<int>(m), static_cast<int>(is_value ? n : n - value_columns)};
  }
  static __device__ __forceinline__ Index split(int of, unsigned head, unsigned in_head, int columns) {
    return {of, head, static_cast<int>(in_head / columns), static_cast<int>(in_head % columns)};
  }
};

}  // namespace attention_ext
