// How the forward is cut into slices of (N, L) rows, and the workspace that a slice takes. Pure host code, shared with
// the plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/slice.h"

namespace attention_ext {

// Workspace of a slice, in this order: for float and double scores (batches, rows, pitch), overwritten in place by weights; for
// half types weights (batches, rows, pitch), then the statistics of their segments (batches, rows, segments), 16 bytes each. Then
// the row sums (batches, rows). Then, where there are many keys, the carry of sums over them (batches, rows, Ev), float.
struct ForwardSlices {
  int64_t batches, rows;  // of a slice: whole matrices if one fits (rows = L), else some rows of one matrix
  int64_t pitch;          // of scores or weights, in elements
  int64_t segments;       // of a row; 0 for float and double
  int64_t statistics_at, row_sum_at, carry_at;  // bytes
  int64_t bytes;
};

constexpr int64_t kWgmmaTileRows = 128, kWgmmaTileCols = 256;  // of the products by wgmma (gemm/sm90/tile.cuh)

// Tiles of a matrix of scores that some row sees: all, or those up to the diagonal.
constexpr int64_t seen_score_tiles(int64_t row_tiles, int64_t col_tiles, bool causal) {
  static_assert(kWgmmaTileCols == 2 * kWgmmaTileRows, "two row tiles more see a column tile more");
  const int64_t growing = causal ? std::min(row_tiles, 2 * col_tiles) : 0, pairs = growing / 2;
  return pairs * (pairs + 1) + growing % 2 * (pairs + 1) + (row_tiles - growing) * col_tiles;
}

// Matrices of a slice, `limit` at most, for products whose CTAs stay, one on each of a card's sms, and take tile after tile: the
// number that needs the fewest rounds in all.
inline int64_t fewest_rounds(int64_t N, int64_t L, int64_t S, int64_t Ev, int64_t limit, int64_t sms, bool causal) {
  if (limit >= N) return std::max<int64_t>(N, 1);  // rounds of a whole are no more than those of its parts
  constexpr int64_t kRound = 16;
  const int64_t row_tiles = ceil_div(L, kWgmmaTileRows), col_tiles = ceil_div(S, kWgmmaTileCols),
                seen = seen_score_tiles(row_tiles, col_tiles, causal), all = std::max<int64_t>(row_tiles * col_tiles, 1);
  const auto rounds = [&](int64_t matrices) {
    const int64_t out_tiles = matrices * row_tiles * ceil_div(Ev, kWgmmaTileCols), scores = ceil_div(matrices * seen, sms);
    // Causal ones are of all lengths, the longest first: they even out, but for about half of one.
    const int64_t values = causal ? kRound * out_tiles * seen / (all * sms) + kRound / 2 : kRound * ceil_div(out_tiles, sms);
    return kRound * scores + values;
  };
  int64_t best = limit, fewest = -1;
  const int64_t least = std::max(best / 2, best - 64);  // the more there are, the less it matters
  for (int64_t matrices = limit; matrices > least; --matrices) {
    const int64_t rest = N % matrices, all = N / matrices * rounds(matrices) + (rest > 0 ? rounds(rest) : 0);
    if (fewest < 0 || all < fewest) {
      fewest = all;
      best = matrices;
    }
  }
  return std::max<int64_t>(best, 1);
}

// N matrices of (L, S) scores for tensors of `element` bytes; at least one row, whatever the cap. sms, causal: used by
// wgmma_products.
inline ForwardSlices forward_slices(int64_t N, int64_t L, int64_t S, int64_t Ev, int64_t element, int64_t workspace_cap,
                                    bool wgmma_products, int64_t sms, bool causal) {
  const int64_t statistic = element == 8 ? 8 : 4;
  ForwardSlices slices = {};
  slices.pitch = slice_pitch(S);
  slices.segments = element == 2 ? (slices.pitch + kSegment - 1) / kSegment : 0;
  const int64_t carry = wgmma_products ? 0 : carry_row_bytes(S, Ev, element);
  const int64_t row_bytes =
      slices.pitch * element + slices.segments * static_cast<int64_t>(sizeof(SegmentStatistics)) + statistic + carry;
  const int64_t rows_in_cap = std::max<int64_t>(workspace_cap - 4 * kWorkspaceAlignment, 0) / row_bytes;
  if (rows_in_cap >= L) {
    const int64_t limit = rows_in_cap / std::max<int64_t>(L, 1);
    slices.batches = wgmma_products ? fewest_rounds(N, L, S, Ev, std::min<int64_t>(limit, 1 << 12), sms, causal)
                                    : even_piece(N, limit, 1, 1);
    slices.rows = L;
  } else {
    slices.batches = 1;
    slices.rows = even_piece(L, rows_in_cap, 1, kSliceTile);
  }
  const int64_t rows = slices.batches * slices.rows;
  slices.statistics_at = round_up(rows * slices.pitch * element, kWorkspaceAlignment);
  slices.row_sum_at = slices.statistics_at +
                      round_up(rows * slices.segments * static_cast<int64_t>(sizeof(SegmentStatistics)), kWorkspaceAlignment);
  slices.carry_at = slices.row_sum_at + round_up(rows * statistic, kWorkspaceAlignment);
  slices.bytes = carry > 0 ? slices.carry_at + rows * carry : slices.row_sum_at + rows * statistic;
  return slices;
}

}  // namespace attention_ext
