// A result of wgmma on its way from registers to memory.
#pragma once

#include "core/tensors.h"
#include "device/common/types.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"

namespace attention_ext {

// A warp's 16 x 64 part of the result, to shared memory. pairs[i]: this thread's adjacent elements 2 i and 2 i + 1 of the strip, as
// wgmma leaves them, in T.
__device__ __forceinline__ void write_strip(const uint32_t (&pairs)[16], uint32_t s_strip, int lane = threadIdx.x % 32) {
#pragma unroll
  for (int tile = 0; tile < 8; tile += 2) {
    const uint32_t* m = pairs + 2 * tile;
    store_matrices(s_strip + swizzled(lane % 16, tile + lane / 16), m[0], m[1], m[2], m[3]);
  }
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

// The way out without shared memory. Of four adjacent blocks of 8 x 8 elements this lane has two columns of one row each, those of
// its place among four lanes; it returns all eight columns of the block of that place: the four lanes' 4 x 4 pairs transposed.
__device__ __forceinline__ uint4 transposed_pairs(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const auto exchange = [](uint32_t& first, uint32_t& second, int with) {
    const bool upper = (threadIdx.x & with) != 0;
    const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? first : second, with);
    (upper ? first : second) = got;
  };
  exchange(a, b, 1);
  exchange(c, d, 1);
  exchange(a, c, 2);
  exchange(b, d, 2);
  return make_uint4(a, b, c, d);
}

// A warp's 16 x 64 part: visit(half, col, chunk), the eight columns from `col` on of the thread's first row or the one 8 below it.
template <class Visit>
__device__ __forceinline__ void for_each_row_chunk(const uint32_t (&pairs)[16], Visit visit) {
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* m = &pairs[2 * first + half];
      visit(half, first * 8 + static_cast<int>(threadIdx.x % 4) * 8, transposed_pairs(m[0], m[2], m[4], m[6]));
    }
  }
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
