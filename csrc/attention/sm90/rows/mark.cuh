// Which blocks of keys a mask shows to which queries: a small kernel reads the mask once, however many heads share it, and the row
// kernels, forward and backward, leave hidden blocks out and do not look at a mask where it shows everything.
#pragma once

#include "attention/params.h"
#include "attention/sm90/rows/marks.h"
#include "attention/visibility/score_modifier.cuh"
#include "core/arithmetic.h"
#include "device/common/batch.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "plan/sm90_rows.h"

namespace attention_ext {

// Where the cells of matrix n begin.
__device__ __forceinline__ int64_t cells_of(const RowsMarks& marks, const BatchDims& batch, uint32_t n) {
  int64_t cells = 0;
#pragma unroll 1
  for (int dim = batch.count - 1; dim >= 0; --dim) {
    uint32_t index = n;
    if (dim > 0) divide(n, batch.size[dim], n, index);
    cells += index * marks.batch_stride[dim];
  }
  return cells;
}

// One warp a cell. kKeys: that a lane reads at once. Keys beyond the mask's last one are not read and do not count.
template <int kBlock, int kKeys, class Stored>
__device__ __forceinline__ Shown look(const ForwardParams& p, const Stored* g_cell, int rows, int keys, bool whole) {
  constexpr int kChunks = kBlock / kKeys, kAtOnce = 4;  // of a row; whose reads are under way together
  struct alignas(kKeys * sizeof(Stored)) Chunk {
    Stored key[kKeys];
  };
  bool any = false, all = true;
  // What is shown in part mostly shows it at once: it is not worth four reads. Else the same one four times.
  int at_once = whole ? kAtOnce : 1;
#pragma unroll 1
  for (int first = threadIdx.x % 32; first / 32 * 32 < rows * kChunks; first += 32 * at_once, at_once = kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int chunk = min(first + 32 * min(i, at_once - 1), rows * kChunks - 1), key = chunk % kChunks * kKeys;
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
  launch_dependents();
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

// The marks of a call's mask, at `data`, for blocks of kBlock keys.
template <class T, int kBlock>
cudaError_t launch_marks(const ForwardParams& params, uint8_t* data, RowsMarks& marks, cudaStream_t stream) {
  const RowsMarkSizes sizes = rows_mark_sizes(true, params.mask.row_stride == 0 ? 1 : params.L, params.S, kBlock);
  marks.data = data;
  marks.rows = static_cast<int>(sizes.rows);
  marks.blocks = static_cast<int>(sizes.blocks);
  int64_t matrices = 1;
  for (int dim = params.batch.count - 1; dim >= 0; --dim) {
    const bool own = params.mask.batch_stride[dim] != 0 && params.batch.size[dim] > 1;
    marks.batch_stride[dim] = own ? matrices * marks.rows * marks.blocks : 0;
    if (own) matrices *= params.batch.size[dim];
  }
  marks.matrices = static_cast<int>(matrices);
  marks.whole =
      params.mask_type == MaskType::kBool && params.N >= 4 * matrices;  // else reading it all costs as much as it saves
  const int64_t cells = matrices * marks.rows * marks.blocks;
  rows_mark_kernel<T, kBlock><<<static_cast<unsigned>(ceil_div(cells, 4)), 128, 0, stream>>>(params, marks);
  return cudaGetLastError();
}

}  // namespace attention_ext
