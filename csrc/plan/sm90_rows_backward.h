// The tile policy of the row kernels' backward on Hopper: one table of head-dim classes. The kernels and their estimates read it
// here.
#pragma once

#include <algorithm>
#include <cstdint>

namespace attention_ext {

// What a class of head dims bounds. Columns of E and Ev that a problem lacks are zeros, and are multiplied. Both kernels have two
// consumer warpgroups; each has 64 of a tile's queries (row kernel) or keys (column kernel).
struct RowsBackwardShape {
  int steps;                       // of 64 of E and of Ev
  int row_keys;                    // of a block of the row kernel: what registers hold next to dQ
  int row_places;                  // of its tiles of queries: with two, the next one comes while this one is worked on
  int row_stages;                  // of keys and of values: a block's keys stay until the next block's scores are there
  int col_queries;                 // of a block of the column kernel: what registers hold next to dK and dV
  int col_places;                  // of its tiles of keys
  int col_stages;                  // of queries with their gradients, which stay as long
  bool turns;                      // whether warpgroups take turns at issuing products
  int row_block_ns, col_block_ns;  // that a block of each takes; predicted
};

constexpr int kRowsBackwardTile = 128;  // queries or keys of a tile

// Shared memory: a tile of queries or keys with the other operand of its rows 32 KB a place and step, a stage 256 bytes a key or
// query and step, strips 16 KB, within 227 KB. Registers of a consumer thread: row kernel dQ 32 or 64, S and dP 128 or 96, dS 32 or
// 24; column kernel dK and dV 64 or 128, S and dP 96 or 64, P and dS 48 or 32.
constexpr RowsBackwardShape rows_backward_shape(int head_dim_class) {
  switch (head_dim_class) {
    case 64: return {1, 128, 2, 3, 96, 2, 4, true, 1300, 1350};  // 64 + 3 x 32 KB; 64 + 4 x 24 KB
    default: return {2, 96, 1, 3, 64, 1, 4, true, 1650, 1450};   // 64 + 3 x 48 KB; 64 + 4 x 32 KB
  }
}

constexpr int64_t kMostRowsBackward = 128;  // of E and of Ev
constexpr int rows_backward_class(int64_t E, int64_t Ev) { return std::max(E, Ev) <= 64 ? 64 : 128; }

}  // namespace attention_ext
