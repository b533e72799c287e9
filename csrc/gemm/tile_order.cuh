// The order in which CTAs take the block tiles of a product.
#pragma once

#include <cstdint>

namespace attention_ext {

struct TileIndex {
  int64_t batch;  // from the beginning of the slice
  int m, n;
};

// Consecutive CTAs walk down groups of 8 row tiles before they step to the next column tile: the CTAs that run at the
// same time then share few panels of A and B, which stay in L2.
__device__ __forceinline__ TileIndex tile_of(unsigned block, int m_tiles, int n_tiles, int64_t first_batch) {
  constexpr unsigned kGroup = 8;
  const unsigned per_batch = static_cast<unsigned>(m_tiles) * n_tiles;
  const unsigned batch = block / per_batch, tile = block - batch * per_batch;
  const unsigned group = tile / (kGroup * n_tiles), in_group = tile - group * kGroup * n_tiles;
  const unsigned rows_left = m_tiles - group * kGroup, rows = rows_left < kGroup ? rows_left : kGroup;
  return {first_batch + batch, static_cast<int>(group * kGroup + in_group % rows), static_cast<int>(in_group / rows)};
}

}  // namespace attention_ext
