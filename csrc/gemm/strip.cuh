// A result of wgmma on its way from registers to memory.
#pragma once

#include "../device/cp_async.cuh"
#include "../device/types.cuh"
#include "../device/warpgroup.cuh"
#include "../device/wgmma.cuh"
#include "../params.h"

namespace attention_ext {

// A warp's 16 x 64 part of the result on its way to memory: as whole rows of 128 bytes, 16 bytes a lane. values[i]: this thread's
// elements of the strip, as wgmma leaves them. visit(row, col, s_chunk) for every eight columns of the strip.
template <class T, class Visit>
__device__ __forceinline__ void for_each_chunk(const float (&values)[32], uint32_t s_strip, Visit visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < 8; tile += 2) {
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = pack_pair<T>(values[tile * 4 + 2 * i], values[tile * 4 + 2 * i + 1]);
    store_matrices(s_strip + swizzled(lane % 16, tile + lane / 16), m[0], m[1], m[2], m[3]);
  }
  __syncwarp();  // the strip is written
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int row = pass * 4 + lane / 8;
    visit(row, lane % 8 * 8, *static_cast<const uint4*>(shared_pointer(s_strip + swizzled(row, lane % 8))));
  }
  __syncwarp();  // the strip has been read
}

// Writes the eight columns from `col` on of a row that has `cols`, 16 bytes at once where the view allows.
template <class T>
__device__ __forceinline__ void store_chunk(T* g_row, int col, int cols, const MatrixView& view, const uint4& chunk) {
  if (view.vector && col + 8 <= cols) {
    *reinterpret_cast<uint4*>(g_row + col) = chunk;
    return;
  }
  const T* elements = reinterpret_cast<const T*>(&chunk);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (col + e < cols) g_row[(col + e) * view.col_stride] = elements[e];
  }
}

}  // namespace attention_ext
