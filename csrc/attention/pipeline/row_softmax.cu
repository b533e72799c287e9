// Stage 2: each row of scores -> weights exp(score - row maximum) in the tensors' dtype, the row's sum, its
// log-sum-exp.
//
// 1. One warp (rows up to 1024) or one CTA takes a row, 16 bytes of float scores per thread and read.
// 2. Rows up to 8192 stay in registers: maximum by warp shuffles, exponentials, sum by warp shuffles.
// 3. Wider rows: one pass keeps a running maximum and sum per thread, a second one writes the weights.
// 4. The sum is taken before rounding and before dropout. -inf everywhere: weights 0, sum 0, lse -inf. NaN and +inf:
// NaN. Weights may overwrite their own scores: a chunk of a row is read by all threads before any of it is written, and
// weights are no wider than scores, so what a chunk's weights cover has been read. Grid: one CTA of 256 threads per 8
// rows (warp per row) or per row. Shared memory: 128 bytes at most. Registers: 32 scores a thread at most.
#include <type_traits>

#include "attention/pipeline/params.h"
#include "attention/softmax/online_softmax.cuh"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/row_reduce.cuh"
#include "device/common/types.cuh"
#include "gemm/tile.cuh"

namespace attention_ext {
namespace {

template <class T_, int kThreadsPerRow_, int kQuads_, bool kStreaming_ = false>
struct SoftmaxTile {
  using T = T_;
  using Acc = Accumulator<T>;
  static constexpr int kThreadsPerRow = kThreadsPerRow_;
  static constexpr int kQuads = kQuads_;           // quads of columns a thread holds at a time
  static constexpr bool kStreaming = kStreaming_;  // rows wider than one chunk
  static constexpr int kChunk = kThreadsPerRow * kQuads * 4;
  // One warp after another row of the same matrix: finding the matrix costs as much as a row of 512.
  static constexpr int kRowsPerGroup = kThreadsPerRow == 32 ? 4 : 1;
  static constexpr int kGroupsPerCta = kSoftmaxThreads / kThreadsPerRow;
  static constexpr int kCtasPerSm = sizeof(T) == 8 ? 1 : 2;  // doubles take two registers each
  static_assert(kThreadsPerRow == 32 || kThreadsPerRow == kSoftmaxThreads, "a row belongs to one warp or to the whole CTA");
};

template <class Tile>
__device__ __forceinline__ void barrier_of_row() {
  if constexpr (Tile::kThreadsPerRow > 32) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

template <class Tile, bool kDropout>
__global__ void __launch_bounds__(kSoftmaxThreads, Tile::kCtasPerSm)
    row_softmax_kernel(const __grid_constant__ RowSoftmaxParams p, int row_tile, int64_t row_groups, int64_t first_group) {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;
  constexpr int kQuads = Tile::kQuads;
  __shared__ Acc s_partial[2][kSoftmaxThreads / 32];

  const int64_t flat_group =
      first_group + static_cast<int64_t>(blockIdx.x) * Tile::kGroupsPerCta + threadIdx.x / Tile::kThreadsPerRow;
  if (flat_group >= p.slice.batch_count * row_groups) return;  // whole warps of a warp-per-row CTA, never part of a row
  int64_t slice_index, group;
  divide(flat_group, row_groups, slice_index, group);
  const int64_t n = p.slice.batch_begin + slice_index;
  const int thread = threadIdx.x % Tile::kThreadsPerRow;
  const int64_t seed = kDropout ? *p.dropout.seed : 0;
  const Acc* g_matrix = static_cast<const Acc*>(p.scores.data) + batch_offset(p.batch, p.scores, n, slice_index);
  T* g_weights_matrix = static_cast<T*>(p.weights.data) + batch_offset(p.batch, p.weights, n, slice_index);
  Acc* g_row_sum = static_cast<Acc*>(p.row_sum.data) + batch_offset(p.batch, p.row_sum, n, slice_index);
  Acc* g_lse = static_cast<Acc*>(p.lse.data) + batch_offset(p.batch, p.lse, n, slice_index);

#pragma unroll 1
  for (int64_t slice_row = group * Tile::kRowsPerGroup; slice_row < min(p.slice.row_count, (group + 1) * Tile::kRowsPerGroup);
       ++slice_row) {
    const int row = static_cast<int>(p.slice.row_begin + slice_row);
    // Keys [0, visible) count; weights are written up to `filled`, where stage 3 stops reading for this row's tile.
    const KeyRange range = key_range(p.sequence, n, p.slice.col_count);
    const int visible = range.end_of_row(row);
    const int filled = range.end_of_tile(row - static_cast<int>(slice_row) % row_tile, row_tile);

    const Acc* g_scores = g_matrix + slice_row * p.scores.row_stride;
    T* g_weights = g_weights_matrix + slice_row * p.weights.row_stride;

    Acc x[kQuads][4];
    const auto load_chunk = [&](int chunk) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int col = chunk + (quad * Tile::kThreadsPerRow + thread) * 4;
        load_quad<Acc>(x[quad], g_scores, col, visible, p.scores.col_stride, p.scores.vector);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (col + e >= visible) x[quad][e] = negative_infinity(Acc(0));
        }
      }
    };
    const auto chunk_max = [&] {
      Acc max = negative_infinity(Acc(0));
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int e = 0; e < 4; ++e) max = maximum(max, x[quad][e]);
      }
      return max;
    };
    // A maximum of -inf (nothing visible yet) stands for 0, so that -inf - -inf never arises.
    const auto reference_of = [](Acc max) { return max == negative_infinity(Acc(0)) ? Acc(0) : max; };
    const auto exponentiate = [&](Acc reference) {  // x = exp(x - reference); returns the thread's sum
      Acc sum = 0;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[quad][e] = exp_difference<T>(x[quad][e], reference);
          sum += x[quad][e];
        }
      }
      return sum;
    };
    const auto store_chunk = [&](int chunk) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int col = chunk + (quad * Tile::kThreadsPerRow + thread) * 4;
        if (col >= filled) break;
        if constexpr (kDropout) drop_quad(x[quad], p.dropout, seed, n, row, col);
        store_quad(g_weights, col, filled, p.weights.col_stride, p.weights.vector, x[quad]);
      }
    };

    Acc max, sum;
    if constexpr (Tile::kStreaming) {
      Acc running_max = negative_infinity(Acc(0)), running_sum = 0;
      for (int chunk = 0; chunk < visible; chunk += Tile::kChunk) {
        load_chunk(chunk);
        const Acc new_max = maximum(running_max, chunk_max());
        const Acc reference = reference_of(new_max);
        running_sum = running_sum * exp_difference<T>(running_max, reference) + exponentiate(reference);
        running_max = new_max;
      }
      max = reduce_row<Tile, Maximum>(running_max, s_partial[0]);
      sum = reduce_row<Tile, Sum>(running_sum * exp_difference<T>(running_max, reference_of(max)), s_partial[1]);
      for (int chunk = 0; chunk < filled; chunk += Tile::kChunk) {
        load_chunk(chunk);
        exponentiate(reference_of(max));
        barrier_of_row<Tile>();  // the chunk's scores have been read by all; its weights may cover them
        store_chunk(chunk);
      }
    } else {
      load_chunk(0);
      max = reduce_row<Tile, Maximum>(chunk_max(), s_partial[0]);
      sum = reduce_row<Tile, Sum>(exponentiate(reference_of(max)), s_partial[1]);
      barrier_of_row<Tile>();  // as above
      store_chunk(0);
    }

    if (thread == 0) {
      g_row_sum[slice_row * p.row_sum.row_stride] = sum;
      g_lse[row * p.lse.row_stride] = log_sum_exp(max, sum);
    }
  }
}

template <class Tile>
cudaError_t launch_tile(const RowSoftmaxParams& params, cudaStream_t stream) {
  if (!Tile::kStreaming && params.slice.col_count > Tile::kChunk) return cudaErrorInvalidValue;
  auto* kernel = params.dropout.seed == nullptr ? row_softmax_kernel<Tile, false> : row_softmax_kernel<Tile, true>;
  const int64_t row_groups = ceil_div(params.slice.row_count, Tile::kRowsPerGroup);
  return launch_rows(kernel, kSoftmaxThreads, params.slice.batch_count * row_groups, Tile::kGroupsPerCta, stream, params,
                     RowsByCols<typename Tile::T>::kM, row_groups);
}

// The table of row widths: the narrowest tile that holds a row, so that few lanes idle and few registers are taken.
template <class T>
cudaError_t launch_typed(const RowSoftmaxParams& params, cudaStream_t stream) {
  const int64_t width = params.slice.col_count;
  if (width <= 128) return launch_tile<SoftmaxTile<T, 32, 1>>(params, stream);
  if (width <= 512) return launch_tile<SoftmaxTile<T, 32, 4>>(params, stream);
  if (width <= 1024) return launch_tile<SoftmaxTile<T, 32, 8>>(params, stream);
  if (width <= 4096) return launch_tile<SoftmaxTile<T, kSoftmaxThreads, 4>>(params, stream);
  if (width <= 8192) return launch_tile<SoftmaxTile<T, kSoftmaxThreads, 8>>(params, stream);
  constexpr int kStreamedQuads = sizeof(T) == 8 ? 2 : 4;  // 4 quads of double spill
  return launch_tile<SoftmaxTile<T, kSoftmaxThreads, kStreamedQuads, true>>(params, stream);
}

}  // namespace

cudaError_t launch_row_softmax(const RowSoftmaxParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
