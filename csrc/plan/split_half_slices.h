// How float32 attention by half terms is cut into slices of matrices, rows and keys, and the workspace that a slice takes. Pure
// host code, shared with the plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/slice.h"
#include "plan/cost.h"

namespace attention_ext {

// Of a call that its cut depends on.
struct SplitHalfSizes {
  int64_t N, L, S, E, Ev, key_group, value_group;
  bool causal;
};

constexpr int64_t kMostFusedSplitHalf = 128;  // head dims that the fused form takes
constexpr int64_t kSplitHalfTile = 128;       // rows, keys and columns of values of a tile
constexpr int64_t kSplitHalfFactsBytes = 12;  // of a matrix of query, of key and of value
constexpr int64_t kSplitHalfStateBytes = 16;  // of a row

// Bytes from the workspace's beginning: facts of all matrices and marks of all rows, which outlast slices; then a slice's arrays.
struct SplitHalfSlices {
  int64_t matrices, rows, keys;  // of a slice
  bool fused;                    // scores stay in registers: a slice is whole matrices
  int64_t key_matrices, value_matrices;
  int64_t marks_at, query_at, key_at, value_at, exponents_at, weights_at, segments_at, states_at;
  int64_t bytes;
  int64_t ns;  // estimated, of all slices

  int64_t query_blocks() const { return matrices * ceil_div(rows, kSegment); }
  int64_t key_blocks() const { return key_matrices * ceil_div(keys, kSegment); }
};

inline SplitHalfSlices split_half_slice(const SplitHalfSizes& sizes, bool fused, int64_t matrices, int64_t rows, int64_t keys) {
  SplitHalfSlices slices = {};
  slices.fused = fused;
  slices.matrices = matrices;
  slices.rows = rows;
  slices.keys = keys;
  // A slice may begin and end within a group.
  const auto shared = [&](int64_t group) { return std::min(matrices, group == 1 ? matrices : (matrices - 1) / group + 2); };
  slices.key_matrices = shared(sizes.key_group);
  slices.value_matrices = shared(sizes.value_group);
  int64_t at = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t begin = at;
    at = round_up(at + bytes, kWorkspaceAlignment);
    return begin;
  };
  place(3 * sizes.N * kSplitHalfFactsBytes);
  slices.marks_at = place(sizes.N * ceil_div(sizes.L, 16));
  slices.query_at = place(matrices * rows * slice_pitch(sizes.E) * 4);
  const int64_t key_bytes = slices.key_matrices * keys * slice_pitch(sizes.E) * 4,
                value_bytes = slices.value_matrices * keys * slice_pitch(sizes.Ev) * 4;
  slices.key_at = place(fused ? key_bytes : std::max(key_bytes, value_bytes));
  slices.value_at = fused ? place(value_bytes) : slices.key_at;  // after the scores nothing reads the keys' terms any more
  slices.exponents_at =
      place((slices.query_blocks() + slices.key_blocks() + slices.value_matrices * ceil_div(keys, kSegment)) * 4);
  slices.weights_at = place(fused ? 0 : matrices * rows * slice_pitch(keys) * 4);
  slices.segments_at = place(fused ? 0 : matrices * rows * ceil_div(keys, kSegment) * 8);
  slices.states_at = place(keys < sizes.S ? 2 * matrices * rows * kSplitHalfStateBytes : 0);
  slices.bytes = at;
  return slices;
}

// Estimated ns of all slices, on a card with an H200's clock and memory.
inline int64_t split_half_ns(const SplitHalfSizes& sizes, const SplitHalfSlices& slices, int64_t sms) {
  constexpr int64_t kStep = 1150, kScoreTile = 2500, kValueTile = 1500, kSlice = 22000, kBytesPerNs = 2600;
  constexpr int64_t kFusedSlice = 11000, kFusedTile = 4000, kFusedSegment = 1250,
                    kFusedStep = 750;  // of 64 keys; and of 64 columns of them
  const int64_t row_tiles = slices.matrices * ceil_div(slices.rows, kSplitHalfTile);
  const int64_t scores = row_tiles * ceil_div(slices.keys, kSplitHalfTile),
                values = row_tiles * ceil_div(sizes.Ev, kSplitHalfTile);
  const int64_t score_tile = ceil_div(sizes.E, 64) * kStep + kScoreTile,
                value_tile = ceil_div(slices.keys, 64) * kStep + kValueTile;
  const int64_t terms = 12 * (slices.matrices * slices.rows * sizes.E + slices.key_matrices * slices.keys * sizes.E +
                              slices.value_matrices * slices.keys * sizes.Ev);
  const int64_t carried = slices.keys < sizes.S ? 8 * slices.matrices * slices.rows * sizes.Ev : 0;
  const int64_t count = ceil_div(sizes.N, slices.matrices) * ceil_div(sizes.L, slices.rows) * ceil_div(sizes.S, slices.keys);
  const int64_t fused_tile =
      ceil_div(slices.keys, kSegment) * (kFusedSegment + ceil_div(std::max(sizes.E, sizes.Ev), 64) * kFusedStep) + kFusedTile;
  const int64_t products = slices.fused ? times(ceil_div(row_tiles, sms), fused_tile)
                                        : times(ceil_div(scores, sms), score_tile) + times(ceil_div(values, sms), value_tile);
  return times(count, (slices.fused ? kFusedSlice : kSlice) + (sizes.causal && count > 1 ? products / 8 * 5 : products) +
                          (terms + carried) / kBytesPerNs);
}

// The cut of the lowest estimate that stays under the cap, if one does. All sizes are at least 1.
inline SplitHalfSlices split_half_slices(const SplitHalfSizes& sizes, int64_t cap, int64_t sms) {
  SplitHalfSlices best = {};
  const auto offer = [&](bool fused, int64_t matrices, int64_t rows, int64_t keys) {
    SplitHalfSlices slices = split_half_slice(sizes, fused, matrices, rows, keys);
    slices.ns = split_half_ns(sizes, slices, sms);
    if (best.bytes == 0 || slices.ns < best.ns) best = slices;
  };
  // Offers whole matrices with so many keys, as many as stay under the cap and a few less. Returns how many do.
  const auto offer_matrices = [&](bool fused, int64_t keys) {
    if (!fused && keys > cap / sizes.L) return int64_t{0};
    const int64_t one = split_half_slice(sizes, fused, 1, sizes.L, keys).bytes;
    if (one > cap) return int64_t{0};
    int64_t most = std::min(sizes.N, cap / one + sizes.key_group + sizes.value_group + 1);
    while (most > 1 && split_half_slice(sizes, fused, most, sizes.L, keys).bytes > cap) --most;
    const int64_t pieces = ceil_div(sizes.N, most);
    for (int64_t count = pieces; count <= std::min(pieces + 3, sizes.N); ++count) {
      offer(fused, ceil_div(sizes.N, count), sizes.L, keys);
    }
    return most;
  };
  if (std::max(sizes.E, sizes.Ev) <= kMostFusedSplitHalf && offer_matrices(true, sizes.S) > 0) return best;
  for (int64_t parts = 1; parts <= 64; parts += parts < 8 ? 1 : parts / 8) {
    const int64_t keys = even_piece(sizes.S, ceil_div(sizes.S, parts), kSegment, kSplitHalfTile);
    const int64_t most = offer_matrices(false, keys);
    if (keys >= sizes.S && most == sizes.N) break;  // all at once
    if (keys <= kSplitHalfTile) break;
  }
  if (best.bytes > 0) return best;
  // Not even one matrix: some of its rows at a time.
  const int64_t keys = std::min<int64_t>(sizes.S, 1024);
  int64_t rows = round_up(sizes.L, kSplitHalfTile);
  while (rows > kSplitHalfTile && split_half_slice(sizes, false, 1, std::min(rows, sizes.L), keys).bytes > cap) {
    rows = round_up(rows / 2, kSplitHalfTile);
  }
  offer(false, 1, std::min(rows, sizes.L), keys);
  return best;
}

}  // namespace attention_ext
