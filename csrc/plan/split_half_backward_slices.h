// How the backward of float32 attention by half terms is cut into slices of matrices and of rows, with all keys that a row sees,
// and the workspace that a slice takes. Pure host code, shared with the plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/arithmetic.h"
#include "core/slice.h"
#include "plan/cost.h"
#include "plan/split_half_slices.h"

namespace attention_ext {

struct SplitHalfBackwardSizes {
  int64_t N, L, S, E, Ev;
  int64_t group;  // query heads per head of key and of value
  bool causal;
  int64_t mask_matrices;  // whose gradient is wanted; 0: no mask's
  bool fused;             // may do without scores in memory: split_half_backward_fuses

  bool operator==(const SplitHalfBackwardSizes&) const = default;
  int64_t keys_of_rows(int64_t end) const { return causal ? std::min(S, end) : S; }  // that rows before `end` see
  int64_t keys() const { return keys_of_rows(L); }
};

// Whether scores are made twice, first for what their rows need, instead of kept as floats: 20 bytes of a score less against both
// products again. By the estimate that would pay up to 256; measure it there first.
constexpr bool split_half_scores_twice(int64_t E, int64_t Ev) { return std::max(E, Ev) <= 128; }

// Whether the gradients can be made without scores in memory: sums of dK and of dV, scores and their gradients, and terms of these
// are what registers hold up to head dim 64. A mask's gradient is one of whole matrices then.
constexpr bool split_half_backward_fuses(int64_t E, int64_t Ev, bool dropout, bool mask_grad, bool whole_mask) {
  return std::max(E, Ev) <= 64 && !dropout && (!mask_grad || whole_mask);
}
constexpr int64_t kSplitHalfRecordBytes = 768;  // of 64 queries, SplitHalfQueryRecord

// Which sums of the gradients are cut along k, so that a few long ones do not keep the card waiting: some into so many parts; or
// all, into an equal share for every SM.
struct SplitHalfGradientParts {
  bool of_rows, of_keys;  // those of dQ; those of dK and dV
  int64_t count;
  bool in_shares;
};

// The slices of a range of rows: of so many matrices each, and the bytes from the workspace's beginning: facts and marks of all
// matrices, the ticket and its like, and numbers of all rows for what is made anew, which outlast slices; then a slice's arrays.
// Gradients that span slices are carried in the gradients themselves.
struct SplitHalfBackwardSlices {
  bool fused;  // whole matrices, without scores in memory
  int64_t row_begin, rows;
  int64_t matrices;  // with all rows whole groups or an equal part of one
  int64_t all_keys;  // that these rows see
  int64_t keys;      // of a piece: terms of key and value that there are at a time
  int64_t key_matrices;
  int64_t pitch;  // of scores
  int64_t marks_at, largest_at, ticket_at, exact_at, parts_at, query_at, grad_out_at, key_at, value_at, exponents_at,
      weights_at, grads_at, segments_at, deltas_at, row_values_at, tiles_at, records_at;
  int64_t cleared;     // of these, before the first slice
  int64_t part_bytes;  // of counts of parts, cleared as well
  SplitHalfGradientParts parts;
  int64_t bytes;
  int64_t ns;  // estimated, of all the range's slices

  int64_t row_blocks() const { return matrices * ceil_div(rows, kSegment); }
  int64_t key_blocks() const { return key_matrices * ceil_div(keys, kSegment); }
  int64_t tiles() const { return row_blocks() * (pitch / kSegment); }
};

// In the order of rows, so that what is carried of a key has one order.
struct SplitHalfBackwardPlan {
  std::vector<SplitHalfBackwardSlices> ranges;
  int64_t bytes, ns;
};

class SplitHalfBackwardPlanner {
 public:
  SplitHalfBackwardPlanner(const SplitHalfBackwardSizes& sizes, int64_t cap, int64_t sms)
      : sizes_(sizes), cap_(cap), sms_(sms) {}

  // The cut of the lowest estimate that stays under the cap, if one does. All sizes are at least 1.
  SplitHalfBackwardPlan plan() {
    cut_scores();
    // The mask's gradient: dS read, and what of it is written. Not fitted.
    constexpr int64_t kScoreBytes = 8, kBytesPerNs = 2600;
    if (sizes_.mask_matrices > 0) best_.ns += times(sizes_.N, times(sizes_.L, sizes_.S), kScoreBytes) / kBytesPerNs;
    if (sizes_.fused) offer({most_fused_matrices()});
    best_.ns = std::min(best_.ns, kMostCost);
    return best_;
  }

 private:
  void cut_scores() {
    offer({most_matrices(0, sizes_.L)});
    if (sizes_.causal) {  // rows see different numbers of keys: more matrices of the first
      for (int64_t count : {2, 4}) {
        const int64_t rows = round_up(ceil_div(sizes_.L, count), kSplitHalfTile);
        std::vector<SplitHalfBackwardSlices> ranges;
        for (int64_t row = 0; row < sizes_.L; row += rows) ranges.push_back(most_matrices(row, std::min(rows, sizes_.L - row)));
        offer(std::move(ranges));
      }
    }
    if (best_.ranges.empty()) {
      for (int64_t pieces = 1; pieces <= 64; pieces += pieces < 8 ? 1 : pieces) {
        const int64_t keys = even_piece(sizes_.keys(), ceil_div(sizes_.keys(), pieces), kSplitHalfTile, kSplitHalfTile);
        for (int64_t fewer = 0; fewer < 3; ++fewer) offer(rows_of_one_matrix(keys, fewer));
        if (keys <= kSplitHalfTile) break;
      }
    }
    if (best_.ranges.empty()) {
      const int64_t keys = std::min<int64_t>(sizes_.keys(), 1024);
      for (int64_t row = 0; row < sizes_.L; row += kSplitHalfTile) {
        best_.ranges.push_back(estimated(slices(1, row, std::min(kSplitHalfTile, sizes_.L - row), keys)));
        best_.bytes = std::max(best_.bytes, best_.ranges.back().bytes);
        best_.ns += best_.ranges.back().ns;
      }
    }
  }

  // keys: of a piece, if there are as many.
  SplitHalfBackwardSlices slices(int64_t matrices, int64_t row_begin, int64_t rows, int64_t keys, bool fused = false) const {
    SplitHalfBackwardSlices slices = {};
    slices.fused = fused;
    slices.row_begin = row_begin;
    slices.rows = rows;
    slices.matrices = matrices;
    slices.all_keys = sizes_.keys_of_rows(row_begin + rows);
    slices.keys = std::min(keys, slices.all_keys);
    slices.key_matrices = ceil_div(matrices, sizes_.group);
    slices.pitch = round_up(slices.all_keys, kSegment);
    int64_t at = 0;
    const auto place = [&](int64_t bytes) {
      const int64_t begin = at;
      at = round_up(at + bytes, kWorkspaceAlignment);
      return begin;
    };
    place(4 * sizes_.N * kSplitHalfFactsBytes);
    slices.marks_at = place(sizes_.N);
    slices.largest_at = place(4 * sizes_.N);
    slices.ticket_at = place(4);
    slices.cleared = at;
    slices.exact_at = place(times(sizes_.N, sizes_.L, 16));
    slices.part_bytes = fused ? 0 : 8 * (query_tiles(slices) + key_tiles(slices));
    slices.parts_at = place(slices.part_bytes);
    slices.query_at = place(matrices * rows * slice_pitch(sizes_.E) * 4);
    slices.grad_out_at = place(matrices * rows * slice_pitch(sizes_.Ev) * 4);
    slices.key_at = place(slices.key_matrices * slices.keys * slice_pitch(sizes_.E) * 4);
    slices.value_at = place(slices.key_matrices * slices.keys * slice_pitch(sizes_.Ev) * 4);
    slices.exponents_at = place(2 * (slices.row_blocks() + slices.key_blocks()) * 4);
    slices.records_at = place(fused ? slices.row_blocks() * kSplitHalfRecordBytes : 0);
    if (fused) {
      slices.bytes = at;
      return slices;
    }
    slices.weights_at = place(matrices * rows * slices.pitch * 4);
    slices.grads_at = place(matrices * rows * slices.pitch * 4);
    slices.segments_at = place(matrices * rows * (slices.pitch / kSegment) * 8);
    slices.deltas_at = place(matrices * rows * (slices.pitch / kSegment) * 4);
    slices.row_values_at = place(matrices * rows * 16);
    slices.tiles_at = place(2 * slices.tiles() * 4);
    slices.bytes = at;
    return slices;
  }
  SplitHalfBackwardSlices estimated(SplitHalfBackwardSlices slices) const {
    choose_parts(slices);
    slices.ns = ns(slices);
    return slices;
  }
  bool fits(const SplitHalfBackwardSlices& slices) const { return slices.bytes <= cap_; }

  // Of so many rows, the best of some numbers of matrices that fit; none: bytes beyond the cap.
  SplitHalfBackwardSlices most_matrices(int64_t row_begin, int64_t rows) const {
    const int64_t all = sizes_.keys_of_rows(row_begin + rows), group = sizes_.group;
    SplitHalfBackwardSlices best = slices(1, row_begin, rows, all);
    if (!fits(best)) return best;
    const auto consider = [&](int64_t matrices) {
      const SplitHalfBackwardSlices some = slices(matrices, row_begin, rows, all);
      if (!fits(some)) return;
      const SplitHalfBackwardSlices found = estimated(some);
      if (best.ns == 0 || found.ns < best.ns) best = found;
    };
    const int64_t one = slices(group, row_begin, rows, all).bytes, more = slices(2 * group, row_begin, rows, all).bytes - one;
    const int64_t most = one > cap_ ? 0 : std::min(sizes_.N / group, (cap_ - one) / std::max<int64_t>(more, 1) + 2);
    for (int64_t groups = most; groups > 0 && groups > most - 12; --groups) consider(groups * group);
    for (int64_t part = group - 1; part > 0 && best.ns == 0; --part) {
      if (group % part == 0) consider(part);
    }
    return best;
  }

  // Slices of about as many groups each, of as many as fit, without scores.
  SplitHalfBackwardSlices most_fused_matrices() const {
    const int64_t group = sizes_.group, groups = sizes_.N / group;
    const auto of = [&](int64_t count) { return slices(count * group, 0, sizes_.L, sizes_.keys(), true); };
    const int64_t one = of(1).bytes, more = std::max<int64_t>(of(2).bytes - one, 1);
    int64_t most = one > cap_ ? 1 : std::min(groups, (cap_ - one) / more + 1);
    while (most > 1 && !fits(of(most))) --most;  // places are rounded up
    SplitHalfBackwardSlices best = of(ceil_div(groups, ceil_div(groups, most)));
    best.ns = fused_ns(best);
    return best;
  }

  // From the last rows up, which see the most keys: as many as fit, and so many tiles fewer.
  std::vector<SplitHalfBackwardSlices> rows_of_one_matrix(int64_t keys, int64_t fewer) const {
    std::vector<SplitHalfBackwardSlices> ranges;
    const auto of = [&](int64_t begin, int64_t end) { return slices(1, begin, end - begin, keys); };
    for (int64_t end = sizes_.L; end > 0;) {
      const int64_t last = round_up(end, kSplitHalfTile) - kSplitHalfTile;
      if (!fits(of(last, end))) return {};
      // Bytes grow by as much with every tile.
      const int64_t two = std::max<int64_t>(last - kSplitHalfTile, 0), more = of(two, end).bytes - of(last, end).bytes;
      const int64_t tiles = more <= 0 ? 0 : std::max<int64_t>((cap_ - of(last, end).bytes) / more + 1 - fewer, 0);
      int64_t begin = std::max<int64_t>(last - tiles * kSplitHalfTile, 0);
      while (begin < last && !fits(of(begin, end))) begin += kSplitHalfTile;
      SplitHalfBackwardSlices range = of(begin, end);
      if (!sizes_.causal && begin > 0 && !ranges.empty() && ranges.back().rows == range.rows) {
        range.parts = ranges.back().parts;
        range.ns = ranges.back().ns;
      } else {
        range = estimated(range);
      }
      ranges.push_back(range);
      end = begin;
    }
    std::reverse(ranges.begin(), ranges.end());
    return ranges;
  }

  void offer(std::vector<SplitHalfBackwardSlices> ranges) {
    int64_t bytes = 0, ns = 0;
    for (const SplitHalfBackwardSlices& range : ranges) {
      bytes = std::max(bytes, range.bytes);
      ns += range.ns;
    }
    if (ranges.empty() || bytes > cap_ || (!best_.ranges.empty() && best_.bytes <= cap_ && ns >= best_.ns)) return;
    best_ = {std::move(ranges), bytes, ns};
  }

  int64_t E_tiles() const { return ceil_div(sizes_.E, kSplitHalfTile); }
  int64_t query_tiles(const SplitHalfBackwardSlices& s) const {
    return s.matrices * ceil_div(s.rows, kSplitHalfTile) * E_tiles();
  }
  int64_t key_tiles(const SplitHalfBackwardSlices& s) const {
    return s.key_matrices * ceil_div(s.row_begin + s.rows == sizes_.L ? sizes_.S : s.all_keys, kSplitHalfTile) *
           (E_tiles() + ceil_div(sizes_.Ev, kSplitHalfTile));
  }
  // Tiles of scores of a matrix that some row sees.
  int64_t seen_tiles(const SplitHalfBackwardSlices& s) const {
    const int64_t rows = ceil_div(s.rows, kSplitHalfTile), keys = ceil_div(s.all_keys, kSplitHalfTile);
    if (!sizes_.causal) return rows * keys;
    const int64_t first = s.row_begin / kSplitHalfTile + 1, growing = std::min(rows, std::max<int64_t>(keys - first, 0));
    return growing * first + growing * (growing - 1) / 2 + (rows - growing) * keys;
  }

  // A step of 64 in k of a tile of 128 x 128, and what a tile takes besides, in ns. Fitted to an H200, but kGradsTile: it was 3600
  // before delta was made there.
  static constexpr int64_t kStep = 1300, kWeightsTile = 4700, kGradsTile = 4600, kSumStep = 1200, kSumTile = 2200,
                           kLaunch = 4000;
  static constexpr int64_t kNarrowSumStep = 1400;  // of 128 x 64
  // Of scores that are made twice, neither fitted: sums are kept in registers, terms are 128 KB a tile on their way to memory.
  static constexpr int64_t kPairSumsTile = 1500, kPairTermsTile = 4000;

  // Time of the gradients' sums over a piece.
  int64_t sums_ns(const SplitHalfBackwardSlices& s, const SplitHalfGradientParts& parts) const {
    const int64_t pieces = ceil_div(s.all_keys, s.keys), seen = seen_tiles(s);
    const int64_t queries = query_tiles(s), keys = std::max<int64_t>(key_tiles(s) / pieces, 1);
    // In steps of 64, on the average.
    const int64_t query_steps = std::max<int64_t>(2 * seen / ceil_div(s.rows, kSplitHalfTile) / pieces, 1),
                  key_steps = std::max<int64_t>(
                      std::min(s.matrices, sizes_.group) * 2 * seen / ceil_div(s.all_keys, kSplitHalfTile), 1);
    constexpr int64_t kLeast = 4;  // of a part
    if ((parts.of_rows && query_steps < kLeast * parts.count) || (parts.of_keys && key_steps < kLeast * parts.count))
      return kMostCost;
    const int64_t step = std::max(sizes_.E, sizes_.Ev) <= 64 ? kNarrowSumStep : kSumStep;
    if (parts.in_shares) {
      const int64_t steps = std::max(query_steps, key_steps), share = ceil_div(times(queries + keys, steps), sms_);
      return share * step + (share / steps + 2) * kSumTile;
    }
    const int64_t of_query = parts.of_rows ? parts.count : 1, of_key = parts.of_keys ? parts.count : 1;
    return makespan(queries * of_query, ceil_div(query_steps, of_query) * step + kSumTile, keys * of_key,
                    ceil_div(key_steps, of_key) * step + kSumTile, sms_);
  }
  void choose_parts(SplitHalfBackwardSlices& s) const {
    s.parts = {false, false, 1, false};
    int64_t best = sums_ns(s, s.parts);
    for (const int64_t count : {2, 4, 8}) {
      for (int kinds = 1; kinds < 4; ++kinds) {
        const SplitHalfGradientParts parts = {kinds % 2 != 0, kinds >= 2, count, false};
        const int64_t ns = sums_ns(s, parts);
        if (ns >= best - best / 16) continue;  // a part waits for the one before it: not for little
        best = ns;
        s.parts = parts;
      }
    }
    // Of sums that are about as long, all of which one head has.
    const int64_t longer = std::max(s.rows, s.all_keys), shorter = std::min(s.rows, s.all_keys);
    if (sizes_.causal || s.keys < s.all_keys || std::min(s.matrices, sizes_.group) > 1 || longer > 2 * shorter) return;
    const SplitHalfGradientParts shares = {false, false, 1, true};
    if (sums_ns(s, shares) < best - best / 16) s.parts = shares;
  }

  int64_t ns(const SplitHalfBackwardSlices& s) const {
    constexpr int64_t kBytesPerNs = 2600, kTermsBytesPerNs = 3800, kSplitBytesPerNs = 3000, kL2 = 30000000;
    const int64_t pieces = ceil_div(s.all_keys, s.keys), width = sizes_.E + sizes_.Ev, tiles = times(s.matrices, seen_tiles(s));
    const int64_t steps = ceil_div(sizes_.E, 64) + ceil_div(sizes_.Ev, 64);
    const bool twice = split_half_scores_twice(sizes_.E, sizes_.Ev);
    const int64_t of_tile =
        twice ? 2 * steps * kStep + kPairSumsTile + kPairTermsTile : steps * kStep + kWeightsTile + kGradsTile;
    const int64_t scores = times(pieces, ceil_div(ceil_div(tiles, pieces), sms_), of_tile),
                  sums = times(pieces, sums_ns(s, s.parts));
    const int64_t score_bytes = twice ? 0 : times(tiles, kSplitHalfTile * kSplitHalfTile * 16);  // of floats that become terms
    const int64_t rows = s.matrices * s.rows * width, keys = s.key_matrices * s.all_keys * width;
    const int64_t again = pieces == 1 ? 0 : twice ? keys : s.key_matrices * s.all_keys * sizes_.E;
    const int64_t split = 8 * (rows + keys + again);
    const int64_t cold = 4 * (rows + keys) > kL2 ? 4 * (rows + keys) : 0;
    const int64_t carried = s.row_begin > 0 || s.matrices < sizes_.group ? 8 * keys : 0;
    const int64_t launches = (pieces > 1 ? 2 + 5 * pieces : 6) - (twice ? 1 : 0);
    const int64_t of_slice = launches * kLaunch + scores + sums + score_bytes / kTermsBytesPerNs + split / kSplitBytesPerNs +
                             (cold + carried) / kBytesPerNs;
    return times(ceil_div(sizes_.N, s.matrices), of_slice);
  }

  // Both walks of a row tile over 64 keys, and a column tile's over 64 queries; predicted.
  static constexpr int64_t kRowSegment[2] = {2300, 3200}, kColumnBlock[2] = {2000, 2800}, kFusedTile = 4000;
  // A mask's tile of 128 x 64 over a matrix, which is 96 KB of terms; and to look for a mask's matrices in a slice; predicted.
  static constexpr int64_t kMaskStep[2] = {1600, 2600}, kMaskMatrix = 600;

  int64_t fused_ns(const SplitHalfBackwardSlices& s) const {
    constexpr int64_t kSplitBytesPerNs = 3000;
    const int wide = std::max(sizes_.E, sizes_.Ev) > 32 ? 1 : 0;
    const int64_t rows = ceil_div(s.rows, kSplitHalfTile), all_keys = ceil_div(sizes_.S, kSplitHalfTile),
                  keys = ceil_div(s.all_keys, kSplitHalfTile);
    const int64_t steps = 2 * times(s.matrices, seen_tiles(s));  // of all tiles
    // Causal tiles even out but for the longest.
    const auto kernel = [&](int64_t tiles, int64_t longest, int64_t step) {
      const int64_t even = times(ceil_div(steps, sms_), step) + ceil_div(tiles, sms_) * kFusedTile;
      if (sizes_.causal) return std::max(even, longest * step + kFusedTile);
      return times(ceil_div(tiles, sms_), longest * step + kFusedTile);
    };
    const int64_t of_rows = kernel(s.matrices * rows, 2 * keys, kRowSegment[wide]),
                  of_columns = kernel(s.key_matrices * all_keys, times(2 * rows, sizes_.group), kColumnBlock[wide]);
    const int64_t split = 8 * (s.matrices * s.rows + s.key_matrices * s.all_keys) * (sizes_.E + sizes_.Ev);
    int64_t of_mask = 0;
    if (sizes_.mask_matrices > 0) {
      const int64_t in_slice = std::min(s.matrices, sizes_.mask_matrices), share = ceil_div(s.matrices, in_slice);
      of_mask = 2 * kLaunch + times(sizes_.mask_matrices, kMaskMatrix) +
                kernel(times(in_slice, rows, 2 * all_keys), share, kMaskStep[wide]);
    }
    return times(ceil_div(sizes_.N, s.matrices), 3 * kLaunch + split / kSplitBytesPerNs + of_rows + of_columns + of_mask);
  }

  const SplitHalfBackwardSizes& sizes_;
  int64_t cap_, sms_;
  SplitHalfBackwardPlan best_ = {};
};

inline SplitHalfBackwardPlan plan_split_half_backward(const SplitHalfBackwardSizes& sizes, int64_t cap, int64_t sms) {
  constexpr auto kPlan = [](const SplitHalfBackwardSizes& sizes, int64_t cap, int64_t sms) {
    return SplitHalfBackwardPlanner(sizes, cap, sms).plan();
  };
  return last_plan<kPlan>(sizes, cap, sms);
}

}  // namespace attention_ext
