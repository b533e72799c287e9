// Stage 2 for half types: the softmax of rows that stage 1 left as exponentials relative to the reference of each segment of 64
// keys.
//
// 1. Each row's reference (the largest) and sums come from the statistics of its segments, by warp shuffles: 16 bytes read per 64
//    keys.
// 2. Where segments of a row have another reference than the row, and for dropout (which comes after the sums), weights are
//    brought to the row's in place, w * exp(segment's - row's), 16 bytes per thread and access. Mostly there is nothing to do.
// 3. -inf everywhere: weights 0, sum 0, lse -inf. NaN and +inf: NaN.
// Grid: one CTA of 256 threads per 32 rows of up to 1024 keys (8 lanes a row), 8 rows of up to 4096 (a warp a row), or one row.
// Shared memory: 96 bytes.
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

template <class T_, int kThreadsPerRow_>
struct SegmentTile {
  using T = T_;
  using Acc = float;
  static constexpr int kThreadsPerRow = kThreadsPerRow_;
  static constexpr int kRowsPerCta = kSoftmaxThreads / kThreadsPerRow;
  static constexpr int kChunk = 8;  // weights of one 16-byte access
  static_assert(kSegment % kChunk == 0, "a chunk lies in one segment");
};

// e^(reference - row_reference); a segment without a visible key (-inf) keeps its zeros.
template <class T>
__device__ __forceinline__ float rescale_factor(float reference, float row_reference) {
  return exp_difference<T>(reference == negative_infinity(0.0f) ? row_reference : reference, row_reference);
}

// Whether any thread of the row says so. All of the CTA's threads ask.
template <class Tile>
__device__ __forceinline__ bool any_of_row(bool mine) {
  if constexpr (Tile::kThreadsPerRow <= 32) {
    const unsigned lane = threadIdx.x % 32, first = lane / Tile::kThreadsPerRow * Tile::kThreadsPerRow;
    const unsigned row = (0xffffffffu >> (32 - Tile::kThreadsPerRow)) << first;
    return (__ballot_sync(0xffffffffu, mine) & row) != 0;
  } else {
    return __syncthreads_or(mine);
  }
}

// Brings the weights of columns [0, filled) of a row to the row's reference and drops some.
template <class Tile, bool kDropout>
__device__ __forceinline__ void rescale_row(const SegmentSoftmaxParams& p, const SegmentStatistics* g_statistics, int segments,
                                            float row_reference, int64_t n, int row, int filled, typename Tile::T* g_row) {
  using T = typename Tile::T;
  struct alignas(16) Chunk {
    T value[Tile::kChunk];
  };
  const int64_t seed = kDropout ? *p.dropout.seed : 0;
#pragma unroll 1
  for (int col = threadIdx.x % Tile::kThreadsPerRow * Tile::kChunk; col < filled; col += Tile::kThreadsPerRow * Tile::kChunk) {
    const int segment = col / kSegment;
    // After `segments` lie zeros that stage 1 wrote for a tile of which other rows see more.
    const float factor = segment < segments ? rescale_factor<T>(g_statistics[segment].reference, row_reference) : 1.0f;
    if (factor == 1.0f && !kDropout) continue;
    Chunk chunk = *reinterpret_cast<const Chunk*>(g_row + col);
#pragma unroll
    for (int quad = 0; quad < Tile::kChunk; quad += 4) {
      float weights[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) weights[e] = to_accumulator(chunk.value[quad + e]) * factor;
      if constexpr (kDropout) drop_quad(weights, p.dropout, seed, n, row, col + quad);
#pragma unroll
      for (int e = 0; e < 4; ++e) chunk.value[quad + e] = from_accumulator<T>(weights[e]);
    }
    *reinterpret_cast<Chunk*>(g_row + col) = chunk;
  }
}

template <class Tile, bool kDropout>
__global__ void __launch_bounds__(kSoftmaxThreads, 4)
    segment_softmax_kernel(const __grid_constant__ SegmentSoftmaxParams p, int row_tile, int64_t first_row) {
  using T = typename Tile::T;
  __shared__ float s_partial[3][kSoftmaxThreads / 32];

  const int64_t flat_row =
      first_row + static_cast<int64_t>(blockIdx.x) * Tile::kRowsPerCta + threadIdx.x / Tile::kThreadsPerRow;
  const bool exists = flat_row < p.slice.batch_count * p.slice.row_count;  // threads without a row take part in the reductions
  int64_t slice_index, slice_row;
  divide(exists ? flat_row : 0, p.slice.row_count, slice_index, slice_row);
  const int64_t n = p.slice.batch_begin + slice_index;
  const int thread = threadIdx.x % Tile::kThreadsPerRow;
  const int row = static_cast<int>(p.slice.row_begin + slice_row);
  const KeyRange range = key_range(p.sequence, n, p.slice.col_count);
  // Segments without a key that the row sees may not have been written.
  const int segments = exists ? (range.end_of_row(row) + kSegment - 1) / kSegment : 0;
  const auto* g_statistics = static_cast<const SegmentStatistics*>(p.statistics.data) +
                             slice_index * p.statistics.slice_stride + slice_row * p.statistics.row_stride;

  // Each thread's first segment is read once; most rows have no second one.
  SegmentStatistics first = {negative_infinity(0.0f), 0.0f, 0.0f};
  if (thread < segments) first = g_statistics[thread];
  float max = first.reference;
#pragma unroll 1
  for (int segment = thread + Tile::kThreadsPerRow; segment < segments; segment += Tile::kThreadsPerRow) {
    max = maximum(max, g_statistics[segment].reference);
  }
  max = reduce_row<Tile, Maximum>(max, s_partial[0]);
  const float reference = max == negative_infinity(0.0f) ? 0.0f : max;  // so that -inf - -inf never arises

  const float factor = rescale_factor<T>(first.reference, reference);
  float sum = first.sum * factor, rounded_sum = first.rounded_sum * factor;
  bool rescale = factor != 1.0f;
#pragma unroll 1
  for (int segment = thread + Tile::kThreadsPerRow; segment < segments; segment += Tile::kThreadsPerRow) {
    const SegmentStatistics other = g_statistics[segment];
    const float other_factor = rescale_factor<T>(other.reference, reference);
    sum += other.sum * other_factor;
    rounded_sum += other.rounded_sum * other_factor;
    rescale = rescale || other_factor != 1.0f;
  }
  sum = reduce_row<Tile, Sum>(sum, s_partial[1]);
  rounded_sum = reduce_row<Tile, Sum>(rounded_sum, s_partial[2]);
  rescale = kDropout || any_of_row<Tile>(rescale);
  if (!exists) return;

  if (thread == 0) {
    static_cast<float*>(p.row_sum.data)[slice_index * p.row_sum.slice_stride + slice_row * p.row_sum.row_stride] = rounded_sum;
    static_cast<float*>(p.lse.data)[batch_offset(p.batch, p.lse, n, slice_index) + row * p.lse.row_stride] =
        log_sum_exp(reference, sum);
  }
  if (rescale) {
    // Stage 3 reads to the end of the row's tile.
    rescale_row<Tile, kDropout>(
        p, g_statistics, segments, reference, n, row, range.end_of_tile(row - static_cast<int>(slice_row) % row_tile, row_tile),
        static_cast<T*>(p.weights.data) + slice_index * p.weights.slice_stride + slice_row * p.weights.row_stride);
  }
}

template <class Tile>
cudaError_t launch_tile(const SegmentSoftmaxParams& params, cudaStream_t stream) {
  auto* kernel = params.dropout.seed == nullptr ? segment_softmax_kernel<Tile, false> : segment_softmax_kernel<Tile, true>;
  return launch_rows(kernel, kSoftmaxThreads, params.slice.batch_count * params.slice.row_count, Tile::kRowsPerCta, stream,
                     params, RowsByCols<typename Tile::T>::kM);
}

template <class T>
cudaError_t launch_typed(const SegmentSoftmaxParams& params, cudaStream_t stream) {
  if (params.slice.col_count <= 1024) return launch_tile<SegmentTile<T, 8>>(params, stream);
  if (params.slice.col_count <= 4096) return launch_tile<SegmentTile<T, 32>>(params, stream);
  return launch_tile<SegmentTile<T, kSoftmaxThreads>>(params, stream);
}

}  // namespace

cudaError_t launch_segment_softmax(const SegmentSoftmaxParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
