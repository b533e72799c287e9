// The tile policy of the row kernels for Hopper: one table of head-dim classes, and the grid. The kernels, their launcher and
// their estimates read it here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"

namespace attention_ext {

// What a class of head dims bounds. Columns of E and Ev that a problem lacks are zeros, and are multiplied.
struct RowsTileShape {
  int query_steps;  // of 64 of E
  int value_steps;  // of 64 of Ev
  int keys;         // of a block: as many as registers hold scores and weights of next to the output
  int queries;      // tiles of queries in shared memory: with two, the next one comes while this one is worked on
  int stages;       // of keys and of values
  bool turns;       // whether warpgroups take turns at issuing products: where these are short
  bool own_strips;  // whether results go out through a place of their own, and not the query's: where there is room
  int block_ns;     // that a block of keys takes, with 64 or 128 rows; measured
};

// Shared memory: query 128 bytes a row and step, a stage 128 bytes a key and step, a strip 2 KB a warp, within 227 KB.
// Class 160: E up to 192 and Ev up to 128.
constexpr RowsTileShape rows_tile_shape(int head_dim_class) {
  switch (head_dim_class) {
    case 64: return {1, 1, 128, 2, 4, true, true, 1350};    // at most 2 x 24 + 4 x 32 + 24 KB
    case 128: return {2, 2, 128, 2, 2, true, true, 1600};   // 2 x 32 + 2 x 64 + 16 KB
    case 160: return {3, 2, 128, 1, 2, true, true, 1850};   // 48 + 2 x 80 + 16 KB
    case 192: return {3, 3, 112, 1, 2, true, false, 1970};  // 48 + 2 x 84 KB
    default: return {4, 4, 80, 1, 2, false, false, 1820};   // 64 + 2 x 80 KB
  }
}

constexpr int rows_class(int64_t E, int64_t Ev) {
  const int64_t width = std::max(E, Ev);
  return width <= 64 ? 64 : width <= 128 ? 128 : width > 192 ? 256 : Ev <= 128 ? 160 : 192;
}

constexpr int kMostRows = 128;  // of a tile of every class; 64 for each consumer warpgroup

// Rows of a tile: whole queries of all heads of the group, which is how TMA brings them.
constexpr int rows_of_tile(int rows, int group) { return rows / group * group; }

struct RowsGrid {
  int rows;  // of a tile, for rows_of_tile
  int64_t tiles, rounds;
  int64_t block_ns;
};

// Up to head dim 64 a third warpgroup fits, whose softmax hides under the others' products; not where its rows would be empty, nor
// the registers of the general instance, that for masks and dropout.
inline RowsGrid rows_grid(int head_dim_class, bool general, int64_t N, int group, int64_t L, int64_t sms) {
  const auto grid = [&](int rows, int64_t block_ns) {
    const int64_t tiles = N / group * ceil_div(L * group, rows_of_tile(rows, group));
    return RowsGrid{rows, tiles, ceil_div(tiles, sms), block_ns};
  };
  const RowsGrid narrow = grid(128, rows_tile_shape(head_dim_class).block_ns), wide = grid(192, 1700);
  return head_dim_class == 64 && !general && wide.rounds * wide.block_ns < narrow.rounds * narrow.block_ns ? wide : narrow;
}

// Of a mask, what is hidden is looked up in advance (attention/sm90/rows/mark.cuh): for so many queries and a block of keys.
constexpr int kMarkedRows = 64;

struct RowsMarkSizes {
  int64_t rows, blocks;
  int64_t cells;  // of a matrix, bytes; 0: nothing is looked up
};
constexpr RowsMarkSizes rows_mark_sizes(bool masked, int64_t L, int64_t S, int keys) {
  RowsMarkSizes sizes = {ceil_div(L, kMarkedRows), ceil_div(S, keys), 0};
  if (masked && S >= 4 * keys) sizes.cells = sizes.rows * sizes.blocks;  // of fewer blocks few can be left out
  return sizes;
}

}  // namespace attention_ext
