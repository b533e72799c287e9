// Few rows over many keys, as in decoding: the keys are split in pieces, each a tile of its own, and what pieces leave is combined.
// Where keys are split decides a result's bits. So that follows from the rows and keys of one group of heads and from the head dims
// alone, never from the card nor from how many groups there are. Pure host code, shared with the plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"

namespace attention_ext {

constexpr int kSplitRows = 64;      // of a group at most, one warpgroup's: more are much to leave
constexpr int kWideSplitRows = 32;  // the same of sm90_512 and sm90_1024, whose rows leave more
constexpr int64_t most_split_rows(int64_t E, int64_t Ev) { return std::max(E, Ev) <= 256 ? kSplitRows : kWideSplitRows; }
constexpr int64_t kSplitKeys = 512;   // at most these are not split
constexpr int64_t kMostPieces = 256;  // a thread of the combining kernel each

struct KeySplit {
  int64_t pieces;  // 1: not split
  int blocks;      // of keys of a piece
};
constexpr KeySplit kNotSplit = {1, 0};

constexpr bool keys_split(int64_t L, int64_t S, int64_t group, int64_t most_rows = kSplitRows) {
  return L <= most_rows && L * group <= most_rows && S > kSplitKeys;
}
// In pieces of `blocks` blocks of so many keys.
constexpr KeySplit split_keys(int64_t S, int64_t blocks, int keys) {
  const int64_t pieces = ceil_div(S, blocks * keys);
  return pieces > 1 ? KeySplit{pieces, static_cast<int>(blocks)} : kNotSplit;
}

// The workspace that pieces take: of as many groups of heads as fit. The groups are taken in several launches where not all fit, so
// that their number does not decide whether keys are split; where the cap holds not one, they are not.
struct PiecesWorkspace {
  KeySplit split;
  int64_t pitch;   // floats of a row of O that a piece leaves
  int64_t groups;  // of a launch
  int64_t rows;    // that the pieces of a group leave: of each a row of O, a reference and a sum
  int64_t group_bytes() const { return rows * 4 * (pitch + 2); }
  int64_t bytes() const { return groups * group_bytes(); }
};
inline PiecesWorkspace pieces_workspace(const KeySplit& split, int64_t groups, int64_t rows, int64_t Ev, int64_t cap) {
  PiecesWorkspace plan = {split, round_up(Ev, 8), groups, split.pieces * rows};
  if (split.pieces > 1 && plan.group_bytes() <= cap) {
    plan.groups = std::min(groups, cap / plan.group_bytes());
    return plan;
  }
  return {kNotSplit, plan.pitch, groups, 0};
}

}  // namespace attention_ext
