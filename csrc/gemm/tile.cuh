// The tiles of mainloop.cuh's products, which run on every card, and the layout of shared memory that follows.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "device/common/types.cuh"

namespace attention_ext {

struct TileShape {
  int m, n, k;  // block tile
  int stages;   // shared memory buffers in the copy pipeline
  int threads;
  int ctas_per_sm;  // what registers and shared memory are budgeted for
};

// The table of tiles. kSplitHalf: float32 operands as two half terms each (gemm/split_half).
template <class T, bool kSplitHalf>
constexpr TileShape tile_shape() {
  if constexpr (kSplitHalf) {
    // 8 warps of 64x32, 64 accumulators of a step and 64 sums a thread, so one CTA per SM.
    return {128, 128, 64, 2, 256, 1};
  } else if constexpr (sizeof(T) == 2) {
    // wmma: 4 warps of 64x64, 128 accumulators a thread. A larger warp tile would spill (255 registers), a smaller one
    // reads more shared memory per product. Steps of 64 in k are rows of 128 bytes, a whole line of L2; two buffers of them are
    // 72 KB: two CTAs on an SM of 227 KB, one on the cards with 99 KB. A third buffer would not fit there, and took L1 from
    // cp.async where it did (docs/worklog/pipeline.md).
    return {128, 128, 64, 2, 128, 2};
  } else if constexpr (sizeof(T) == 4) {
    // float on CUDA cores: 8x8 per thread, so one shared read feeds four multiply-adds. Sums in two levels take 128
    // accumulators a thread, so one CTA per SM; 3 buffers of k = 16 hide the latency.
    return {128, 128, 16, 3, 256, 1};
  } else {
    // double: 4x4 per thread; 8x8 would need 128 registers for accumulators alone.
    return {64, 64, 16, 3, 256, 2};
  }
}

// How an operand lies in shared memory, as it does in global memory (a copy never transposes).
enum class Major {
  kInner,  // [m or n][k]: the rows are the outer dim of the product, k runs along a row
  kOuter,  // [k][m or n]: k counts rows
};

// One operand's buffer. Rows are padded by 16 bytes, so that eight rows of one 16-byte column fall into distinct banks.
template <class T, Major kMajor, int kExtent, int kK>
struct OperandTile {
  static constexpr Major major = kMajor;
  static constexpr int kRows = kMajor == Major::kInner ? kExtent : kK;
  static constexpr int kCols = kMajor == Major::kInner ? kK : kExtent;
  static constexpr int kChunk = 16 / sizeof(T);  // elements of one 16-byte copy
  static constexpr int kPitch = kCols + kChunk;
  static constexpr int kElements = kRows * kPitch;
  static_assert(kPitch * sizeof(T) % 16 == 0, "cp.async of 16 bytes needs rows on 16-byte boundaries");
  static_assert(kElements * sizeof(T) % 32 == 0, "wmma needs tiles on 32-byte boundaries");
};

// Up to two numbers that an epilogue needs of each row of its tile.
template <class Acc>
struct RowValues {
  Acc first, second;
};

// kSplitHalf_: the sum of each step is added to float registers, as Tensor Cores truncate what they add.
template <class T_, Major kMajorA, Major kMajorB, bool kSplitHalf_ = false>
struct GemmTile {
  using T = T_;
  using Acc = Accumulator<T>;
  static constexpr bool kSplitHalf = kSplitHalf_;
  static constexpr TileShape kShape = tile_shape<T, kSplitHalf>();
  static constexpr int kM = kShape.m, kN = kShape.n, kK = kShape.k;
  static constexpr int kStages = kShape.stages;
  static constexpr int kThreads = kShape.threads;
  static constexpr int kCtasPerSm = kShape.ctas_per_sm;
  using A = OperandTile<T, kMajorA, kM, kK>;
  using B = OperandTile<T, kMajorB, kN, kK>;

  // Accumulators pass through shared memory on their way out, a strip of 16 rows at a time: each warp's own 16 rows for wmma,
  // all threads' 16 x kN on CUDA cores. 32 bytes of padding: the 8 rows x 32 bytes that a warp stores of a wmma fragment then
  // fall into distinct banks.
  static constexpr int kStripRows = 16;
  static constexpr int kStripCols = sizeof(T) == 2 ? kN / (kThreads / 64) : kN;
  static constexpr int kStripPitch = kStripCols + 32 / static_cast<int>(sizeof(Acc));
  static constexpr int kStrips = sizeof(T) == 2 ? kThreads / 32 : 1;

  struct Stage {
    alignas(32) T a[A::kElements];
    alignas(32) T b[B::kElements];
  };
  struct Shared {
    union {
      Stage stage[kStages];                                      // during the main loop
      alignas(32) Acc strip[kStrips][kStripRows * kStripPitch];  // after it
    };
    RowValues<Acc> row[kM];  // what the epilogue needs of each row
  };
  static constexpr size_t kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= 99 * 1024, "sm_86 and sm_89 give a CTA 99 KB of shared memory");
};

// Products and their layouts: rows of both operands along k; k along A's rows and B's columns; k counting rows of both.
template <class T>
using RowsByRows = GemmTile<T, Major::kInner, Major::kInner>;  // query . key^T, grad_out . value^T
template <class T>
using RowsByCols = GemmTile<T, Major::kInner, Major::kOuter>;  // weights . value, dS . key
template <class T>
using ColsByCols = GemmTile<T, Major::kOuter, Major::kOuter>;  // P^T . grad_out, dS^T . query

using SplitHalfTile = GemmTile<__half, Major::kInner, Major::kInner, true>;  // float32 rows as half terms

}  // namespace attention_ext
