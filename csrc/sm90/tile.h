// The tile policy of the fused kernels for Hopper: one table of head-dim classes.
#pragma once

#include <cstdint>

namespace attention_ext {

// What a class of head dims bounds. The kernel itself works in steps of 64 of E and Ev and leaves out the steps a problem lacks.
struct FusedTileShape {
  int query_steps;  // of 64 of E that query has room for in shared memory
  int value_steps;  // of 64 of Ev in each of the two consumer warpgroups' registers
  int slots;        // of 16 KB in each warpgroup's ring of key and value tiles
};

// Shared memory: query 8 KB a step, weights 2 x 16 KB, rings 2 x 16 KB a slot, within 227 KB. Registers: 32 accumulators a value
// step and 64 scores a thread of 232; five value steps would leave nothing to compute with.
constexpr FusedTileShape fused_tile_shape(int head_dim_class) {
  return head_dim_class <= 384 ? FusedTileShape{6, 3, 4}   // 208 KB; a fifth slot would be 240
                               : FusedTileShape{8, 4, 4};  // 224 KB
}

template <class T_, int kClass>
struct FusedTile {
  using T = T_;
  static constexpr FusedTileShape kShape = fused_tile_shape(kClass);
  static constexpr int kM = 64;          // query rows: M of one wgmma, and all that registers hold of O at Ev = 512
  static constexpr int kN = 128;         // keys of a block: at 64 a product would read a third more of shared memory
  static constexpr int kStep = 64;       // of E or Ev: a row of 128 bytes, the widest swizzle
  static constexpr int kValueKeys = 32;  // keys of one slot of values: 32 x 256 is as much as 128 x 64 of keys
  static constexpr int kQuerySteps = kShape.query_steps;
  static constexpr int kValueSteps = kShape.value_steps;
  static constexpr int kSlots = kShape.slots;
  static constexpr int kConsumers = 2;  // warpgroups that multiply; one more loads
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  static_assert(128 * (kConsumers * kConsumerRegisters + kProducerRegisters) <= 65536, "an SM has 65,536 registers");

  // Tiles lie on 1024-byte boundaries, where the swizzle's pattern begins.
  struct Shared {
    alignas(1024) T query[kQuerySteps][kM * kStep];
    alignas(1024) T weights[kConsumers][kN / kStep][kM * kStep];
    alignas(1024) T ring[kConsumers][kSlots][kN * kStep];
    float reference[kConsumers][kM];  // that a block's weights are relative to
    float factor[kConsumers][kM];     // from the reference before to this one
    float sum[kConsumers][kM];
    int64_t mask_row[kM];                // offset of the mask's row, where there is a mask
    uint64_t full[kConsumers][kSlots];   // a ring's slot: the copy engine arrives with its bytes; its warpgroup waits
    uint64_t empty[kConsumers][kSlots];  // the warpgroup's 4 warps arrive; the ring's producer waits
    uint64_t weights_ready[kConsumers];  // 4 warps of the warpgroup that made them arrive; both warpgroups wait
    uint64_t weights_free[kConsumers];   // 4 warps of the other warpgroup arrive; the one that makes them waits
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
  static_assert(kValueSteps * kStep * kValueKeys <= kN * kStep, "a slot of values fits where one of keys does");
};

}  // namespace attention_ext
