// Backward: mask_grad += dS summed over every batch dim, row and column along which the mask has size 1, for one slice.
//
// 1. A CTA owns one row of the mask's own shape and 128 of its columns (or its one column).
// 2. Eight warps share what sums into them: pairs of (matrix of the slice, row); lanes take quads of columns.
// 3. The warps' sums meet in shared memory and are added in a fixed order: no atomics, the same bits every time. Slices
// follow
//    one another on the stream.
// Grid: one CTA per (kept matrix, row, column tile). Shared memory: 8 x 128 accumulators, 4 KB (double: 8 KB).
#include "attention/pipeline/params.h"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kWarps = kCtaThreads / 32, kCols = 128;

// What the grid covers, counted on the host.
struct Extents {
  int64_t rows, col_tiles;     // of the mask's own shape, within the slice
  int64_t matrices_per_entry;  // score matrices that share one matrix of the mask
};

// The n-th score matrix whose mask matrix is number `kept`, row-major over the batch dims that the mask has
// (batch_stride not 0); `reduced` counts row-major over those that it has not.
__device__ __forceinline__ int64_t matrix_index(const BatchDims& batch, const MatrixView& mask_grad, int64_t kept,
                                                int64_t reduced) {
  int64_t n = 0, weight = 1;
  for (int dim = batch.count - 1; dim >= 0; --dim) {
    const bool is_kept = mask_grad.batch_stride[dim] != 0;
    int64_t quotient, index;
    divide(is_kept ? kept : reduced, batch.size[dim], quotient, index);
    if (is_kept) {
      kept = quotient;
    } else {
      reduced = quotient;
    }
    n += index * weight;
    weight *= batch.size[dim];
  }
  return n;
}

template <class T>
__global__ void __launch_bounds__(kCtaThreads)
    mask_grad_kernel(const __grid_constant__ MaskGradParams p, Extents extents, int64_t first_block) {
  using Acc = Accumulator<T>;
  __shared__ Acc s_sums[kWarps][kCols];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  int64_t mask_rows, col_tile, row, entry;
  divide(first_block + blockIdx.x, extents.col_tiles, mask_rows, col_tile);
  divide(mask_rows, extents.rows, entry, row);

  // With one score matrix per mask matrix the entries are the slice's matrices; else they are all the mask's matrices,
  // of which some may have nothing in this slice.
  const bool one_to_one = extents.matrices_per_entry == 1;
  const int64_t rows_summed = p.rows_kept ? 1 : p.slice.row_count;
  Acc sums[4] = {0, 0, 0, 0};
  for (int64_t item = warp; item < extents.matrices_per_entry * rows_summed; item += kWarps) {
    int64_t reduced, summed_row;
    divide(item, rows_summed, reduced, summed_row);
    const int64_t slice_index = one_to_one ? entry : matrix_index(p.batch, p.mask_grad, entry, reduced) - p.slice.batch_begin;
    if (slice_index < 0 || slice_index >= p.slice.batch_count) continue;
    const int64_t n = p.slice.batch_begin + slice_index, slice_row = p.rows_kept ? row : summed_row;
    const T* g_row = static_cast<const T*>(p.score_grad.data) + batch_offset(p.batch, p.score_grad, n, slice_index) +
                     slice_row * p.score_grad.row_stride;
    // Tiles of keys that a row does not see may not have been written.
    const int seen = key_range(p.sequence, n, p.slice.col_count).end_of_row(static_cast<int>(p.slice.row_begin + slice_row));
    const int tile_begin = static_cast<int>(col_tile) * kCols, col_end = p.cols_kept ? min(tile_begin + kCols, seen) : seen;
    for (int col = tile_begin + lane * 4; col < col_end; col += kCols) {
      Acc grad[4];
      load_quad<T>(grad, g_row, col, col_end, p.score_grad.col_stride, p.score_grad.vector);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e] += grad[e];
    }
  }
  if (!p.cols_kept) sums[0] = warp_sum(sums[0] + sums[1] + sums[2] + sums[3]);
#pragma unroll
  for (int e = 0; e < 4; ++e) s_sums[warp][lane * 4 + e] = sums[e];
  __syncthreads();  // all warps' sums are there

  const int64_t slice_col = col_tile * kCols + threadIdx.x;
  if (threadIdx.x < (p.cols_kept ? kCols : 1) && slice_col < p.slice.col_count) {
    Acc total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += s_sums[w][threadIdx.x];
    const int64_t n = one_to_one ? p.slice.batch_begin + entry : matrix_index(p.batch, p.mask_grad, entry, 0);
    const int64_t mask_row = p.rows_kept ? p.slice.row_begin + row : 0;
    const int64_t mask_col = p.cols_kept ? p.slice.col_begin + slice_col : 0;
    Acc* g_mask_grad = static_cast<Acc*>(p.mask_grad.data) + batch_offset(p.batch, p.mask_grad, n, 0);
    g_mask_grad[mask_row * p.mask_grad.row_stride + mask_col * p.mask_grad.col_stride] += total;
  }
}

}  // namespace

cudaError_t launch_mask_grad(const MaskGradParams& params, cudaStream_t stream) {
  const Slice& slice = params.slice;
  int64_t kept = 1, reduced = 1;
  for (int dim = 0; dim < params.batch.count; ++dim) {
    (params.mask_grad.batch_stride[dim] != 0 ? kept : reduced) *= params.batch.size[dim];
  }
  if (slice.batch_count == 0 || slice.row_count == 0 || slice.col_count == 0) return cudaSuccess;
  const Extents extents = {params.rows_kept ? slice.row_count : 1, params.cols_kept ? ceil_div(slice.col_count, kCols) : 1,
                           reduced};
  const int64_t ctas = (reduced == 1 ? slice.batch_count : kept) * extents.rows * extents.col_tiles;
  return dispatch_type(params.type, [&](auto element) {
    return launch_rows(mask_grad_kernel<decltype(element)>, kCtaThreads, ctas, 1, stream, params, extents);
  });
}

}  // namespace attention_ext
