// A bias of the query's dtype on its way to the scores of a consumer warp.
#pragma once

#include "attention/sm90/rows/tile.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"

namespace attention_ext {

// Where shared memory has room the thread that loads keys brings it, as TMA brings a tile of queries, and one instruction takes the
// pairs of four 8 x 8 matrices to the lanes that have these scores.
template <class Tile, bool kRing>
class RowsBias {
 public:
  using T = typename Tile::T;
  static constexpr int kScores = Tile::kN / 2;

  // first_row: of the warp's 16 rows in the tile.
  __device__ __forceinline__ void begin_tile(const ForwardParams& p, typename Tile::Shared&, const RowsWork<Tile>& work,
                                             int first_row) {
    const int lane = threadIdx.x % 32;
    row_offset_ = swizzled(work.mask_place(p, first_row + lane % 16), lane / 16);
  }
  __device__ __forceinline__ void request(const ForwardParams&, const typename Tile::Shared&, int, int) {}  // not by consumers

  // The block next in the ring, while its scores are multiplied. All threads of all consumers.
  __device__ __forceinline__ void receive(typename Tile::Shared& shared) {
    mbarrier_wait(shared_address(&shared.bias_full[place_.slot]), place_.parity);
    const uint32_t s_row = shared_address(shared.bias[place_.slot][0]) + row_offset_;
#pragma unroll
    for (int step = 0; step < Tile::kBiasSteps; ++step) {
#pragma unroll
      for (int chunk = 0; chunk < 8; chunk += 2) {
        // Rows 0 to 7 and 8 to 15 of a chunk, and of the next one, as scores lie. The swizzle is an exclusive or with the row, and
        // so is the way from chunk to chunk.
        load_matrices((s_row ^ chunk * 16) + step * static_cast<uint32_t>(sizeof(shared.bias[0][0])),
                      pairs_[step * 4 + chunk / 2]);
      }
    }
    // Reads of these instructions may still be under way, behind those of products, when what follows them arrives.
    fence_async_proxy();
    mbarrier_arrive(shared_address(&shared.bias_empty[place_.slot]));
    place_.advance();
  }

  // x: products of the block that was received, in; scores, out.
  __device__ __forceinline__ void add_to(float (&x)[kScores], float scale) const {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      add_bias(x, 2 * i, scale, unpack_pair(pairs_[i / 4][i % 4], static_cast<const T*>(nullptr)));
    }
  }

 private:
  uint32_t pairs_[kScores / 8][4];
  uint32_t row_offset_;  // of the row of the mask for the row of the matrices that this lane points at, in a box
  RingPlace<Tile::kBiasBlocks> place_;
};

// Elsewhere it waits in registers, read a block ahead, and lanes exchange it.
template <class Tile>
class RowsBias<Tile, false> {
 public:
  using T = typename Tile::T;
  static constexpr int kScores = Tile::kN / 2;

  __device__ __forceinline__ void begin_tile(const ForwardParams&, typename Tile::Shared&, const RowsWork<Tile>&, int) {}

  // block: the next one; less than 0: some block, whose bias is not used. For keys after the mask's last one its last chunk is read
  // again.
  __device__ __forceinline__ void request(const ForwardParams& p, const typename Tile::Shared& shared, int first_row,
                                          int block) {
    const int first = max(block, 0) * Tile::kN;
    const T* g_mask = static_cast<const T*>(p.mask.data) + first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      chunks_[half].load(g_mask + shared.mask_row[first_row + threadIdx.x % 32 / 4 + 8 * half], static_cast<int>(p.S) - first);
    }
    keep_order();  // the reads are not to be put off
  }

  __device__ __forceinline__ void receive(const typename Tile::Shared&) {}

  // x: products of the block that was requested, in; scores, out.
  __device__ __forceinline__ void add_to(float (&x)[kScores], float scale) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) chunks_[half].add_to(x, scale, half, static_cast<const T*>(nullptr));
  }

 private:
  BiasChunks<kScores> chunks_[2];
};

}  // namespace attention_ext
