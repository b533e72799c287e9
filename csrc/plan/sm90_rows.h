// The tile policy of the row kernels for Hopper: one table of head-dim classes, and the grid. The kernels, their launcher and
// their estimates read it here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"
#include "plan/key_pieces.h"
#include "plan/problem.h"

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
  int bias_blocks;  // of a bias for 128 rows, that wait in shared memory in place of the strips; 0: it waits in registers
  int block_ns;     // that a block of keys takes, with 64 or 128 rows; measured
};

// Shared memory: query 128 bytes a row and step, a stage 128 bytes a key and step, a strip 2 KB a warp or a block of a bias 32 KB,
// within 227 KB.
// Class 160: E up to 192 and Ev up to 128.
constexpr RowsTileShape rows_tile_shape(int head_dim_class) {
  switch (head_dim_class) {
    case 64: return {1, 1, 128, 2, 4, true, true, 2, 1350};    // 2 x 24 + 4 x 32 + 24 KB, or 2 x 16 + 4 x 32 + 2 x 32 KB
    case 128: return {2, 2, 128, 2, 2, true, true, 1, 1600};   // 2 x 32 + 2 x 64 + 32 KB
    case 160: return {3, 2, 128, 1, 2, true, true, 0, 1850};   // 48 + 2 x 80 + 16 KB
    case 192: return {3, 3, 112, 1, 2, true, false, 0, 1970};  // 48 + 2 x 84 KB
    default: return {4, 4, 80, 1, 2, false, false, 0, 1820};   // 64 + 2 x 80 KB
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

// Pieces of the keys of few rows (plan/key_pieces.h).
constexpr int kPieceKeys = 256;  // at least

// A key is read as 2 bytes a column, and a piece's row written and read again as 4. So with more rows pieces are longer; with more
// keys too, as they are enough then.
constexpr KeySplit rows_split(int head_dim_class, int64_t L, int64_t S, int64_t group) {
  if (!keys_split(L, S, group)) return kNotSplit;
  const int by_rows = L * group <= 8 ? 1 : L * group <= 16 ? 2 : 4, by_keys = S <= 4096 ? 1 : S <= 16384 ? 2 : 4;
  const int keys = rows_tile_shape(head_dim_class).keys;
  return split_keys(S, ceil_div(kPieceKeys, keys) * std::max(by_rows, by_keys), keys);
}
static_assert(ceil_div(kMostWgmmaKeys, 4 * kPieceKeys) <= kMostPieces, "a piece of the most keys has a thread");

// Up to head dim 64 a third warpgroup fits, whose softmax hides under the others' products; not where its rows would be empty, nor
// the registers of the general instance, that for masks and dropout.
inline RowsGrid rows_grid(int head_dim_class, bool general, int64_t N, int group, int64_t L, int64_t pieces, int64_t sms) {
  const auto grid = [&](int rows, int64_t block_ns) {
    const int64_t tiles = N / group * ceil_div(L * group, rows_of_tile(rows, group)) * pieces;
    return RowsGrid{rows, tiles, ceil_div(tiles, sms), block_ns};
  };
  if (pieces > 1) return grid(kSplitRows, rows_tile_shape(head_dim_class).block_ns * 5 / 8);
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

// The workspace: what pieces leave, then the marks.
struct RowsWorkspace {
  PiecesWorkspace pieces;
  int64_t mark_bytes;  // 0: nothing is looked up
  int64_t bytes() const { return pieces.bytes() + mark_bytes; }
};
struct RowsProblem {
  int64_t N, L, S, E, Ev, group;
  bool masked, mask_rows;  // mask_rows: rows of the mask differ
  int64_t mask_matrices;   // that it has of its own
};
inline RowsProblem rows_problem(const Problem& p) {
  return {p.N, p.L, p.visible_keys(), p.E, p.Ev, p.key_group, p.mask != MaskType::kNone, p.mask_rows, p.mask_matrices};
}
inline RowsWorkspace rows_workspace_of(const RowsProblem& p, int64_t cap) {
  const int head_dim_class = rows_class(p.E, p.Ev);
  const KeySplit split = rows_split(head_dim_class, p.L, p.S, p.group);
  const auto pieces = [&](int64_t room) { return pieces_workspace(split, p.N / p.group, p.L * p.group, p.Ev, room); };
  RowsWorkspace plan = {pieces(cap), 0};
  const RowsMarkSizes sizes = rows_mark_sizes(p.masked, p.mask_rows ? p.L : 1, p.S, rows_tile_shape(head_dim_class).keys);
  const int64_t room = std::min(cap - plan.pieces.group_bytes(), (int64_t{1} << 31) - 1);  // next to one group's pieces
  if (sizes.cells > 0 && p.mask_matrices <= room / sizes.cells) plan.mark_bytes = sizes.cells * p.mask_matrices;
  plan.pieces = pieces(cap - plan.mark_bytes);
  return plan;
}

}  // namespace attention_ext
