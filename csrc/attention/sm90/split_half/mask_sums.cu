// Backward of float32 attention by half terms (Hopper): the gradient of a mask that has rows and columns of its own, dS summed over
// the batch dims that it has not; one slice's share of it. A mask of one row or one column is the pipeline's (mask_grad.cu).
//
// A warp takes 512 columns of a row of the mask and adds the terms of the slice's matrices that share it in registers, in their
// order. What earlier slices left in the gradient is the first term: no atomics, the same bits every time.
// Bytes bound it, four of a score and four of the mask, or eight: 2 KB of terms a warp are in flight.
// Grid: a CTA for 16 rows by 512 columns of a matrix of the slice; of those that share one of the mask the first one's CTAs work.
// Shared memory: 2 KB. Registers: 80, three CTAs of 256 threads an SM.
#include "attention/pipeline/mask_matrices.cuh"
#include "attention/pipeline/score_terms.cuh"
#include "attention/sm90/split_half/backward.h"
#include "attention/visibility/key_range.cuh"
#include "core/launch.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kWarps = kCtaThreads / 32, kQuads = 4, kCols = kQuads * 128;
constexpr int kRowsOfWarp = 2, kTileRows = kWarps * kRowsOfWarp;

// A matrix that shares the mask's: its place in the slice, and its keys.
struct Sharer {
  int slice_index, keys;
};

// kVector: of the gradient's rows; else every element has an address, which takes registers.
template <bool kVector>
__global__ void __launch_bounds__(kCtaThreads, kVector ? 3 : 2)
    split_half_mask_sums_kernel(const __grid_constant__ SplitHalfMaskSumsParams p, int64_t first_cta) {
  __shared__ Sharer s_sharers[kCtaThreads];
  const Slice& slice = p.slice;
  int64_t index, col_tile, row_tile, slice_index;
  divide(first_cta + blockIdx.x, ceil_div(p.S, kCols), index, col_tile);
  divide(index, ceil_div(slice.row_count, kTileRows), slice_index, row_tile);
  MaskEntry entry;
  if (!find_entry(p.batch, p.mask_grad, slice, p.sharing, slice_index, entry)) return;  // the whole CTA

  const int begin = static_cast<int>(col_tile) * kCols, first_col = begin + static_cast<int>(threadIdx.x) % 32 * 4;
  const int first_row = static_cast<int>(row_tile) * kTileRows + static_cast<int>(threadIdx.x) / 32;
  const int end_row = min(static_cast<int>(slice.row_count), static_cast<int>(row_tile + 1) * kTileRows);
  const int row_blocks = (static_cast<int>(slice.row_count) + kSplitHalfBlock - 1) / kSplitHalfBlock;
  const int left = static_cast<int>(p.S) - first_col;  // columns from the lane's first on
  const int64_t col_stride = kVector ? 1 : p.mask_grad.col_stride;
  float* g_grad = static_cast<float*>(p.mask_grad.data) +
                  batch_offset(p.batch, p.mask_grad, slice.batch_begin + slice_index, 0) +
                  slice.row_begin * p.mask_grad.row_stride + first_col * col_stride;
#pragma unroll 1
  for (int number = static_cast<int>(entry.first); number < static_cast<int>(entry.last); number += kCtaThreads) {
    const int count = min(static_cast<int>(entry.last) - number, kCtaThreads);
    __syncthreads();  // the sharers before these have been read
    if (static_cast<int>(threadIdx.x) < count) {
      const int64_t n =
          p.sharing == 1 ? entry.kept : shared_matrix<int64_t>(p.batch, p.mask_grad, entry.kept, number + threadIdx.x);
      s_sharers[threadIdx.x] = {static_cast<int>(n - slice.batch_begin), key_range(p.sequence, n, p.S).keys};
    }
    __syncthreads();  // these are there
#pragma unroll 1
    for (int row = first_row; row < end_row; row += kWarps) {
      float* g_row = g_grad + row * p.mask_grad.row_stride;
      float sums[kQuads][4] = {};
      if (number > 0) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) load_quad<float>(sums[q], g_row, q * 128, left, col_stride, kVector);
      }
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const Sharer of = s_sharers[i];
        // Tiles of keys that a row does not see may not have been written.
        const KeyRange range = {p.sequence.causal, of.keys};
        const int end = min(range.end_of_row(static_cast<int>(slice.row_begin) + row), begin + kCols);
        const int64_t terms_row = of.slice_index * slice.row_count + row,
                      block_row = static_cast<int64_t>(of.slice_index) * row_blocks + row / kSplitHalfBlock;
        add_terms<kQuads>(sums, static_cast<const ScoreTerms*>(p.grads) + terms_row * p.pitch,
                          p.grad_exponents + block_row * (p.pitch / kSplitHalfBlock), begin, end);
      }
#pragma unroll
      for (int q = 0; q < kQuads; ++q) store_quad<float>(g_row, q * 128, left, col_stride, kVector, sums[q]);
    }
  }
}

}  // namespace

cudaError_t launch_split_half_mask_sums(const SplitHalfMaskSumsParams& params, cudaStream_t stream) {
  const int64_t ctas = params.slice.batch_count * ceil_div(params.slice.row_count, kTileRows) * ceil_div(params.S, kCols);
  return launch_rows(params.mask_grad.vector ? split_half_mask_sums_kernel<true> : split_half_mask_sums_kernel<false>,
                     kCtaThreads, ctas, 1, stream, params);
}

}  // namespace attention_ext
