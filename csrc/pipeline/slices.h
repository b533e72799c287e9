// Arithmetic of workspace slices, shared by the forward and the backward driver. Pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

namespace attention_ext {

constexpr int64_t kWorkspaceAlignment = 256;  // each array of a workspace begins on such a boundary
constexpr int64_t kSliceTile = 128;           // rows or columns of a slice are whole tiles where there is room for one

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Leading dimension of a slice: multiples of 8 elements keep rows on 16-byte boundaries in every dtype.
constexpr int64_t slice_pitch(int64_t cols) { return std::max<int64_t>(round_up(cols, 8), 8); }

// The longest even pieces of `total` of at most `limit` each, rounded to `multiple` where `limit` allows one.
constexpr int64_t even_piece(int64_t total, int64_t limit, int64_t multiple) {
  limit = std::max<int64_t>(std::min(limit, total), 1);
  if (limit >= total) return limit;
  if (limit >= multiple) limit = limit / multiple * multiple;
  const int64_t pieces = (total + limit - 1) / limit;
  const int64_t even = (total + pieces - 1) / pieces;
  return limit >= multiple ? std::min(round_up(even, multiple), limit) : even;
}

}  // namespace attention_ext
