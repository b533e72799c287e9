// Matrices of float as sums of two half terms, 64 rows with one exponent: x = (high + low) * 2^exponent, the block's largest magnitude
// in [2^14, 2^15) of half precision. A row's own exponent (split_half_rows.cu) could not be taken out of a sum over rows.
//
// high = half(x / 2^exponent), low = half(x / 2^exponent - high): the error is at most the larger of 2^-23 of the element and 2^-39
// of the block's largest. What that comes to in a product is known from the largest norms of rows, and of what is left out of rows.
// Infinities, NaN, and rows that are tiny within their block where that counts, are reported (SplitHalfFacts::exact).
// Grid: one CTA of 256 threads per block; a warp takes eight rows, twice: for the largest and for the terms. Shared memory: 288
// bytes.
#include <cuda_fp16.h>

#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"
#include "gemm/split_half/epilogue.cuh"
#include "gemm/split_half/params.h"
#include "gemm/split_half/terms.cuh"

namespace attention_ext {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kOperands = 3;
constexpr float kSmallRow = 0x1p-16f;  // of the block's largest: from here on fewer than 22 bits are left

struct Operands {
  SplitHalfBlocksParams of[kOperands];
  unsigned end[kOperands];  // the number of the first CTA after each one's
};

__global__ void __launch_bounds__(kThreads) split_half_blocks_kernel(const __grid_constant__ Operands operands) {
  __shared__ float s_largest[kSplitHalfBlock];  // of each row
  unsigned cta = blockIdx.x;
  int number = 0;
  while (cta >= operands.end[number]) ++number;
  const SplitHalfBlocksParams& p = operands.of[number];
  if (number > 0) cta -= operands.end[number - 1];
  const unsigned blocks = static_cast<unsigned>((p.rows + kSplitHalfBlock - 1) / kSplitHalfBlock);
  const int64_t matrix = cta / blocks, block = cta % blocks, n = (p.first / p.group + matrix) * p.group;
  const int64_t first_row = block * kSplitHalfBlock, pitch = (p.cols + 7) / 8 * 8;
  const int cols = static_cast<int>(p.cols), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = static_cast<int>(min(p.rows - first_row, static_cast<int64_t>(kSplitHalfBlock)));
  const int counted =
      p.row_lengths == nullptr
          ? rows
          : static_cast<int>(max(min(p.row_lengths[n / p.heads] - p.row_begin - first_row, static_cast<int64_t>(rows)), int64_t{0}));
  const float* g_block = static_cast<const float*>(p.source.data) + batch_offset(p.batch, p.source, n, 0) +
                         (p.row_begin + first_row) * p.source.row_stride;
  const auto load = [&](float (&x)[4], int row, int col) {
    load_quad<float>(x, g_block + row * p.source.row_stride, col, cols, p.source.col_stride, p.source.vector);
  };

  for (int row = warp; row < kSplitHalfBlock; row += kWarps) {
    uint32_t largest = 0;  // magnitudes compare as their bits do, NaN above infinity
    if (row < counted) {
#pragma unroll 8
      for (int col = lane * 4; col < cols; col += 128) {
        float x[4];
        load(x, row, col);
#pragma unroll
        for (int e = 0; e < 4; ++e) largest = max(largest, __float_as_uint(x[e]) & 0x7fffffffu);
      }
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) s_largest[row] = __uint_as_float(largest);
  }
  __syncthreads();  // all rows' largest are there
  const uint32_t largest = __reduce_max_sync(
      0xffffffffu, max(__float_as_uint(s_largest[lane]), __float_as_uint(s_largest[lane + 32])));
  const SplitHalfScale scale(largest);
  if (threadIdx.x == 0) p.exponents[matrix * blocks + block] = largest == 0 ? kRowOfZeros : scale.exponent;

  __half* g_high = static_cast<__half*>(p.terms) + (matrix * p.rows + first_row) * pitch;
  __half* g_low = g_high + p.matrices * p.rows * pitch;
  float norm = 0.0f, left_out = 0.0f;  // the largest of this warp's rows
  bool exact = !scale.finite;
  for (int row = warp; row < rows; row += kWarps) {
    float squares = 0.0f, left_squares = 0.0f;
#pragma unroll 4
    for (int col = lane * 4; col < pitch; col += 128) {
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f}, low[4];
      if (row < counted) load(x, row, col);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float left = scale.split(x[e], low[e]);
        squares += x[e] * x[e];
        left_squares += left * left;
      }
      store_whole_quad(g_high + row * pitch + col, x);
      store_whole_quad(g_low + row * pitch + col, low);
    }
    norm = maximum(norm, warp_sum(squares));
    left_out = maximum(left_out, warp_sum(left_squares));
    const float largest_of_row = s_largest[row];
    exact = exact || (p.rows_weighted && largest_of_row > 0.0f && largest_of_row < kSmallRow * __uint_as_float(largest));
  }
  if (lane != 0) return;
  SplitHalfFacts& facts = p.facts[n];
  atomicMax(&facts.norm, __float_as_uint(times_power_of_two(sqrtf(norm), scale.exponent)));
  if (left_out > 0.0f) atomicMax(&facts.left_out, __float_as_uint(times_power_of_two(sqrtf(left_out), scale.exponent)));
  if (exact) facts.exact = 1;
}

}  // namespace

cudaError_t launch_split_half_blocks(const SplitHalfBlocksParams* params, int count, cudaStream_t stream) {
  Operands operands = {};
  int64_t ctas = 0;
  for (int i = 0; i < kOperands; ++i) {
    if (i < count) {
      operands.of[i] = params[i];
      ctas += params[i].matrices * ((params[i].rows + kSplitHalfBlock - 1) / kSplitHalfBlock);
    }
    operands.end[i] = static_cast<unsigned>(ctas);
  }
  if (ctas == 0) return cudaSuccess;
  split_half_blocks_kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(operands);
  return cudaGetLastError();
}

}  // namespace attention_ext
