// Which blocks of keys a mask shows to which queries: a small kernel reads the mask once, however many heads share it, and the row
// kernels leave hidden blocks out and do not look at a mask where it shows everything.
#pragma once

#include "attention/params.h"
#include "attention/visibility/score_modifier.cuh"
#include "device/common/batch.cuh"
#include "plan/sm90_rows.h"

namespace attention_ext {

enum Shown : uint8_t { kNothingShown = 0, kSomeShown = 1, kAllShown = 2 };

// A cell for kMarkedRows queries and a block of keys of each matrix that the mask has of its own: (matrices, rows, blocks).
// data null: there is none, and everything counts as kSomeShown.
struct RowsMarks {
  uint8_t* data;
  int64_t batch_stride[kMaxBatchDims];  // in cells; 0 where the mask's is
  int matrices, rows, blocks;
  bool whole;  // whether kAllShown is told from kSomeShown, for which the whole mask has to be read
};

// One warp a cell. kKeys: that a lane reads at once. Keys beyond the mask's last one are not read and do not count.
template <int kBlock, int kKeys, class Stored>
__device__ __forceinline__ Shown look(const ForwardParams& p, const Stored* g_cell, int rows, int keys, bool whole) {
  constexpr int kChunks = kBlock / kKeys, kAtOnce = 4;  // of a row; whose reads are under way together
  struct alignas(kKeys * sizeof(Stored)) Chunk {
    Stored key[kKeys];
  };
  bool any = false, all = true;
#pragma unroll 1
  for (int first = threadIdx.x % 32; first / 32 * 32 < rows * kChunks; first += 32 * kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = min(first + 32 * i, rows * kChunks - 1), key = chunk % kChunks * kKeys;
      if (key + kKeys > keys) continue;
      const Chunk read =
          *reinterpret_cast<const Chunk*>(g_cell + chunk / kChunks * p.mask.row_stride + key * p.mask.col_stride);
#pragma unroll
      for (int e = 0; e < kKeys; ++e) {
        const bool shown = mask_shows(read.key[e]);
        any |= shown;
        all &= shown;
      }
    }
    // What is only partly shown stays so.
    const bool seen = __any_sync(0xffffffffu, any);
    if (seen && !(whole && __all_sync(0xffffffffu, all))) return kSomeShown;
  }
  return __any_sync(0xffffffffu, any) ? kAllShown : kNothingShown;
}

// Grid: a warp a cell. A block that ends after the mask's last key is never hidden, and whole only where every key counts.
template <class T, int kBlock>
__global__ void __launch_bounds__(128)
    rows_mark_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ RowsMarks marks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint32_t cell = blockIdx.x * 4 + threadIdx.x / 32;
  if (cell >= static_cast<uint32_t>(marks.matrices) * marks.rows * marks.blocks) return;
  const int block = cell % marks.blocks, row = cell / marks.blocks % marks.rows * kMarkedRows;
  uint32_t matrix = cell / marks.blocks / marks.rows;
  int64_t offset = row * p.mask.row_stride + static_cast<int64_t>(block) * kBlock * p.mask.col_stride;
  for (int dim = p.batch.count - 1; dim >= 0; --dim) {
    if (marks.batch_stride[dim] == 0) continue;
    const uint32_t size = static_cast<uint32_t>(p.batch.size[dim]);
    offset += matrix % size * p.mask.batch_stride[dim];
    matrix /= size;
  }
  const int rows = p.mask.row_stride == 0 ? 1 : min(kMarkedRows, static_cast<int>(p.L) - row);
  const int keys = min(kBlock, static_cast<int>(p.S) - block * kBlock);
  Shown shown = kSomeShown;
  if (keys == kBlock) {
    visit_mask<T>(p.mask, p.mask_type, [&](auto* g_mask) {
      using Stored = std::remove_cv_t<std::remove_pointer_t<decltype(g_mask)>>;
      constexpr int kKeys = 16 / sizeof(Stored);
      shown = p.mask.vector ? look<kBlock, kKeys>(p, g_mask + offset, rows, keys, marks.whole)
                            : look<kBlock, 1>(p, g_mask + offset, rows, keys, marks.whole);
      if (!std::is_same_v<Stored, uint8_t> && shown == kAllShown) shown = kSomeShown;  // what is added may be anything
    });
  }
  if (threadIdx.x % 32 == 0) marks.data[cell] = shown;
#else
  __trap();  // never launched
#endif
}

}  // namespace attention_ext
