// The tiles of sm90/mainloop.cuh's products by wgmma (Hopper) and the layouts of shared memory that follow.
#pragma once

#include <cstdint>

#include "device/common/types.cuh"
#include "device/sm80/cp_async.cuh"

namespace attention_ext {

// A's rows run along k (as weights, queries and keys lie); B's run along k, or, with kColumnsB, k counts its rows (values).
template <class T_, bool kColumnsB_, int kN_ = 256, int kConsumerRegisters_ = 232>
struct WgmmaTile {
  using T = T_;
  static constexpr bool kColumnsB = kColumnsB_;
  static constexpr int kTerms = 1;  // half terms of an operand's element
  // Two warpgroups of 64 x 256: 128 accumulators a thread, as many as leave room for an epilogue, and the fewest reads of shared
  // memory per product (10 KB per 64 x 256 x 16). One CTA an SM.
  static constexpr int kM = 128, kN = kN_;
  static constexpr int kK = 64;                      // a row of 128 bytes, the widest swizzle
  static constexpr int kStages = kN == 256 ? 4 : 5;  // 192 or 200 KB; what is left holds the strips of the epilogue
  static constexpr int kSkew = kStages - 2;          // steps that the second warpgroup begins after the first
  static constexpr int kConsumers = 2;               // warpgroups that multiply; one more loads
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = kConsumerRegisters_, kProducerRegisters = 504 - 2 * kConsumerRegisters;
  static constexpr int kStripRows = 16, kStripCols = 64;  // of a warp's own rows, on their way out
  static constexpr int kColumnBoxes = kN / 64;            // of 64 columns that B is loaded in with kColumnsB

  struct Stage {
    alignas(1024) T a[kTerms][kM * kK];
    alignas(1024) T b[kTerms][kN * kK];  // with kColumnsB boxes of 64 columns, one after the other
  };
  struct Shared {
    Stage stage[kStages];
    alignas(1024) T strip[4 * kConsumers][kStripRows * kStripCols];  // swizzled as the operands are
    uint64_t full[kStages];                                          // TMA arrives with a stage's bytes; the consumers wait
    uint64_t empty[kStages];                                         // the consumers' 8 warps arrive; the producer waits
    uint64_t wanted;  // of tickets.cuh: the producer arrives, which will soon need the next tile
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");

  // A warp's strip, for an epilogue that wants one.
  static __device__ __forceinline__ uint32_t strip_address(Shared& shared, int warp) {
    return shared_address(shared.strip[warp]);
  }
};

// split_half: float32 operands as two half terms each, high + low. A product is high . high + high . low + low . high, summed over
// kPromoted of k on Tensor Cores and beyond in float registers.
template <bool kColumnsB_, int kPromoted_, int kN_ = 128>
struct SplitHalfWgmmaTile {
  using T = __half;
  static constexpr bool kColumnsB = kColumnsB_;
  static constexpr int kTerms = 2;
  // Two warpgroups of 64 x 128: 64 accumulators of a part and 64 sums a thread; at n = 256 they would be all 255 registers.
  // n = 64 reads as much of A for half of the products, but where there are no more columns.
  static constexpr int kM = 128, kN = kN_;
  static constexpr int kK = 64;                     // a row of 128 bytes
  static constexpr int kPromoted = kPromoted_;      // 6 products of 64 x 128 x 16 truncate for every 32
  static constexpr int kStages = kN == 64 ? 4 : 3;  // of 48 KB, of 64 KB
  static constexpr int kSkew = 1;                   // a step is long, and three stages are few to be apart
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  static constexpr int kStripRows = 16, kStripCols = 64;
  static constexpr int kColumnBoxes = kN / 64;

  struct Stage {
    alignas(1024) T a[kTerms][kM * kK];  // high, low
    alignas(1024) T b[kTerms][kN * kK];
  };
  struct Shared {
    Stage stage[kStages];
    alignas(1024) T strip[4 * kConsumers][kStripRows * kStripCols];
    uint64_t full[kStages];  // as above
    uint64_t empty[kStages];
    uint64_t wanted;
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
  static_assert(kK % kPromoted == 0 && kPromoted % 16 == 0, "a step is made of whole parts");

  static __device__ __forceinline__ uint32_t strip_address(Shared& shared, int warp) {
    return shared_address(shared.strip[warp]);
  }
};

}  // namespace attention_ext
