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

constexpr int64_t kReadBytes = 4000, kWrittenBytes = 1950;  // a ns, from memory and to it

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

// When the last of two kinds of tiles is done, the longer ones first, each taken by the SM that is free: `count` of `length`.
inline int64_t makespan(int64_t count, int64_t length, int64_t others, int64_t other_length, int64_t sms) {
  if (length < other_length) {
    std::swap(count, others);
    std::swap(length, other_length);
  }
  const int64_t full = count / sms * length, ahead = count % sms;
  int64_t low = ahead > 0 ? full + length : full;
  if (others == 0 || other_length == 0) return low;
  const auto done = [&](int64_t at) {
    return (sms - ahead) * ((at - full) / other_length) + ahead * (std::max<int64_t>(at - full - length, 0) / other_length) >=
           others;
  };
  int64_t high = low + ceil_div(others, sms) * other_length;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    (done(middle) ? high : low) = done(middle) ? middle : middle + 1;
  }
  return low;
}

int64_t rows_cost(const Problem& problem, const DeviceInfo& card, int64_t cap);
int64_t fused_cost(const Problem& problem, const DeviceInfo& card, int64_t cap, int head_dim_class);
int64_t pipeline_cost(const Problem& problem, const DeviceInfo& card, int64_t cap, bool wgmma);

}  // namespace attention_ext
