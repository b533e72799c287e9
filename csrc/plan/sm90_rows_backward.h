// The tile policy of the row kernels' backward on Hopper: one table of head-dim classes. The kernels and their estimates read it
// here.
#pragma once

#include <algorithm>
#include <cstdint>

namespace attention_ext {

// What a class of head dims bounds. Columns of E and Ev that a problem lacks are zeros, and are multiplied. Both kernels have two
// consumer warpgroups, each with 64 of a tile's queries (row kernel) or keys (column kernel). Where registers do not hold dK and dV
// of 64 keys, a tile of the column kernel has 64 keys, and one warpgroup makes their dV, the other one their dK.
struct RowsBackwardShape {
  int steps;                       // of 64 of E and of Ev
  int row_keys;                    // of a block of the row kernel: what registers hold next to dQ
  int row_places;                  // of its tiles of queries: with two, the next one comes while this one is worked on
  int row_key_slots;               // of its ring of keys, which stay until dQ is there
  int row_value_slots;             // of its ring of values, which stay until dP is there
  bool row_ahead;                  // whether S, dP and dQ of two blocks are multiplied at once; registers: S, dP and dS apart
  int col_keys;                    // of a tile of the column kernel
  int col_queries;                 // of a block of it: what registers hold next to dK and dV
  int col_places;                  // of its tiles of keys
  int col_stages;                  // of queries with their gradients, which stay until the next block's scores are there
  bool col_ahead;                  // whether S, dP, dV and dK of two blocks are multiplied at once, where it is not by roles
  bool turns;                      // whether warpgroups that do the same take turns at issuing products
  int row_block_ns, col_block_ns;  // that a block of each takes

  constexpr bool roles() const { return col_keys == 64; }
  // Keys of a cell of a mask's marks (plan/sm90_rows.h): blocks and tiles of either kernel are whole cells.
  constexpr int marked_keys() const { return row_keys % 64 == 0 ? 64 : 32; }
};

constexpr int kRowsBackwardTile = 128;  // queries of a tile of the row kernel

// Shared memory, of 227 KB: row kernel 32 KB a place and step, 128 bytes a key, step and slot; column kernel 256 bytes a key,
// step and place and 256 a query, step and stage; strips 16 KB, or by roles 256 bytes a query for P; 13 bytes a query for its
// record. From 192 on a gradient leaves through the place of an operand. Registers of a consumer thread: row kernel dQ 32 a
// step, S and dP 1 a key, dS a quarter; column kernel dK and dV 64 a step, S and dP 1 a query, P and dS half of that; by roles
// half of each. Where dQ comes first, two slots of keys are enough, and one of values: they are free while dQ and S are
// multiplied. Times fitted on an H200 (lengths 2048 and 8192). general: there is a mask or dropout, which want registers.
constexpr RowsBackwardShape rows_backward_shape(int head_dim_class, bool general = false) {
  if (general && head_dim_class == 64) return {1, 96, 2, 3, 3, true, 128, 64, 2, 4, true, true, 1000, 1050};
  if (general && head_dim_class == 192) return {3, 64, 1, 3, 2, false, 64, 64, 1, 3, false, true, 1750, 1350};
  switch (head_dim_class) {
    case 64: return {1, 128, 2, 3, 3, true, 128, 96, 2, 4, true, true, 1250, 1300};   // 64 + 6 x 16 KB; 64 + 4 x 24 KB
    case 128: return {2, 96, 1, 3, 3, true, 128, 64, 1, 4, false, true, 1500, 1370};  // 64 + 6 x 24 KB; 64 + 4 x 32 KB
    case 192: return {3, 96, 1, 2, 1, false, 64, 96, 1, 2, false, true, 2450, 1900};  // 96 + 3 x 36 KB; 48 + 2 x 72 + 24 KB
    default: return {4, 64, 1, 2, 1, false, 64, 64, 1, 2, false, true, 2250, 1450};   // 128 + 3 x 32 KB; 64 + 2 x 64 + 16 KB
  }
}

constexpr int64_t kMostRowsBackward = 256;  // of E and of Ev
constexpr int rows_backward_class(int64_t E, int64_t Ev) {
  const int64_t widest = std::max(E, Ev);
  return widest <= 64 ? 64 : widest <= 128 ? 128 : widest <= 192 ? 192 : 256;
}

}  // namespace attention_ext
