// The tile of matrix products by warpgroups (Hopper) and the layout of shared memory that follows.
#pragma once

#include <cstdint>

#include "../device/types.cuh"
#include "tile.cuh"

namespace attention_ext {

// A's rows run along k (as weights, queries and keys lie); B's run along k, or, with kColumnsB, k counts its rows (values).
template <class T_, bool kColumnsB_>
struct WarpgroupTile {
  using T = T_;
  static constexpr bool kColumnsB = kColumnsB_;
  // Two warpgroups of 64 x 256: 128 accumulators a thread, as many as leave room for an epilogue, and the fewest reads of shared
  // memory per product (10 KB per 64 x 256 x 16). One CTA an SM.
  static constexpr int kM = 128, kN = 256;
  static constexpr int kK = 64;         // a row of 128 bytes, the widest swizzle
  static constexpr int kStages = 4;     // 192 KB; what is left holds the strips of the epilogue
  static constexpr int kConsumers = 2;  // warpgroups that multiply; one more loads
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  static constexpr int kStripRows = 16, kStripCols = 64;  // of a warp's own rows, on their way out
  static constexpr int kColumnBoxes = kN / 64;            // of 64 columns that B is loaded in with kColumnsB

  struct Stage {
    alignas(1024) T a[kM * kK];
    alignas(1024) T b[kN * kK];  // with kColumnsB boxes of 64 columns, one after the other
  };
  struct Shared {
    Stage stage[kStages];
    alignas(1024) T strip[4 * kConsumers][kStripRows * kStripCols];  // swizzled as the operands are
    uint64_t full[kStages];   // the copy engine arrives with a stage's bytes; the consumers wait
    uint64_t empty[kStages];  // the consumers' 8 warps arrive; the producer waits
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

}  // namespace attention_ext
