// Tiles of tensors, and plain memory, copied by TMA (cp.async.bulk: sm_90), one instruction per function.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/tensors.h"
#include "device/common/batch.cuh"

namespace attention_ext {

// A box of a five-dimensional tensor, its first element at `at` (innermost first), to shared memory; `barrier` counts its bytes.
// Elements outside the tensor become zeros and count as well. One thread.
struct TensorPosition {
  int32_t at[5];
};
__device__ __forceinline__ void tma_load(uint32_t s_dst, const CUtensorMap* map, const TensorPosition& box, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::
          "r"(s_dst),
      "l"(map), "r"(barrier), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4])
      : "memory");
}

// Asks for the box to be in L2. One thread.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, const TensorPosition& box) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];\n" ::"l"(map), "r"(box.at[0]),
               "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4])
               : "memory");
}

// Sets the batch coordinates of a map that core/tensor_map.h made of a view (batch dims..., rows, cols): matrix n.
__device__ __forceinline__ void set_batch(TensorPosition& box, const BatchDims& batch, const MatrixView& view, uint32_t n) {
#pragma unroll
  for (int dim = 2; dim < 5; ++dim) {
    const int batch_dim = batch.count + 1 - dim;  // the map's dims run from the innermost outwards
    uint32_t index = 0;
    if (batch_dim >= 0) {
      index = n;
      if (batch_dim > 0) divide(n, batch.size[batch_dim], n, index);
      if (dim == 2) index /= view.group;
      if (view.batch_stride[batch_dim] == 0) index = 0;
    }
    box.at[dim] = static_cast<int32_t>(index);
  }
}

// `bytes` of global memory, a multiple of 16 as both addresses are, to shared memory; `barrier` counts them. One thread.
__device__ __forceinline__ void bulk_load(uint32_t s_dst, const void* g_src, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(s_dst),
               "l"(g_src), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

}  // namespace attention_ext
