// A result of wgmma on its way from registers to memory.
#pragma once

#include "core/tensors.h"
#include "device/common/types.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"

namespace attention_ext {

// A warp's 16 x 64 part of the result, to shared memory. pairs[i]: this thread's adjacent elements 2 i and 2 i + 1 of the strip, as
// wgmma leaves them, in T.
__device__ __forceinline__ void fill_strip(const uint32_t (&pairs)[16], uint32_t s_strip, int lane) {
#pragma unroll
  for (int tile = 0; tile < 8; tile += 2) {
    const uint32_t* m = pairs + 2 * tile;
    store_matrices(s_strip + swizzled(lane % 16, tile + lane / 16), m[0], m[1], m[2], m[3]);
  }
}
__device__ __forceinline__ void write_strip(const uint32_t (&pairs)[16], uint32_t s_strip, int lane = threadIdx.x % 32) {
  fill_strip(pairs, s_strip, lane);
  __syncwarp();  // the strip is written
}

template <class T>
__device__ __forceinline__ void pack_strip(const float (&values)[32], uint32_t (&pairs)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) pairs[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
}

// The strip on its way to memory: as whole rows of 128 bytes, 16 bytes a lane. visit(row, col, chunk) for every eight columns,
// `chunk` where they lie in shared memory. kUnroll: of the four visits; code that runs once a CTA is better short, as it is
// fetched from L2.
template <class T, int kUnroll, class Visit>
__device__ __forceinline__ void for_each_chunk(const uint32_t (&pairs)[16], uint32_t s_strip, Visit visit,
                                               int lane = threadIdx.x % 32) {
  write_strip(pairs, s_strip, lane);
#pragma unroll kUnroll
  for (int pass = 0; pass < 4; ++pass) {
    const int row = pass * 4 + lane / 8;
    visit(row, lane % 8 * 8, static_cast<const T*>(shared_pointer(s_strip + swizzled(row, lane % 8))));
  }
  __syncwarp();  // the strip has been read
}
template <class T, int kUnroll, class Visit>
__device__ __forceinline__ void for_each_chunk(const float (&values)[32], uint32_t s_strip, Visit visit,
                                               int lane = threadIdx.x % 32) {
  uint32_t pairs[16];
  pack_strip<T>(values, pairs);
  for_each_chunk<T, kUnroll>(pairs, s_strip, visit, lane);
}

// The strip on its way to memory by TMA, as a box of 16 x 64 at `to`. s_strip: one of kStrips that the warp takes in turn, which is
// free when all but the newest kStrips - 1 stores have read theirs.
template <int kStrips>
__device__ __forceinline__ void store_strip(const uint32_t (&pairs)[16], uint32_t s_strip, const CUtensorMap* map,
                                            const TensorPosition& to, int lane = threadIdx.x % 32) {
  if (elect_thread()) tma_wait_read<kStrips - 1>();
  __syncwarp();
  fill_strip(pairs, s_strip, lane);
  fence_async_proxy();
  __syncwarp();  // the strip is written
  if (elect_thread()) tma_store(map, to, s_strip);
}

// Writes the eight columns from `col` on of a row that has `cols`, 16 bytes at once where the view allows.
template <class T>
__device__ __forceinline__ void store_chunk(T* g_row, int col, int cols, const MatrixView& view, const T* s_chunk) {
  if (view.vector && col + 8 <= cols) {
    *reinterpret_cast<uint4*>(g_row + col) = *reinterpret_cast<const uint4*>(s_chunk);
    return;
  }
#pragma unroll 1
  for (int e = 0; e < min(8, cols - col); ++e) g_row[(col + e) * view.col_stride] = s_chunk[e];
}

}  // namespace attention_ext
