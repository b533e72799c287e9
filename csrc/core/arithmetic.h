// Rounding, and the arithmetic of workspace slices. Pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

namespace attention_ext {

constexpr int64_t kWorkspaceAlignment = 256;  // each array of a workspace begins on such a boundary
constexpr int64_t kSliceTile = 128;           // rows or columns of a slice are whole tiles where there is room for one
// Tensor Cores truncate as they add: 2^-23 of a growing sum for each 16 of its terms. So half types' sums over keys stop after
// kPartKeys, an error of 2.5e-4, and go on in float from a carry in the workspace; so do sums over query rows. wgmma carries
// nothing and takes no more than kMostWgmmaKeys, an error of 2e-3: twice half precision's own unit.
constexpr int64_t kPartKeys = int64_t{1} << 15, kMostWgmmaKeys = int64_t{1} << 18;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Bytes of carry for a row of `cols` sums over S keys of an operand of `element` bytes: 0 where one sum does.
constexpr int64_t carry_row_bytes(int64_t S, int64_t cols, int64_t element) {
  return element == 2 && S > kPartKeys ? round_up(cols, 4) * 4 : 0;
}

// Leading dimension of a slice: multiples of 8 elements keep rows on 16-byte boundaries in every dtype.
constexpr int64_t slice_pitch(int64_t cols) { return std::max<int64_t>(round_up(cols, 8), 8); }

// Pieces of `total`, as even as may be, of at most `limit` each: whole tiles where the limit holds one, else multiples of
// `granule` (limit is at least one granule).
constexpr int64_t even_piece(int64_t total, int64_t limit, int64_t granule, int64_t tile) {
  if (limit >= total) return std::max<int64_t>(total, 1);
  const int64_t step = limit >= tile ? tile : granule;
  limit = std::max(limit / step * step, step);
  const int64_t pieces = (total + limit - 1) / limit;
  return round_up((total + pieces - 1) / pieces, step);
}

}  // namespace attention_ext
