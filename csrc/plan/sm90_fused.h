// The tile policy of the fused kernels for Hopper: one table of head-dim classes, and the grid. The kernels, their launcher and
// their estimates read it here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"
#include "plan/key_pieces.h"

namespace attention_ext {

// What a class of head dims bounds. The kernel works in steps of 64 of E and leaves out those that a problem lacks; of Ev it leaves
// out the loads, and multiplies all columns of the class.
struct FusedTileShape {
  int query_steps;  // of 64 of E that query has room for in shared memory
  int value_steps;  // of 64 of Ev in each of the two consumer warpgroups' registers
  int slots;        // of 16 KB in each warpgroup's ring of key and value tiles
  int ring_ns;      // that a block waits for each step that is loaded, where slots are too few to hide L2's latency; fitted
};

// Shared memory: query 8 KB a step, weights 2 x 16 KB, rings 2 x 16 KB a slot, within 227 KB. Registers: 32 accumulators a value
// step and 64 scores a thread of 232; five value steps would leave nothing to compute with.
constexpr FusedTileShape fused_tile_shape(int head_dim_class) {
  return head_dim_class <= 384   ? FusedTileShape{6, 3, 4, 0}  // 208 KB; a fifth slot would be 240
         : head_dim_class <= 512 ? FusedTileShape{8, 4, 4, 0}  // 224 KB
         : head_dim_class <= 768 ? FusedTileShape{12, 4, 3, 11}
                                 // 224 KB; CTAs share the columns of values, or take them in passes
                                 : FusedTileShape{16, 4, 2, 100};  // 224 KB; the same
}

// Of sm90_512, by the larger of E and Ev up to 512; of sm90_1024, by E up to 1024.
constexpr int fused_class_512(int64_t width) { return width <= 384 ? 384 : 512; }
constexpr int fused_class_1024(int64_t E) { return E <= 768 ? 768 : 1024; }

constexpr int kFusedRows = 64;       // query rows of a CTA: M of one wgmma, and all that registers hold of O at Ev = 512
constexpr int kFusedKeys = 128;      // keys of a block: at 64 a product would read a third more of shared memory
constexpr int kFusedValueKeys = 32;  // of a slot of values: 32 x 256 is as much as 128 x 64 of keys

constexpr int kAllColumns = 1 << 30;  // of values that a CTA takes in passes; with more, CTAs share them

// Rows of a tile: whole queries of all heads of the group, which is how TMA brings them. At most 64 heads.
constexpr int fused_tile_rows(int group) { return kFusedRows / group * group; }

// Columns of values that registers hold the output of.
constexpr int fused_share_columns(int head_dim_class) { return 128 * fused_tile_shape(head_dim_class).value_steps; }

// Pieces of the keys of few rows (plan/key_pieces.h). A key is read as 4 bytes a column of E = Ev, and a piece's row written and
// read again as 8: with keys for 16 times the rows that is at most an eighth more. With many keys pieces are longer, as they are
// enough then.
constexpr KeySplit fused_split(int64_t L, int64_t S, int64_t group) {
  if (!keys_split(L, S, group, kWideSplitRows)) return kNotSplit;
  const int64_t by_keys = S <= 4096 ? 1 : S <= 32768 ? 2 : S <= 65536 ? 4 : 8;
  return split_keys(S, std::max(ceil_div(16 * L * group, kFusedKeys), by_keys), kFusedKeys);
}
static_assert(ceil_div(kMostWgmmaKeys, 8 * kFusedKeys) <= kMostPieces, "a piece of the most keys has a thread");

// The workspace, which pieces alone take.
inline PiecesWorkspace fused_workspace(int64_t N, int64_t L, int64_t S, int64_t Ev, int64_t group, int64_t cap) {
  return pieces_workspace(fused_split(L, S, group), N / group, L * group, Ev, cap);
}

struct FusedGrid {
  int64_t tiles;
  int columns;     // of values that a CTA takes: a share of them, or kAllColumns
  bool ctas_stay;  // and take every ctas-th tile
  int64_t ctas_of(int64_t count, int64_t sms) const { return ctas_stay ? std::min(count, sms) : count; }
};

// general: the instance of the kernel for masks and dropout, whose CTAs take one tile each, since the blocks of keys that it marks
// as visible are those of one.
inline FusedGrid fused_grid(int head_dim_class, int64_t N, int group, int64_t L, int64_t S, int64_t Ev, bool causal,
                            bool general, int64_t pieces, int64_t sms) {
  // CTAs that stay and take tile after tile overlap the end of one with the loads of the next; where tiles are long and differ, in
  // causal attention, one CTA a tile spreads them better.
  constexpr int64_t kShortKeys = 1024;
  const int64_t row_tiles = N / group * ceil_div(L * group, fused_tile_rows(group)) * pieces;
  FusedGrid grid = {0, fused_share_columns(head_dim_class), !general && (!causal || S <= kShortKeys)};
  grid.tiles = row_tiles * ceil_div(Ev, grid.columns);
  // Of a class that is wider a CTA may take all columns in passes, where two blocks are all keys: their weights stay in shared
  // memory.
  if (head_dim_class > grid.columns && S <= 2 * kFusedKeys && Ev <= kAllColumns && grid.tiles > sms) {
    grid.columns = kAllColumns;
    grid.tiles = row_tiles;
  }
  return grid;
}

}  // namespace attention_ext
