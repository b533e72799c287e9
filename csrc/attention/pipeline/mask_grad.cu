// Backward: mask_grad = dS summed over every batch dim, row and column along which the mask has size 1; one slice's share of it.
//
// 1. A warp takes a row of the mask and 512 of its columns, or its one column. It walks down the terms that sum into them: of each
//    matrix of the slice that shares this matrix of the mask one row, or all rows where the mask has one.
// 2. Where the mask has few rows, the eight warps of a CTA share the terms of one and meet in shared memory. Where it has only one,
//    several CTAs share it; they leave partial sums in scratch, which a second launch of the same kernel sums.
// 3. What earlier slices left is the first term. The last slice that has a term of an element rounds it to the mask's dtype. All
//    sums are in a fixed order: no atomics, the same bits every time.
// Grid: one CTA per matrix of the slice, share of its terms, rows and column tile of the mask; of the matrices that share one of
// the mask the first one's CTAs work. Shared memory: 8 x 512 accumulators, 16 KB (double: 32 KB). 128 registers: two CTAs an SM.
#include <type_traits>

#include "attention/pipeline/mask_matrices.cuh"
#include "attention/pipeline/params.h"
#include "attention/pipeline/score_terms.cuh"
#include "attention/pipeline/stage.h"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"

namespace attention_ext {
namespace {

// Four quads of columns a lane: that many loads of a row of terms are in flight at once.
constexpr int kCtaThreads = 256, kWarps = kCtaThreads / 32, kQuads = 4, kCols = kQuads * 128;
constexpr int64_t kEnoughWarps = 4096;  // 31 an SM of an H100
constexpr int64_t kFewTerms = 4;        // rows of terms that are worth a warp
constexpr int64_t kMostRows = 4;  // of the mask, by one warp after another: what it finds out of its matrix serves them all

// How the grid covers a slice, found on the host.
struct Work {
  int64_t sharing;                       // score matrices that share one of the mask, in the whole problem
  int64_t rows;                          // of the mask, within the slice
  int64_t rows_of_warp;                  // one after another
  int64_t row_tiles, col_tiles;          // that CTAs take
  int64_t rows_summed, cols;             // of a matrix of terms
  int64_t splits;                        // CTAs that share an element's terms; more than one: their sums go to scratch
  int64_t scratch_slice, scratch_split;  // strides there
  int shares;                            // warps of a CTA that share them: all or one
  bool partial;                          // the terms are what splits left for each matrix, not dS
};

// Adds columns [begin, begin + kCols) of a row of terms, nothing from `end` on.
template <class T>
__device__ __forceinline__ void add_terms(Accumulator<T> (&sums)[kQuads][4], const T* g_row, int begin, int end) {
  const int col = begin + static_cast<int>(threadIdx.x) % 32 * 4;
  Quad<T> quads[kQuads];
  if (begin + kCols <= end) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) quads[q] = *reinterpret_cast<const Quad<T>*>(g_row + col + q * 128);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[q][e] += to_accumulator(quads[q].value[e]);
    }
    return;
  }
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    Accumulator<T> terms[4];
    load_quad<T>(terms, g_row, col + q * 128, end, 1, true);
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[q][e] += terms[e];
  }
}

template <class Out, class Acc>
__device__ __forceinline__ void store_as(const MatrixView& view, int64_t offset, int col, int end, const Acc (&sums)[4]) {
  Accumulator<Out> rounded[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) rounded[e] = static_cast<Accumulator<Out>>(sums[e]);
  store_quad<Out>(static_cast<Out*>(view.data) + offset, col, end, view.col_stride, view.vector, rounded);
}

// Rounds a quad of sums to the mask's dtype; its row begins `offset` elements after the gradient's data.
template <class Acc>
__device__ __forceinline__ void store_mask_grad(const MaskGradParams& p, int64_t offset, int col, int end,
                                                const Acc (&sums)[4]) {
  switch (p.mask_type) {
    case DataType::kHalf: return store_as<__half>(p.mask_grad, offset, col, end, sums);
    case DataType::kBFloat16: return store_as<__nv_bfloat16>(p.mask_grad, offset, col, end, sums);
    case DataType::kFloat: return store_as<float>(p.mask_grad, offset, col, end, sums);
    case DataType::kDouble: return store_as<double>(p.mask_grad, offset, col, end, sums);
  }
}

template <class T>
__global__ void __launch_bounds__(kCtaThreads, sizeof(Accumulator<T>) == 4 ? 2 : 1)
    mask_grad_kernel(const __grid_constant__ MaskGradParams p, const __grid_constant__ Work work, int64_t first_cta) {
  using Acc = Accumulator<T>;
  __shared__ Quad<Acc> s_sums[kWarps][kQuads][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t index, col_tile, row_tile, slice_index, split;
  divide(first_cta + blockIdx.x, work.col_tiles, index, col_tile);
  divide(index, work.row_tiles, index, row_tile);
  divide(index, work.splits, slice_index, split);
  MaskEntry entry;
  if (!find_entry(p.batch, p.mask_grad, p.slice, work.sharing, slice_index, entry)) return;  // the whole CTA

  const MatrixView& mask = p.mask_grad;
  const bool first = entry.first == 0 && (p.rows_kept || p.slice.row_begin == 0);
  const bool last = entry.last == work.sharing && (p.rows_kept || p.slice.row_begin + p.slice.row_count == p.L);
  const int tile_begin = static_cast<int>(col_tile) * kCols, lane_col = tile_begin + lane * 4;
  const int mask_cols = p.cols_kept ? static_cast<int>(p.slice.col_count) : 1;
  const int64_t mask_offset = batch_offset(p.batch, mask, p.slice.batch_begin + slice_index, 0);
  // This warp's share of an element's terms, which are rows of matrices, one matrix after another.
  const int64_t terms = (work.partial ? 1 : entry.last - entry.first) * work.rows_summed;
  const int64_t shares = work.splits * work.shares, number = split * work.shares + warp % work.shares;
  int64_t terms_begin, terms_end, rest;
  divide(terms * number, shares, terms_begin, rest);
  divide(terms * (number + 1), shares, terms_end, rest);

  const int rows_apart = kWarps / work.shares, tile_rows = rows_apart * static_cast<int>(work.rows_of_warp);
  int row = static_cast<int>(row_tile) * tile_rows + warp / work.shares;
  const int rows_end = min(static_cast<int>(row_tile + 1) * tile_rows, static_cast<int>(work.rows));
  for (; row < rows_end; row += rows_apart) {  // once where warps share
    const int64_t offset = mask_offset + (p.rows_kept ? p.slice.row_begin + row : 0) * mask.row_stride;
    Acc* g_carried = static_cast<Acc*>(p.sums) + offset;
    Acc sums[kQuads][4] = {};
    if (!first && number == 0 && work.splits == 1) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        load_quad<Acc>(sums[q], g_carried, lane_col + q * 128, mask_cols, mask.col_stride, mask.vector);
      }
    }

    for (int64_t term = terms_begin; term < terms_end;) {
      int64_t matrix = term, summed_row = 0, terms_index = slice_index;
      if (!p.rows_kept) divide(term, work.rows_summed, matrix, summed_row);
      if (matrix > 0) terms_index = shared_matrix(p.batch, mask, entry.kept, entry.first + matrix) - p.slice.batch_begin;
      const int64_t slice_row = p.rows_kept ? row : summed_row;
      const T* g_row = static_cast<const T*>(p.score_grad.data) + terms_index * p.score_grad.slice_stride +
                       slice_row * p.score_grad.row_stride;
      const KeyRange range = key_range(p.sequence, p.slice.batch_begin + terms_index, p.slice.col_count);
      const int problem_row = static_cast<int>(p.slice.row_begin + slice_row);
      const int rows = static_cast<int>(min(terms_end - term, work.rows_summed - summed_row));
      for (int i = 0; i < rows; ++i) {
        // Tiles of keys that a row does not see may not have been written.
        const int written = work.partial ? static_cast<int>(work.cols) : range.end_of_row(problem_row + i);
        const int end = p.cols_kept ? min(written, tile_begin + kCols) : written;
        for (int begin = tile_begin; begin < end; begin += kCols) {
          if constexpr (std::is_same_v<T, ScoreTerms>) {
            const int64_t row_block =
                terms_index * ((p.slice.row_count + kSplitHalfBlock - 1) / kSplitHalfBlock) + (slice_row + i) / kSplitHalfBlock;
            add_terms<2>(sums, g_row, p.score_exponents + row_block * (p.score_grad.row_stride / kSplitHalfBlock), begin, end);
          } else {
            add_terms<T>(sums, g_row, begin, end);
          }
        }
        g_row += p.score_grad.row_stride;
      }
      term += rows;
    }

    if (!p.cols_kept) {
      Acc total = 0;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) total += sums[q][0] + sums[q][1] + sums[q][2] + sums[q][3];
      sums[0][0] = warp_sum(total);
    }
    if (work.shares > 1) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) s_sums[warp][q][lane] = {{sums[q][0], sums[q][1], sums[q][2], sums[q][3]}};
      __syncthreads();  // all warps' sums are there
      if (warp > 0) return;
      for (int other = 1; other < kWarps; ++other) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          const Quad<Acc> quad = s_sums[other][q][lane];
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[q][e] += quad.value[e];
        }
      }
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int col = lane_col + q * 128;
      if (work.splits > 1) {
        Acc* g_scratch = static_cast<Acc*>(p.scratch) + slice_index * work.scratch_slice + split * work.scratch_split;
        store_quad<Acc>(g_scratch, col, mask_cols, 1, p.cols_kept, sums[q]);
      } else if (!last) {
        store_quad<Acc>(g_carried, col, mask_cols, mask.col_stride, mask.vector, sums[q]);
      } else {
        store_mask_grad(p, offset, col, mask_cols, sums[q]);
      }
    }
  }
}

cudaError_t launch(const MaskGradParams& params, const Work& work, cudaStream_t stream) {
  const int64_t ctas = params.slice.batch_count * work.splits * work.row_tiles * work.col_tiles;
  if (params.score_exponents != nullptr) {
    return launch_rows(mask_grad_kernel<ScoreTerms>, kCtaThreads, ctas, 1, stream, params, work);
  }
  return dispatch_type(params.type, [&](auto element) {
    return launch_rows(mask_grad_kernel<decltype(element)>, kCtaThreads, ctas, 1, stream, params, work);
  });
}

}  // namespace

cudaError_t launch_mask_grad(const MaskGradParams& params, cudaStream_t stream) {
  const Slice& slice = params.slice;
  if (slice.batch_count == 0 || slice.row_count == 0 || (params.cols_kept && slice.col_count == 0)) return cudaSuccess;
  Work work = {};
  work.sharing = 1;
  for (int dim = 0; dim < params.batch.count; ++dim) {
    if (params.mask_grad.batch_stride[dim] == 0) work.sharing *= params.batch.size[dim];
  }
  work.rows = params.rows_kept ? slice.row_count : 1;
  work.col_tiles = params.cols_kept ? ceil_div(slice.col_count, kCols) : 1;
  work.rows_summed = params.rows_kept ? 1 : slice.row_count;
  work.cols = slice.col_count;
  const int64_t matrices = std::min(work.sharing, slice.batch_count), terms = matrices * work.rows_summed;  // at most
  const int64_t tiles = ceil_div(slice.batch_count, matrices) * work.rows * work.col_tiles;                 // at least
  work.shares = tiles < kEnoughWarps && terms >= kWarps ? kWarps : 1;
  work.rows_of_warp = std::clamp<int64_t>(tiles / kEnoughWarps, 1, kMostRows);
  work.row_tiles = ceil_div(work.rows, kWarps / work.shares * work.rows_of_warp);
  work.splits = 1;
  if (work.shares == 1 || params.rows_kept) return launch(params, work, stream);

  const int64_t pitch = params.cols_kept ? round_up(work.cols, 4) : 1;  // of scratch: a row of a split's sums, or one sum
  const int64_t room = params.scratch_bytes / accumulator_bytes(params.type) / slice.batch_count / pitch / 4 * 4;
  const int64_t splits = std::min({kEnoughWarps / kWarps / tiles, terms / (kWarps * kFewTerms), room});
  if (splits < 2) return launch(params, work, stream);
  work.splits = splits;
  work.scratch_split = pitch;
  work.scratch_slice = round_up(splits * pitch, 4);
  const cudaError_t status = launch(params, work, stream);
  if (status != cudaSuccess) return status;

  MaskGradParams partial = params;  // terms in `splits` rows, or where the mask has one column in one row
  partial.score_exponents = nullptr;
  partial.type = params.type == DataType::kDouble ? DataType::kDouble : DataType::kFloat;
  partial.score_grad = slice_view(params.scratch, 1, pitch, true);
  partial.score_grad.slice_stride = work.scratch_slice;
  if (params.cols_kept) {
    work.rows_summed = splits;
  } else {
    work.rows_summed = 1;
    work.cols = splits;
  }
  work.splits = 1;
  work.partial = true;
  return launch(partial, work, stream);
}

}  // namespace attention_ext
