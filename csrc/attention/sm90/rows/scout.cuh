// Which blocks of keys a mask shows to any row of a tile: two warps of the producers' warpgroup look ahead of the loads.
#pragma once

#include "attention/params.h"
#include "attention/sm90/rows/tile.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "device/sm90/mbarrier.cuh"

namespace attention_ext {

// One warp, which takes every kScouts-th block; -inf of a float mask hides, too.
template <class Tile>
class RowsScout {
 public:
  __device__ __forceinline__ RowsScout(const ForwardParams& p, typename Tile::Shared& shared, int scout)
      : p_(p), shared_(shared), work_(shared.scout_work[scout]), scout_(scout) {}

  __device__ __forceinline__ void run(const RowsOrder& order) {
    RowsPlaces places(order.tiles);
    uint32_t count = 0;  // of blocks, of all tiles
#pragma unroll 1
    while (places.next()) {
      __syncwarp();  // all lanes have left the tile before
      if (threadIdx.x % 32 == 0) {
        work_.init(p_, order, places.place());
        work_.mask = batch_offset(p_.batch, p_.mask, work_.n_group * work_.group, 0);
      }
      __syncwarp();  // the work is written
#pragma unroll 1
      for (int block = work_.blocks() - 1; block >= 0; --block, ++count) {
        if (count % Tile::kScouts != static_cast<uint32_t>(scout_)) continue;
        const int slot = count % Tile::kScouted;
        mbarrier_wait(shared_address(&shared_.scouted_empty[slot]), (count / Tile::kScouted & 1) ^ 1);
        const bool visible = shows(block);
        if (threadIdx.x % 32 == 0) {
          shared_.scouted[slot] = visible;
          mbarrier_arrive(shared_address(&shared_.scouted_full[slot]));
        }
      }
    }
  }

 private:
  __device__ __forceinline__ bool shows(int block) const {
    if ((block + 1) * Tile::kN > work_.keys) return true;  // the last block may be read by single keys alone
    bool any = true;
    visit_mask<typename Tile::T>(p_.mask, p_.mask_type, [&](auto* g_mask) {
      g_mask += static_cast<int64_t>(block) * Tile::kN * p_.mask.col_stride;
      using Stored = std::remove_cvref_t<decltype(*g_mask)>;
      any = p_.mask.vector ? any_shown<16 / sizeof(Stored)>(g_mask) : any_shown<1>(g_mask);
    });
    return any;
  }

  // kKeys: that a lane reads at once.
  template <int kKeys, class Stored>
  __device__ __forceinline__ bool any_shown(const Stored* g_mask) const {
    constexpr int kChunks = Tile::kN / kKeys, kAtOnce = 4;  // of a row; whose reads are under way together
    const bool same = p_.mask.row_stride == 0 && (work_.group == 1 || p_.mask.batch_stride[p_.batch.count - 1] == 0);
    const int rows = same ? 1 : work_.rows;
#pragma unroll 1
    for (int first = threadIdx.x % 32; first / 32 * 32 < rows * kChunks; first += 32 * kAtOnce) {
      bool any = false;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int chunk = first + 32 * i, row = min(chunk / kChunks, rows - 1);
        const Stored* g_chunk = g_mask + work_.offset_of_row(p_.batch, p_.mask, work_.mask, row) +
                                static_cast<int64_t>(chunk % kChunks * kKeys) * p_.mask.col_stride;
        struct alignas(kKeys * sizeof(Stored)) Chunk {
          Stored key[kKeys];
        };
        const Chunk keys = *reinterpret_cast<const Chunk*>(g_chunk);
#pragma unroll
        for (int key = 0; key < kKeys; ++key) any |= mask_shows(keys.key[key]);
      }
      if (__any_sync(0xffffffffu, any)) return true;
    }
    return false;
  }

  const ForwardParams& p_;
  typename Tile::Shared& shared_;
  RowsWork<Tile>& work_;
  const int scout_;
};

}  // namespace attention_ext
