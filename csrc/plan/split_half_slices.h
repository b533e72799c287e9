// How float32 attention by half terms is cut into slices of matrices, rows and keys, and the workspace that a slice takes. Pure
// host code, shared with the plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/arithmetic.h"
#include "core/slice.h"
#include "plan/cost.h"

namespace attention_ext {

// Of a call that its cut depends on.
struct SplitHalfSizes {
  int64_t N, L, S, E, Ev, key_group, value_group;
  bool causal;
  bool out_dense;  // matrices of out lie one after another: what is not written yet can hold terms

  bool operator==(const SplitHalfSizes&) const = default;
};

constexpr int64_t kMostFusedSplitHalf = 128;  // head dims that the fused form takes
constexpr int64_t kSplitHalfTile = 128;       // rows, keys and columns of values of a tile
constexpr int64_t kSplitHalfFactsBytes = 12;  // of a matrix of query, of key and of value
constexpr int64_t kSplitHalfStateBytes = 16;  // of a row

// Bytes from the workspace's beginning: facts of all matrices and marks of all rows, which outlast slices; then a slice's arrays.
struct SplitHalfSlices {
  int64_t matrices, rows, keys;  // of a slice
  bool fused;                    // scores stay in registers: a slice is whole matrices
  bool query_in_out;             // terms of the query lie in the slice's own rows of out
  int64_t most_keys_in_out;      // those of keys lie in out after the slice's matrices, if no more than these end with it
  int64_t key_matrices, value_matrices;
  int64_t marks_at, query_at, key_at, value_at, exponents_at, weights_at, segments_at, states_at;
  int64_t bytes;
  int64_t ns;  // estimated, of all slices

  int64_t query_blocks() const { return matrices * ceil_div(rows, kSegment); }
  int64_t key_blocks() const { return key_matrices * ceil_div(keys, kSegment); }
  bool keys_in_out(int64_t end_matrix) const { return end_matrix <= most_keys_in_out; }
  // Whether terms of keys and values have places of their own in a slice, and are made at once.
  bool apart(int64_t end_matrix) const { return key_at != value_at || keys_in_out(end_matrix); }
};

// apart: the workspace has room for terms of keys and of values at a time.
inline SplitHalfSlices split_half_slice(const SplitHalfSizes& sizes, bool fused, int64_t matrices, int64_t rows, int64_t keys,
                                        bool apart) {
  SplitHalfSlices slices = {};
  slices.fused = fused;
  slices.matrices = matrices;
  slices.rows = rows;
  slices.keys = keys;
  // A slice may begin and end within a group.
  const auto shared = [&](int64_t group) { return std::min(matrices, group == 1 ? matrices : (matrices - 1) / group + 2); };
  slices.key_matrices = shared(sizes.key_group);
  slices.value_matrices = shared(sizes.value_group);
  const int64_t key_bytes = slices.key_matrices * keys * slice_pitch(sizes.E) * 4,
                value_bytes = slices.value_matrices * keys * slice_pitch(sizes.Ev) * 4;
  const bool in_out = !fused && sizes.out_dense && sizes.L * sizes.Ev % 4 == 0;  // on 16-byte boundaries
  slices.query_in_out = in_out && keys >= sizes.S && (matrices == 1 || rows == sizes.L) && slice_pitch(sizes.E) <= sizes.Ev;
  slices.most_keys_in_out = in_out && !apart ? sizes.N - ceil_div(key_bytes, times(sizes.L, sizes.Ev, 4)) : 0;
  int64_t at = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t begin = at;
    at = round_up(at + bytes, kWorkspaceAlignment);
    return begin;
  };
  place(3 * sizes.N * kSplitHalfFactsBytes);
  slices.marks_at = place(sizes.N * ceil_div(sizes.L, 16));
  slices.query_at = place(slices.query_in_out ? 0 : matrices * rows * slice_pitch(sizes.E) * 4);
  slices.key_at = place(apart ? key_bytes : std::max(key_bytes, value_bytes));
  slices.value_at = apart ? place(value_bytes) : slices.key_at;  // after the scores nothing reads the keys' terms any more
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
  constexpr int64_t kStep = 1500, kScoreTile = 2400, kValueTile = 3500, kLaunch = 2500, kSplitBytesPerNs = 3000,
                    kCarriedBytesPerNs = 5200;
  constexpr int64_t kFusedLaunch = 5500, kFusedTile = 4000, kFusedSegment = 1250,
                    kFusedStep = 750;  // of 64 keys; and of 64 columns of them
  // Of a slice: what splits and launches take, and products.
  const auto of_slice = [&](int64_t matrices, int64_t rows, int64_t keys) {
    const int64_t row_tiles = matrices * ceil_div(rows, kSplitHalfTile);
    const int64_t width = slices.key_matrices * sizes.E + slices.value_matrices * sizes.Ev;
    const int64_t split = ceil_div(8 * keys * width * matrices, slices.matrices);
    if (slices.fused) {
      const int64_t tile =
          ceil_div(keys, kSegment) * (kFusedSegment + ceil_div(std::max(sizes.E, sizes.Ev), 64) * kFusedStep) + kFusedTile;
      return std::pair(2 * kFusedLaunch + split / kSplitBytesPerNs, times(ceil_div(row_tiles, sms), tile));
    }
    const int64_t carried = slices.keys < sizes.S ? 8 * matrices * rows * sizes.Ev : 0;
    const int64_t score_rounds = ceil_div(row_tiles * ceil_div(keys, kSplitHalfTile), sms),
                  value_rounds = ceil_div(row_tiles * ceil_div(sizes.Ev, kSplitHalfTile), sms);
    return std::pair(3 * kLaunch + split / kSplitBytesPerNs + carried / kCarriedBytesPerNs,
                     times(score_rounds, ceil_div(sizes.E, 64) * kStep + kScoreTile) +
                         times(value_rounds, ceil_div(keys, 64) * kStep + kValueTile));
  };
  // visit(how many pieces of `all`, how long): whole ones, and what is left.
  const auto for_each_piece = [](int64_t all, int64_t piece, const auto& visit) {
    visit(all / piece, piece);
    if (all % piece > 0) visit(int64_t{1}, all % piece);
  };
  int64_t ns = 8 * sizes.N * sizes.L * sizes.E / kSplitBytesPerNs, count = 0, products = 0;
  for_each_piece(sizes.N, slices.matrices, [&](int64_t batches, int64_t matrices) {
    for_each_piece(sizes.L, slices.rows, [&](int64_t ranges, int64_t rows) {
      for_each_piece(sizes.S, slices.keys, [&](int64_t pieces, int64_t keys) {
        const auto [other, of_products] = of_slice(matrices, rows, keys);
        const int64_t alike = times(batches, ranges, pieces);
        ns = std::min(ns + times(alike, other), kMostCost);
        products = std::min(products + times(alike, of_products), kMostCost);
        count += alike;
      });
    });
  });
  if (slices.key_at == slices.value_at) {  // where keys are not in out, values are split after the scores
    const int64_t batches = ceil_div(sizes.N, slices.matrices), in_out = std::max<int64_t>(slices.most_keys_in_out, 0);
    ns += times(count / batches * (batches - in_out / slices.matrices), kLaunch);
  }
  return std::min(ns + (sizes.causal && count > 1 ? products / 8 * 5 : products), kMostCost);
}

// The cut of the lowest estimate that stays under the cap, if one does. All sizes are at least 1.
inline SplitHalfSlices cut_split_half(const SplitHalfSizes& sizes, int64_t cap, int64_t sms) {
  SplitHalfSlices best = {};
  const auto offer = [&](SplitHalfSlices slices) {
    slices.ns = split_half_ns(sizes, slices, sms);
    if (best.bytes == 0 || slices.ns < best.ns) best = slices;
  };
  // Offers these rows of matrices with so many keys: as many matrices as stay under the cap and a few less. Returns how many do.
  const auto offer_matrices = [&](bool fused, int64_t rows, int64_t keys, bool apart) {
    if (!fused && keys > cap / rows) return int64_t{0};
    const auto of = [&](int64_t matrices) { return split_half_slice(sizes, fused, matrices, rows, keys, apart); };
    if (of(1).bytes > cap) return int64_t{0};
    int64_t most = 1;
    for (int64_t beyond = sizes.N + 1; beyond - most > 1;) {
      const int64_t middle = most + (beyond - most) / 2;
      (of(middle).bytes > cap ? beyond : most) = middle;
    }
    const int64_t pieces = ceil_div(sizes.N, most);
    for (int64_t count = pieces; count <= std::min(pieces + 3, sizes.N); ++count) offer(of(ceil_div(sizes.N, count)));
    return most;
  };
  if (std::max(sizes.E, sizes.Ev) <= kMostFusedSplitHalf && offer_matrices(true, sizes.L, sizes.S, true) > 0) return best;
  // Where all rows fit with few keys only, what they carry from keys to keys counts: fewer rows with more keys.
  for (int64_t ranges : {1, 2, 4}) {
    const int64_t rows = std::min(sizes.L, round_up(ceil_div(sizes.L, ranges), kSplitHalfTile));
    if (ranges > 1 && (rows == sizes.L || best.keys >= sizes.S)) break;
    for (int64_t parts = 1; parts <= 64; parts += parts < 8 ? 1 : parts / 8) {
      const int64_t keys = even_piece(sizes.S, ceil_div(sizes.S, parts), kSegment, kSplitHalfTile);
      const int64_t most = offer_matrices(false, rows, keys, false);
      if (most > 0) offer_matrices(false, rows, keys, true);
      if (keys >= sizes.S && most == sizes.N) break;  // all at once
      if (keys <= kSplitHalfTile) break;
    }
  }
  if (best.bytes > 0) return best;
  // Not even one matrix: some of its rows at a time.
  const int64_t keys = std::min<int64_t>(sizes.S, 1024);
  const auto some = [&](int64_t rows) { return split_half_slice(sizes, false, 1, std::min(rows, sizes.L), keys, false); };
  int64_t rows = round_up(sizes.L, kSplitHalfTile);
  while (rows > kSplitHalfTile && some(rows).bytes > cap) rows = round_up(rows / 2, kSplitHalfTile);
  offer(some(rows));
  return best;
}

// kPlan(sizes, cap, sms), which takes up to some milliseconds. A call asks for its cost, its workspace and its slices: a thread
// keeps the last plan of each kPlan.
template <auto kPlan, class Sizes>
auto last_plan(const Sizes& sizes, int64_t cap, int64_t sms) {
  struct Last {
    Sizes sizes;
    int64_t cap, sms;
    decltype(kPlan(sizes, cap, sms)) plan;
  };
  thread_local Last last = {{}, -1, -1, {}};
  if (last.cap != cap || last.sms != sms || !(last.sizes == sizes)) last = {sizes, cap, sms, kPlan(sizes, cap, sms)};
  return last.plan;
}

inline SplitHalfSlices split_half_slices(const SplitHalfSizes& sizes, int64_t cap, int64_t sms) {
  return last_plan<cut_split_half>(sizes, cap, sms);
}

}  // namespace attention_ext
