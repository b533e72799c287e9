// How the backward by wgmma is cut into slices, chosen by what they would take on the card. Pure host code.
//
// Whole matrices are made in one launch where that is fastest: the workspace holds P and dS of some key heads at a time. Else a
// slice has P and dS of some matrices, rows and keys, 4 bytes a score. Where the keys of a matrix lie in several slices, dQ is
// carried from one to the next; where the rows of a key head do, dK and dV. Both are float, and lie in the workspace as well. A key
// head's sums may be cut by query heads too, so that they are no longer than others: then dK and dV are carried within a launch.
#pragma once

#include <cstdint>
#include <vector>

#include "core/arithmetic.h"
#include "core/slice.h"

namespace attention_ext {

struct BackwardSizes {
  int64_t N, L, S, E, Ev;
  int64_t group;  // query heads per key head
  bool causal, mask_grad;

  bool operator==(const BackwardSizes&) const = default;
};

// The order of slices: key heads, as many as there are in `batches`, then keys, then rows, then query heads of the group. Where
// only dQ is made, groups do not matter, and rows come before keys, so that what is carried is that of one slice's rows.
struct BackwardPass {
  bool of_rows, of_keys;            // makes dQ, and mask_grad; makes dK and dV
  int64_t sum_heads;                // query heads that a sum of dK or dV goes over before it is added to those of its key head
  int64_t batches = 1;              // query heads of a slice: whole groups, or an equal part of one
  std::vector<int64_t> rows, keys;  // where slices begin, and at the end L and S
  // Whole matrices in one launch: heads of `sum_heads` matrices whose scores are made ahead of their gradients, and P and dS of
  // `batches` at a time. 0: two launches a slice.
  int64_t ahead = 0;

  bool cuts_rows() const { return rows.size() > 2; }
  bool cuts_keys() const { return keys.size() > 2; }
  int64_t group(const BackwardSizes& sizes) const { return of_keys ? sizes.group : 1; }
};

struct BackwardPlan {
  std::vector<BackwardPass>
      passes;         // one that makes everything; or, where what is carried is too large, one for dQ and one for dK and dV
  int64_t slices_at;  // bytes: where slices begin, after delta, norm and the ticket
  int64_t bytes;
  int64_t ns;  // estimated, of the kernels that a slice has

  // Bytes from the ticket on that are 0 before the first launch: the ticket, and the counters.
  int64_t cleared(const BackwardSizes& sizes) const;
};

// Where what a slice has begins, in bytes from `slices_at`: the carry of dQ or, of whole matrices, counters; the carry of dK and
// dV, P, and dS.
struct SlicePlaces {
  int64_t key_carry, probabilities, score_grad, end;
};

// Rows and keys of one slice of a pass. A causal one leaves out rows that see none of its keys, and keys that none of its rows
// sees. hidden: no row sees any key, and the only thing to do is that dK and dV become 0.
struct SlicePart {
  int64_t row_begin, row_end, key_begin, key_end;
  int64_t carried_begin, carried_rows;  // of dQ in its carry, for each query head
  bool hidden;
};

inline bool carries_query(const BackwardPass& pass) { return pass.of_rows && pass.cuts_keys(); }
inline bool carries_keys(const BackwardSizes& sizes, const BackwardPass& pass) {
  return pass.of_keys && (pass.cuts_rows() || pass.sum_heads < sizes.group);
}
// Whether a launch has several sums of a key head, which are added to the carry one after the other.
inline bool adds_in_turn(const BackwardSizes& sizes, const BackwardPass& pass) {
  return pass.of_keys && pass.sum_heads < std::min(sizes.group, pass.batches);
}
// What is carried of so many rows or keys: whole tiles of them, as they lie in registers.
constexpr int64_t carry_floats(int64_t lines, int64_t width) { return round_up(lines, kSliceTile) * width; }
// Counters of 4 bytes: in one launch two for each head of tiles that are done; of sums that were added, one for each tile of dK and
// dV and warp.
inline int64_t done_counters(const BackwardSizes& sizes, const BackwardPass& pass) {
  return pass.ahead > 0 ? 2 * (sizes.N / pass.sum_heads) : 0;
}
inline int64_t added_counters(const BackwardSizes& sizes, const BackwardPass& pass) {
  constexpr int64_t kWarps = 8, kLeastWidth = 192;
  const int64_t columns = ceil_div(sizes.E, kLeastWidth) + ceil_div(sizes.Ev, kLeastWidth);
  return adds_in_turn(sizes, pass) ? ceil_div(sizes.S, kSliceTile) * columns * kWarps : 0;
}
inline int64_t counter_bytes(const BackwardSizes& sizes, const BackwardPass& pass) {
  return round_up((done_counters(sizes, pass) + added_counters(sizes, pass)) * 4, kWorkspaceAlignment);
}
SlicePlaces slice_places(const BackwardSizes& sizes, const BackwardPass& pass, const SlicePart& part);

// Visits the slices' rows and keys in order; false from visit ends it.
template <class Visit>
bool for_each_part(const BackwardSizes& sizes, const BackwardPass& pass, const Visit& visit) {
  const size_t row_parts = pass.rows.size() - 1, key_parts = pass.keys.size() - 1, inner = pass.of_keys ? row_parts : key_parts;
  for (size_t i = 0; i < row_parts * key_parts; ++i) {
    const size_t row = pass.of_keys ? i % inner : i / inner, key = pass.of_keys ? i / inner : i % inner;
    SlicePart part = {pass.rows[row], pass.rows[row + 1], pass.keys[key], pass.keys[key + 1], 0, sizes.L, false};
    if (!pass.of_keys) {
      part.carried_begin = part.row_begin;
      part.carried_rows = part.row_end - part.row_begin;
    }
    if (sizes.causal) {
      // To whole tiles of keys, so that what is carried of a tile has one beginning.
      if (part.row_end < sizes.L) part.key_end = std::min(part.key_end, round_up(part.row_end, kSliceTile));
      if (part.key_end <= part.key_begin) continue;
      part.hidden = part.key_begin >= part.row_end;
      if (part.hidden && !pass.of_keys) continue;
      if (!part.hidden) part.row_begin = std::max(part.row_begin, part.key_begin);
    }
    if (!visit(part)) return false;
  }
  return true;
}

// Remembered for a call's choice of a kernel, its workspace and its launches.
BackwardPlan plan_backward_slices(const BackwardSizes& sizes, int64_t cap, int64_t sms);

}  // namespace attention_ext
