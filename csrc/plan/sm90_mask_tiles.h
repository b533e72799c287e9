// How the row kernels' backward on Hopper cuts the gradient of a mask among CTAs. Its kernel, its driver and its estimates read it
// here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"

namespace attention_ext {

constexpr int kMaskTile = 128;  // queries, and keys, of a tile

// A tile of the gradient is the sum of its terms: tiles of dS, of each score matrix that shares the tile's matrix of the mask;
// where the mask has one row, of all row tiles, and where it has one column, of all tiles of keys.
struct MaskTilesSizes {
  int64_t matrices;              // of the gradient
  int64_t sharers;               // score matrices for each
  int64_t row_tiles, key_tiles;  // of a score matrix
  bool rows_kept, cols_kept;     // whether the gradient has a row for each query, a column for each key
  int64_t steps;                 // of 64 of E and of Ev, together

  constexpr int64_t tiles() const { return matrices * (rows_kept ? row_tiles : 1) * (cols_kept ? key_tiles : 1); }
  constexpr int64_t terms() const { return sharers * (rows_kept ? 1 : row_tiles) * (cols_kept ? 1 : key_tiles); }
  // What a CTA leaves of its terms: lines of a tile's queries or keys in float. Of one row or column it is one line.
  constexpr int64_t lines() const { return rows_kept && cols_kept ? kMaskTile : 1; }
  constexpr int64_t part_bytes() const { return lines() * kMaskTile * static_cast<int64_t>(sizeof(float)); }
};

struct MaskTilesPlan {
  int64_t splits = 1;  // CTAs that share a tile's terms
  int64_t bytes = 0;   // of the parts that they leave; 0: the only one rounds the sum itself
  int64_t ns = 0;      // estimated
};

// Few tiles of many terms are shared by several CTAs, a small kernel sums what they leave. How many is least by estimate on a card
// of 132 SMs, whatever card there is, so that bits follow from shapes alone, unless `room` is short. Times are predicted: L2 bounds
// a step, 32 KB at 38 bytes a clock.
constexpr MaskTilesPlan plan_mask_tiles(const MaskTilesSizes& sizes, int64_t room) {
  constexpr int64_t kSms = 132, kMostRounds = 8, kMostSplits = 128;
  constexpr int64_t kTileNs = 1500, kStepNs = 490, kSumsNs = 3000, kBytesPerNs = 2000;
  const int64_t tiles = std::max<int64_t>(sizes.tiles(), 1), terms = std::max<int64_t>(sizes.terms(), 1);
  const bool always = !sizes.rows_kept && !sizes.cols_kept;  // one number of a tile: a line is not summed by its own CTA
  MaskTilesPlan best;
  for (int64_t splits = 1; splits <= std::min(terms, kMostSplits); ++splits) {
    const int64_t items = tiles * splits, bytes = splits > 1 || always ? items * sizes.part_bytes() : 0;
    if (splits > 1 && (items > kMostRounds * kSms || bytes > room)) break;
    const int64_t sums = bytes > 0 ? kSumsNs + 2 * bytes / kBytesPerNs : 0;
    const int64_t ns = ceil_div(items, kSms) * (kTileNs + ceil_div(terms, splits) * sizes.steps * kStepNs) + sums;
    if (splits == 1 || ns < best.ns) best = {splits, bytes, ns};
  }
  return best;
}

}  // namespace attention_ext
