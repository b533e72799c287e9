// Rows of float as sums of two half terms, for float products on Tensor Cores (Ootomo and Yokota 2022, arXiv 2203.03341):
// x = (high + low) * 2^exponent, exponent so that the row's largest magnitude is in [2^14, 2^15) of half precision.
//
// high = half(x / 2^exponent), low = half(x / 2^exponent - high). The error is at most the larger of 2^-23 of the element and 2^-39
// of the row's largest.
// Rows with an infinity or a NaN, and rows of zeros, are marked by their exponent; nobody relies on the terms of the former.
// Rows up to 8192 are read once, wider ones twice. Grid: one CTA of 256 threads per row. Shared memory: 96 bytes.
#include <cuda_fp16.h>

#include "device/common/math.cuh"
#include "device/common/types.cuh"
#include "gemm/split_half/params.h"
#include "gemm/split_half/terms.cuh"

namespace attention_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kQuads = 8;  // of a row in a thread's registers

// kCached: a row stays in registers between the two passes over it.
template <bool kCached>
__global__ void __launch_bounds__(kThreads) split_half_rows_kernel(const __grid_constant__ SplitHalfRowsParams p) {
  __shared__ uint32_t s_largest[kThreads / 32];
  __shared__ float s_left_out[2][kThreads / 32];
  const int64_t row = blockIdx.x, pitch = (p.cols + 7) / 8 * 8;
  const float* g_row = static_cast<const float*>(p.source.data) + row * p.source.row_stride;
  const int cols = static_cast<int>(p.cols);
  float x[kCached ? kQuads : 1][4];
  const auto for_each_quad = [&](auto visit) {  // visit(values, first column)
    if constexpr (kCached) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) visit(x[quad], (quad * kThreads + static_cast<int>(threadIdx.x)) * 4);
    } else {
      for (int col = threadIdx.x * 4; col < pitch; col += kThreads * 4) visit(x[0], col);
    }
  };
  const auto load = [&](float (&values)[4], int col) {
    load_quad<float>(values, g_row, col, cols, p.source.col_stride, p.source.vector);
  };

  // Magnitudes compare as their bits do, NaN above infinity.
  uint32_t largest = 0;
  if constexpr (kCached) for_each_quad(load);
  for_each_quad([&](float (&values)[4], int col) {
    if constexpr (!kCached) load(values, col);
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = max(largest, __float_as_uint(values[e]) & 0x7fffffffu);
  });
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) s_largest[threadIdx.x / 32] = largest;
  __syncthreads();  // all warps' largest are there
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) largest = max(largest, s_largest[warp]);
  const SplitHalfScale scale(largest);
  __half* g_high = static_cast<__half*>(p.terms) + row * pitch;
  __half* g_low = g_high + p.rows * pitch;
  float left_out[2] = {0.0f, 0.0f};  // as it is, and with the element's sign
  for_each_quad([&](float (&values)[4], int col) {
    if constexpr (!kCached) load(values, col);
    if (col >= pitch) return;
    float low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float left = scale.split(values[e], low[e]);
      left_out[0] += left;
      left_out[1] += values[e] < 0.0f ? -left : left;
    }
    store_whole_quad(g_high + col, values);
    store_whole_quad(g_low + col, low);
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = warp_sum(left_out[i]);
    if (threadIdx.x % 32 == 0) s_left_out[i][threadIdx.x / 32] = sum;
  }
  __syncthreads();  // all warps' sums are there
  if (threadIdx.x != 0) return;
  left_out[0] = left_out[1] = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    left_out[0] += s_left_out[0][warp];
    left_out[1] += s_left_out[1][warp];
  }
  if (largest == 0) {
    p.of_rows[row] = {kRowOfZeros, 0.0f};
  } else if (scale.finite) {
    p.of_rows[row] = {scale.exponent, fmaxf(fabsf(left_out[0]), fabsf(left_out[1]))};
  } else {
    p.of_rows[row] = {kRowNotFinite, 0.0f};
  }
}

}  // namespace

cudaError_t launch_split_half_rows(const SplitHalfRowsParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  auto* kernel = params.cols <= 4 * kQuads * kThreads ? split_half_rows_kernel<true> : split_half_rows_kernel<false>;
  kernel<<<static_cast<unsigned>(params.rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace attention_ext
