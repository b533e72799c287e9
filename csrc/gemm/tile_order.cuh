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

// The order for causal calls whose k grows with the row, for CTAs that stay and take every gridDim.x-th tile: the longest row tiles
// of all matrices first, and CTAs in reverse every other round, so that each gets about as much k.
__device__ __forceinline__ TileIndex longest_first(unsigned tile, int m_tiles, int n_tiles, int64_t matrices) {
  const unsigned count = static_cast<unsigned>(matrices), tiles = count * m_tiles * n_tiles, round_begin = tile - blockIdx.x;
  if (round_begin / gridDim.x % 2 == 1) tile = min(round_begin + gridDim.x, tiles) - 1 - blockIdx.x;
  const unsigned row_tile = tile / n_tiles;
  return {row_tile % count, m_tiles - 1 - static_cast<int>(row_tile / count), static_cast<int>(tile % n_tiles)};
}

}  // namespace attention_ext
