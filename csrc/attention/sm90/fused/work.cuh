// What a CTA of the fused kernels works on: its rows, its keys, and the blocks of keys in the order of the walk.
#pragma once

#include "attention/params.h"
#include "attention/sm90/fused/tile.cuh"
#include "attention/visibility/score_modifier.cuh"

namespace attention_ext {

// Marks the blocks of keys that the mask shows to any of the CTA's rows: one warpgroup, all bits being 0. A barrier must follow.
template <class Tile, class Stored>
__device__ __forceinline__ void mark_visible_blocks(const ForwardParams& p, const FusedWork& work, const Stored* g_mask,
                                                    uint32_t* s_visible) {
  const int blocks = min(work.blocks(), kTrackedBlocks), lane = threadIdx.x % 32;
  const int rows = p.mask.row_stride == 0 && work.group == 1 ? 1 : work.rows;
  constexpr int kRowsAtOnce = 8;  // whose reads are under way together
  const int64_t low = work.offset_of_row(p.batch, p.mask, lane), high = work.offset_of_row(p.batch, p.mask, lane + 32);
#pragma unroll 1
  for (int block = work.first_block<Tile>() + threadIdx.x / 32 % 4; block < blocks; block += 4) {
    bool visible = false;
#pragma unroll 1
    for (int first = 0; first < rows && !visible; first += kRowsAtOnce) {
      bool any = false;
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        // Rows after the last one are the last one again.
        const Stored* g_row = g_mask + __shfl_sync(0xffffffffu, first < 32 ? low : high, first % 32 + row);
#pragma unroll
        for (int i = 0; i < Tile::kN / 32; ++i) {
          const int key = min(block * Tile::kN + i * 32 + lane, work.keys - 1);
          any |= mask_shows(g_row[key * p.mask.col_stride]);
        }
      }
      visible = __any_sync(0xffffffffu, any);
    }
    if (visible && lane == 0) atomicOr(&s_visible[block / 32], 1u << block % 32);
  }
}

// Walks over the blocks of keys that a consumer owns: every other one of those that are visible.
template <class Tile, bool kGeneral>
class BlockWalk {
 public:
  __device__ __forceinline__ BlockWalk(const FusedWork& work, const uint32_t* s_visible, int consumer)
      : work_(work), s_visible_(s_visible), ordinal_(consumer) {
    block_ = visible_from(work.first_block<Tile>());
    previous_ = work.blocks();
    if (consumer == 1) {
      previous_ = block_;
      block_ = visible_from(block_ + 1);
    }
  }
  __device__ __forceinline__ bool done() const { return block_ >= work_.blocks(); }
  // Whether the owned block is the last one.
  __device__ __forceinline__ bool at_last() const { return visible_from(visible_from(block_ + 1) + 1) >= work_.blocks(); }
  __device__ __forceinline__ void advance() {
    previous_ = visible_from(block_ + 1);
    block_ = visible_from(previous_ + 1);
    ordinal_ += 2;
  }
  __device__ __forceinline__ int block() const { return block_; }        // owned
  __device__ __forceinline__ int previous() const { return previous_; }  // the visible one before it, the other consumer's
  __device__ __forceinline__ int ordinal() const { return ordinal_; }    // of the owned block among the visible ones
  // When done: whether the last visible block is the other consumer's, namely previous(), number ordinal() - 1.
  __device__ __forceinline__ bool other_has_last() const { return previous_ < work_.blocks(); }

 private:
  __device__ __forceinline__ int visible_from(int from) const {
    const int blocks = work_.blocks();
    if constexpr (kGeneral) {
      while (from < min(blocks, kTrackedBlocks)) {
        const uint32_t bits = s_visible_[from / 32] >> from % 32;
        if (bits != 0) return min(from + __ffs(bits) - 1, blocks);
        from = (from / 32 + 1) * 32;
      }
    }
    return min(from, blocks);
  }

  const FusedWork& work_;
  const uint32_t* s_visible_;
  int ordinal_, block_, previous_;
};

}  // namespace attention_ext
