// Stage 2 for half types: the softmax of rows that stage 1 left as exponentials relative to the maximum of each segment of 64 keys.
//
// 1. Each row's maximum and sum come from those of its segments, by warp shuffles: 8 bytes read per 64 keys.
// 2. Weights are brought to the row maximum in place, w * exp(segment maximum - row maximum), 16 bytes per thread and access; a
//    segment that holds the maximum is left alone. Dropout is applied here, after the sum.
// 3. -inf everywhere: weights 0, sum 0, lse -inf. NaN and +inf: NaN.
// Grid: one CTA of 256 threads per 32 rows (warp per row, four rows in turn) or, for more than 4096 keys, per row. Shared memory:
// 64 bytes.
#include "../device/batch.cuh"
#include "../device/random.cuh"
#include "../device/types.cuh"
#include "../gemm/tile.cuh"
#include "../params.h"
#include "row_reduce.cuh"

namespace attention_ext {
namespace {

template <class T_, int kThreadsPerRow_>
struct SegmentTile {
  using T = T_;
  using Acc = float;
  static constexpr int kThreadsPerRow = kThreadsPerRow_;
  static constexpr int kRowsPerGroup = kThreadsPerRow == 32 ? 4 : 1;  // finding the matrix costs as much as a short row
  static constexpr int kGroupsPerCta = kSoftmaxThreads / kThreadsPerRow;
  static constexpr int kChunk = 8;  // weights of one 16-byte access
  static_assert(kSegment % kChunk == 0, "a chunk lies in one segment");
};

template <class Tile, bool kDropout>
__global__ void __launch_bounds__(kSoftmaxThreads, 4)
    segment_softmax_kernel(const __grid_constant__ SegmentSoftmaxParams p, int row_tile, int64_t row_groups,
                           int64_t first_group) {
  using T = typename Tile::T;
  __shared__ float s_partial[2][kSoftmaxThreads / 32];
  struct alignas(16) Chunk {
    T value[Tile::kChunk];
  };

  const int64_t flat_group =
      first_group + static_cast<int64_t>(blockIdx.x) * Tile::kGroupsPerCta + threadIdx.x / Tile::kThreadsPerRow;
  if (flat_group >= p.slice.batch_count * row_groups) return;  // whole warps of a warp-per-row CTA, never part of a row
  int64_t slice_index, group;
  divide(flat_group, row_groups, slice_index, group);
  const int64_t n = p.slice.batch_begin + slice_index;
  const int thread = threadIdx.x % Tile::kThreadsPerRow;
  const int64_t seed = kDropout ? *p.dropout.seed : 0;
  const int keys = static_cast<int>(p.slice.col_count);
  float* g_lse = static_cast<float*>(p.lse.data) + batch_offset(p.batch, p.lse, n, slice_index);

#pragma unroll 1
  for (int64_t slice_row = group * Tile::kRowsPerGroup; slice_row < min(p.slice.row_count, (group + 1) * Tile::kRowsPerGroup);
       ++slice_row) {
    const int row = static_cast<int>(p.slice.row_begin + slice_row);
    // Causal: segments that begin after key `row` are hidden and may not have been written; stage 3 reads to the tile's end.
    const int visible = p.causal ? min(row + 1, keys) : keys;
    const int tile_end = static_cast<int>(p.slice.row_begin) + (static_cast<int>(slice_row) / row_tile + 1) * row_tile;
    const int filled = p.causal ? min(tile_end, keys) : keys;
    const int64_t statistics = slice_index * p.segment_max.slice_stride + slice_row * p.segment_max.row_stride;
    const float* g_max = static_cast<const float*>(p.segment_max.data) + statistics;
    const float* g_sum = static_cast<const float*>(p.segment_sum.data) + statistics;
    const int segments = (visible + kSegment - 1) / kSegment;

    float max = negative_infinity(0.0f);
    for (int segment = thread; segment < segments; segment += Tile::kThreadsPerRow) max = maximum(max, g_max[segment]);
    max = reduce_row<Tile, Maximum>(max, s_partial[0]);
    // A maximum of -inf (nothing visible) stands for 0, so that -inf - -inf never arises.
    const auto factor_of = [&](float segment_max) {
      const float reference = max == negative_infinity(0.0f) ? 0.0f : max;
      return exp_difference<T>(segment_max == negative_infinity(0.0f) ? reference : segment_max, reference);
    };
    float sum = 0.0f;
    for (int segment = thread; segment < segments; segment += Tile::kThreadsPerRow)
      sum += g_sum[segment] * factor_of(g_max[segment]);
    sum = reduce_row<Tile, Sum>(sum, s_partial[1]);

    T* g_row = static_cast<T*>(p.weights.data) + slice_index * p.weights.slice_stride + slice_row * p.weights.row_stride;
    for (int col = thread * Tile::kChunk; col < filled; col += Tile::kThreadsPerRow * Tile::kChunk) {
      const bool hidden = col / kSegment >= segments;  // of a tile on the diagonal: written by stage 1 as zeros
      const float factor = hidden ? 1.0f : factor_of(g_max[col / kSegment]);
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
    if (thread == 0) {
      float* g_row_sum = static_cast<float*>(p.row_sum.data) + slice_index * p.row_sum.slice_stride;
      g_row_sum[slice_row * p.row_sum.row_stride] = sum;
      g_lse[row * p.lse.row_stride] = sum == 0.0f ? negative_infinity(0.0f) : max + natural_log(sum);
    }
  }
}

template <class Tile>
cudaError_t launch_tile(const SegmentSoftmaxParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  auto* kernel = params.dropout.seed == nullptr ? segment_softmax_kernel<Tile, false> : segment_softmax_kernel<Tile, true>;
  const int64_t row_groups = ceil_div(params.slice.row_count, Tile::kRowsPerGroup);
  const int64_t groups = params.slice.batch_count * row_groups;
  for (int64_t first = 0; first < groups; first += kMaxBlocks * Tile::kGroupsPerCta) {
    const int64_t blocks = ceil_div(groups - first, Tile::kGroupsPerCta);
    kernel<<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kSoftmaxThreads, 0, stream>>>(
        params, RowsByCols<typename Tile::T>::kM, row_groups, first);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <class T>
cudaError_t launch_typed(const SegmentSoftmaxParams& params, cudaStream_t stream) {
  if (params.slice.col_count <= 4096) return launch_tile<SegmentTile<T, 32>>(params, stream);
  return launch_tile<SegmentTile<T, kSoftmaxThreads>>(params, stream);
}

}  // namespace

cudaError_t launch_segment_softmax(const SegmentSoftmaxParams& params, cudaStream_t stream) {
  switch (params.type) {
    case DataType::kHalf: return launch_typed<__half>(params, stream);
    case DataType::kBFloat16: return launch_typed<__nv_bfloat16>(params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace attention_ext
