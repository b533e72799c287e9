// How the backward of float32 attention by half terms is cut into slices of matrices or of rows, with all keys that a row sees, and
// the workspace that a slice takes. Pure host code, shared with the plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/slice.h"
#include "plan/cost.h"
#include "plan/split_half_slices.h"

namespace attention_ext {

struct SplitHalfBackwardSizes {
  int64_t N, L, S, E, Ev;
  int64_t group;  // query heads per head of key and of value
  bool causal;

  int64_t keys() const { return causal ? std::min(S, L) : S; }  // that any row sees
};

// Bytes from the workspace's beginning: facts and marks of all matrices, the ticket, and numbers of all rows for what is made anew,
// which outlast slices; then a slice's arrays. Gradients that span slices are carried in the gradients themselves.
struct SplitHalfBackwardSlices {
  int64_t matrices,
      rows;      // of a slice: whole matrices (rows = L), whole groups or an equal part of one; else rows of one matrix
  int64_t keys;  // of a piece: terms of key and value that there are at a time
  int64_t key_matrices;
  int64_t pitch;  // of scores
  int64_t marks_at, largest_at, ticket_at, exact_at, query_at, grad_out_at, key_at, value_at, exponents_at, weights_at, grads_at,
      segments_at, row_values_at, tiles_at;
  int64_t cleared;  // of these, before the first slice
  int64_t bytes;
  int64_t ns;  // estimated, of all slices

  int64_t row_blocks() const { return matrices * ceil_div(rows, kSegment); }
  int64_t key_blocks() const { return key_matrices * ceil_div(keys, kSegment); }
  int64_t tiles() const { return row_blocks() * (pitch / kSegment); }
};

inline SplitHalfBackwardSlices split_half_backward_slice(const SplitHalfBackwardSizes& sizes, int64_t matrices, int64_t rows,
                                                         int64_t keys) {
  SplitHalfBackwardSlices slices = {};
  slices.matrices = matrices;
  slices.rows = rows;
  slices.keys = keys;
  slices.key_matrices = ceil_div(matrices, sizes.group);
  slices.pitch = round_up(sizes.keys(), kSegment);
  int64_t at = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t begin = at;
    at = round_up(at + bytes, kWorkspaceAlignment);
    return begin;
  };
  place(4 * sizes.N * kSplitHalfFactsBytes);
  slices.marks_at = place(sizes.N);
  slices.largest_at = place(4 * sizes.N);
  slices.ticket_at = place(4);
  slices.cleared = at;
  slices.exact_at = place(times(sizes.N, sizes.L, 16));
  slices.query_at = place(matrices * rows * slice_pitch(sizes.E) * 4);
  slices.grad_out_at = place(matrices * rows * slice_pitch(sizes.Ev) * 4);
  slices.key_at = place(slices.key_matrices * keys * slice_pitch(sizes.E) * 4);
  slices.value_at = place(slices.key_matrices * keys * slice_pitch(sizes.Ev) * 4);
  slices.exponents_at = place(2 * (slices.row_blocks() + slices.key_blocks()) * 4);
  slices.weights_at = place(matrices * rows * slices.pitch * 4);
  slices.grads_at = place(matrices * rows * slices.pitch * 4);
  slices.segments_at = place(matrices * rows * (slices.pitch / kSegment) * 8);
  slices.row_values_at = place(matrices * rows * 16);
  slices.tiles_at = place(2 * slices.tiles() * 4);
  slices.bytes = at;
  return slices;
}

// Estimated ns of all slices, on a card with an H200's clock and memory. Not fitted.
inline int64_t split_half_backward_ns(const SplitHalfBackwardSizes& sizes, const SplitHalfBackwardSlices& slices, int64_t sms) {
  constexpr int64_t kStep = 1150, kScoreTile = 3000, kGradTile = 2500, kLaunch = 5000, kBytesPerNs = 2600, kL2BytesPerNs = 4500,
                    kL2 = 40000000;
  const int64_t L = slices.rows, S = sizes.keys(), m = slices.matrices, head = std::min(m, sizes.group);
  const int64_t pieces = ceil_div(S, slices.keys), tile = kSplitHalfTile;
  const int64_t E_steps = ceil_div(sizes.E, 64), Ev_steps = ceil_div(sizes.Ev, 64);
  const int64_t E_tiles = ceil_div(sizes.E, tile), Ev_tiles = ceil_div(sizes.Ev, tile);
  const auto seen = [&](int64_t all) { return sizes.causal ? all / 8 * 5 : all; };
  const int64_t score_tiles = ceil_div(m * ceil_div(L, tile) * ceil_div(S, tile), sms);
  const int64_t scores = times(score_tiles, (E_steps + Ev_steps) * kStep + 2 * kScoreTile);
  const int64_t query_length = ceil_div(S, 64) * kStep + kGradTile, key_length = head * ceil_div(L, 64) * kStep + kGradTile;
  const int64_t query_sums = m * ceil_div(L, tile) * E_tiles, key_sums = m / head * ceil_div(S, tile) * (E_tiles + Ev_tiles);
  const int64_t gradients = makespan(query_sums, query_length, key_sums, key_length, sms);
  const int64_t score_bytes = times(m, L, S * 40), score_rate = times(m, L, S * 8) <= kL2 ? kL2BytesPerNs : kBytesPerNs;
  const int64_t operands = m * L + slices.key_matrices * S * (pieces > 1 ? 2 : 1);
  const int64_t carried = slices.rows < sizes.L || m < sizes.group ? 8 * slices.key_matrices * S * (sizes.E + sizes.Ev) : 0;
  const int64_t bytes = 12 * operands * (sizes.E + sizes.Ev) + carried;
  const int64_t count = ceil_div(sizes.N, m) * ceil_div(sizes.L, L);
  return times(count, kLaunch * (2 + 4 * pieces) + seen(scores + gradients + score_bytes / score_rate) + bytes / kBytesPerNs);
}

// The cut of the lowest estimate that stays under the cap, if one does. All sizes are at least 1.
inline SplitHalfBackwardSlices split_half_backward_slices(const SplitHalfBackwardSizes& sizes, int64_t cap, int64_t sms) {
  SplitHalfBackwardSlices best = {};
  const int64_t all = sizes.keys();
  const auto offer = [&](int64_t matrices, int64_t rows, int64_t keys, bool whatever = false) {
    SplitHalfBackwardSlices slices = split_half_backward_slice(sizes, matrices, rows, keys);
    if (slices.bytes > cap && !whatever) return;
    slices.ns = split_half_backward_ns(sizes, slices, sms);
    if (best.bytes == 0 || slices.ns < best.ns) best = slices;
  };
  // Whole matrices: whole groups, or an equal part of one.
  if (all <= cap / 8 / sizes.L) {
    const int64_t one = split_half_backward_slice(sizes, sizes.group, sizes.L, all).bytes,
                  more = split_half_backward_slice(sizes, 2 * sizes.group, sizes.L, all).bytes - one;
    const int64_t most = one > cap ? 0 : std::min(sizes.N / sizes.group, (cap - one) / std::max<int64_t>(more, 1) + 2);
    for (int64_t groups = most; groups > 0 && groups > most - 96; --groups) offer(groups * sizes.group, sizes.L, all);
    for (int64_t part = sizes.group - 1; part > 0 && best.bytes == 0; --part) {
      if (sizes.group % part == 0) offer(part, sizes.L, all);
    }
  }
  if (best.bytes > 0) return best;
  // Rows of one matrix, with the terms of all keys or of pieces of them.
  for (int64_t pieces = 1; pieces <= 64; pieces *= 2) {
    const int64_t keys = even_piece(all, ceil_div(all, pieces), kSegment, kSplitHalfTile);
    for (int64_t rows = round_up(ceil_div(sizes.L, 2), kSplitHalfTile); rows >= kSplitHalfTile;
         rows = rows > 8 * kSplitHalfTile ? round_up(rows / 2, kSplitHalfTile) : rows - kSplitHalfTile) {
      offer(1, std::min(rows, sizes.L), keys);
    }
    if (keys <= kSplitHalfTile) break;
  }
  if (best.bytes == 0) offer(1, std::min(sizes.L, kSplitHalfTile), std::min<int64_t>(all, 1024), true);
  return best;
}

}  // namespace attention_ext
