// The weights of a block of keys in shared memory, as wgmma reads them: tiles of 64 rows by 64 keys, 128 bytes a row, swizzled.
// Each warp makes its own 16 rows. `row`: of this thread's first element in a 64 x n product.
#pragma once

#include "attention/sm90/fused/work.cuh"
#include "attention/visibility/dropout.cuh"
#include "device/common/types.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"

namespace attention_ext {

// Byte offset of 16-byte chunk `chunk` of a row.
template <class Tile>
__device__ __forceinline__ uint32_t weights_offset(uint32_t row, uint32_t chunk) {
  return chunk / 8 * (Tile::kM * Tile::kStep * sizeof(typename Tile::T)) + swizzled(row, chunk % 8);
}

template <class Tile>
__device__ __forceinline__ void store_weights(const float (&weights)[Tile::kN / 2], uint32_t s_weights, int row) {
  const int lane = threadIdx.x % 32;
  const uint32_t matrix_row = row - lane / 4 + lane % 16;  // matrices 0 and 2: the warp's first eight rows; 1 and 3: the others
#pragma unroll
  for (int tile = 0; tile < Tile::kN / 8; tile += 2) {
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = pack_pair<typename Tile::T>(weights[tile * 4 + 2 * i], weights[tile * 4 + 2 * i + 1]);
    store_matrices(s_weights + weights_offset<Tile>(matrix_row, tile + lane / 16), m[0], m[1], m[2], m[3]);
  }
}

// Dropout, a row's share of a set at a time: next to the sums there are few registers, and a group's rows share no sets.
template <class Tile>
__device__ __forceinline__ void drop_weights(const Dropout& dropout, const FusedWork& work, int block, uint32_t s_weights,
                                             int row) {
#pragma unroll 1
  for (int i = 0; i < Tile::kN / 8; ++i) {  // this thread's two rows in turn, 16 keys at a time
    const int of = row + i % 2 * 8, key = i / 2 * 16;
    const auto pair_at = [&](int chunk) -> uint32_t& {
      const uint32_t s_chunk = s_weights + weights_offset<Tile>(of, key / 8 + chunk);
      return *static_cast<uint32_t*>(const_cast<void*>(shared_pointer(s_chunk + threadIdx.x % 4 * 4)));
    };
    uint32_t kept[2] = {~0u, ~0u};
    visit_kept_of_row<8>(0, dropout, work.head_of(of), work.query_of(of), block * Tile::kN + key, [&](int e, bool keep) {
      if (!keep) kept[e / 4] &= e % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
    });
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) pair_at(chunk) &= kept[chunk];
  }
}

}  // namespace attention_ext
