// Estimated times, in ns: whole numbers, so that a choice is the same on every host. Constants are fitted to
// bench/results/kernels/nvidia_h200.json and some more shapes of that run; scripts/check_choice.py says how well. Launches are
// those of a CUDA graph.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/operand.h"
#include "plan/kernels.h"

namespace attention_ext {

// a * b, and kMostCost where that is more.
constexpr int64_t times(int64_t a, int64_t b) { return b > 0 && a > kMostCost / b ? kMostCost : a * b; }
constexpr int64_t times(int64_t a, int64_t b, int64_t c) { return times(times(a, b), c); }

// What a row of a box costs in bytes from L2: one line of 128, and more where rows do not all begin with a line. Fitted.
constexpr int64_t touched_line_bytes(int64_t row_alignment) {
  return kLineBytes + (row_alignment < kLineBytes ? 16 * kLineBytes / std::max<int64_t>(row_alignment, 2) : 0);
}

// Blocks of `keys` keys that the row tiles of a matrix, each of `rows` queries, see in all: every block or, causal, those up to the
// diagonal.
constexpr int64_t visible_blocks(int64_t L, int64_t S, int64_t rows, int64_t keys, bool causal) {
  const int64_t row_tiles = ceil_div(L, rows), blocks = ceil_div(S, keys);
  if (!causal) return times(row_tiles, blocks);
  const int64_t above = std::min(row_tiles, S / rows);  // row tiles whose last query does not see all keys
  return (times(rows, above, above + 1) + times(above, std::max<int64_t>(keys - rows, 0))) / (2 * keys) +
         times(row_tiles - above, blocks);
}

int64_t rows_cost(const Problem& problem, const DeviceInfo& card, int64_t cap);
int64_t fused_cost(const Problem& problem, const DeviceInfo& card, int head_dim_class);
int64_t pipeline_cost(const Problem& problem, const DeviceInfo& card, int64_t cap, bool wgmma);

}  // namespace attention_ext
