// Backward of float32 attention by half terms (Hopper), between its products: probabilities P and dS = P * (dP - delta) of whole
// rows, in place of their weights and of dP, as two half terms with one power of two for every 64 x 64.
//
// 1. A warp a row: the row's reference, sum and delta = sum of P * dP - grad_lse, of its segments'. P is normalised by its own
//    sum, a division: a row with one visible key has P = 1 and dS = 0 to the last bit, whatever its log-sum-exp.
// 2. A CTA a tile of 64 x 64: P and dS in registers, the largest of each, their terms. Of tiles that the products read: those of a
//    row tile of 128 up to the last key that it sees, zeros beyond what a row sees.
// With dropout dP is of the weights that are kept already, and P is written as keep * P.
// Grid: 256 threads. Shared memory: 64 bytes.
#include "attention/sm90/split_half/backward.h"
#include "attention/sm90/split_half/segment_weights.cuh"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/key_range.cuh"
#include "core/launch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"
#include "gemm/split_half/epilogue.cuh"
#include "gemm/split_half/terms.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kWarps = kCtaThreads / 32, kRowTile = 128;
constexpr int kBlock = kSplitHalfBlock, kQuads = kBlock / 4, kRowsAtOnce = kCtaThreads / kQuads, kPasses = kBlock / kRowsAtOnce;
static_assert(kBlock == kSegment, "a tile's keys are a segment");

__device__ __forceinline__ float probability(float weight, float factor, float sum) { return weight * factor / sum; }

__device__ __forceinline__ int64_t all_segments(const SplitHalfScoreTermsParams& p) { return p.pitch / kSegment; }

__global__ void __launch_bounds__(kCtaThreads)
    split_half_rows_of_scores_kernel(const __grid_constant__ SplitHalfScoreTermsParams p, int64_t first_row) {
  const int64_t flat_row = first_row + static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (flat_row >= p.slice.batch_count * p.slice.row_count) return;  // a whole warp
  int64_t slice_index, slice_row;
  divide(flat_row, p.slice.row_count, slice_index, slice_row);
  const int64_t n = p.slice.batch_begin + slice_index, row = p.slice.row_begin + slice_row, rows = p.slice.row_count;
  const int visible = key_range(p.sequence, n, p.slice.col_count).end_of_row(static_cast<int>(row));
  const int lane = threadIdx.x % 32, segments = (visible + kSegment - 1) / kSegment;
  const SplitHalfSegment* g_segment = p.segments + slice_index * all_segments(p) * rows + slice_row;

  float reference = negative_infinity(0.0f), sum = 0.0f;
  for (int segment = lane; segment < segments; segment += 32) {
    reference = maximum(reference, g_segment[segment * rows].reference);
  }
  reference = warp_max(reference);
  for (int segment = lane; segment < segments; segment += 32) {
    const SplitHalfSegment of = g_segment[segment * rows];
    if (of.reference != negative_infinity(0.0f)) sum += fabsf(of.sum) * segment_factor(of.reference, reference);
  }
  sum = warp_sum(sum);
  const bool none = reference == negative_infinity(0.0f);
  if (none) sum = 1.0f;

  const float* g_delta = p.deltas + slice_index * all_segments(p) * rows + slice_row;
  float delta = 0.0f;
  if (!none) {
    for (int segment = lane; segment < segments; segment += 32) {
      const SplitHalfSegment of = g_segment[segment * rows];
      const float factor = segment_factor(of.reference, reference), part = g_delta[segment * rows];
      if (factor == 0.0f) continue;
      // Of a single key: its own probability, 1 if there is no other.
      delta += of.sum < 0.0f ? part * probability(-of.sum, factor, sum) : probability(part, factor, sum);
    }
    delta = warp_sum(delta);
  }
  if (lane != 0) return;
  if (p.grad_lse.data != nullptr) {
    delta -=
        (static_cast<const float*>(p.grad_lse.data) + batch_offset(p.batch, p.grad_lse, n, 0))[row * p.grad_lse.row_stride];
  }
  p.row_values[flat_row] = {reference, sum, delta};
  if (!none && reference < kFarBelow + 256.0f) p.marks[n] = 1;
}

// The largest magnitude of a CTA, as its bits, which order as they do: NaN above infinity.
__device__ __forceinline__ uint32_t largest_of(const float (&x)[kPasses][4]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = max(largest, __float_as_uint(x[i][e]) & 0x7fffffffu);
  }
  return __reduce_max_sync(0xffffffffu, largest);
}

// A tile of 64 x 64 of the slice's scores.
struct ScoreTile {
  int64_t n, slice_index, col_block;
  int row_begin, block_row, first_col;  // row_begin: of the slice; the others from there on
  KeyRange range;

  __device__ __forceinline__ ScoreTile(const SplitHalfScoreTermsParams& p, int64_t tile) {
    int64_t row_block, block;
    divide(tile, all_segments(p), row_block, col_block);
    divide(row_block, (p.slice.row_count + kBlock - 1) / kBlock, slice_index, block);
    n = p.slice.batch_begin + slice_index;
    row_begin = static_cast<int>(p.slice.row_begin);
    block_row = static_cast<int>(block) * kBlock;
    first_col = static_cast<int>(col_block) * kBlock;
    range = key_range(p.sequence, n, p.slice.col_count);
  }
  // By the products.
  __device__ __forceinline__ bool is_read() const {
    const int seen = range.end_of_tile(row_begin + block_row / kRowTile * kRowTile, kRowTile);
    return first_col < (seen + kRowTile - 1) / kRowTile * kRowTile;
  }
};

__global__ void __launch_bounds__(kCtaThreads)
    split_half_score_terms_kernel(const __grid_constant__ SplitHalfScoreTermsParams p, int64_t first_tile) {
  __shared__ uint32_t s_largest[2][kWarps];
  const int64_t rows = p.slice.row_count, col_blocks = all_segments(p), tile = first_tile + blockIdx.x;
  const ScoreTile at(p, tile);
  if (!at.is_read()) return;
  const int64_t n = at.n, slice_index = at.slice_index, col_block = at.col_block;
  const int row_begin = at.row_begin, block_row = at.block_row, first_col = at.first_col;
  const KeyRange& range = at.range;

  const bool dropping = p.dropout.seed != nullptr;
  const int64_t seed = dropping ? *p.dropout.seed : 0;
  const int quad = threadIdx.x % kQuads * 4, thread_row = threadIdx.x / kQuads;
  float probabilities[kPasses][4], grads[kPasses][4];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int slice_row = block_row + i * kRowsAtOnce + thread_row, row = row_begin + slice_row;
    const int visible = slice_row < rows ? range.end_of_row(row) : 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) probabilities[i][e] = grads[i][e] = 0.0f;
    if (first_col >= visible) continue;  // its segment may not have been written
    const int64_t flat_row = slice_index * rows + slice_row;
    const SplitHalfRowValues of_row = p.row_values[flat_row];
    const float factor =
        segment_factor(p.segments[(slice_index * col_blocks + col_block) * rows + slice_row].reference, of_row.reference);
    float weight[4], grad[4];
    load_quad<float>(weight, static_cast<const float*>(p.weights) + flat_row * p.pitch, first_col + quad, visible, 1, true);
    load_quad<float>(grad, static_cast<const float*>(p.grads) + flat_row * p.pitch, first_col + quad, visible, 1, true);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float of_key = probability(weight[e], factor, of_row.sum);
      probabilities[i][e] = of_key;
      grads[i][e] = of_key == 0.0f ? 0.0f : of_key * (grad[e] - of_row.delta);
    }
    if (dropping) drop_quad(probabilities[i], p.dropout, seed, n, row, first_col + quad);
  }

  uint32_t largest[2] = {largest_of(probabilities), largest_of(grads)};
  if (threadIdx.x % 32 == 0) {
    s_largest[0][threadIdx.x / 32] = largest[0];
    s_largest[1][threadIdx.x / 32] = largest[1];
  }
  __syncthreads();  // all warps' largest are there, and all floats have been read
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    largest[0] = max(largest[0], s_largest[0][warp]);
    largest[1] = max(largest[1], s_largest[1][warp]);
  }
  const SplitHalfScale scales[2] = {SplitHalfScale(largest[0]), SplitHalfScale(largest[1])};
  if (threadIdx.x == 0) {
    p.weight_exponents[tile] = largest[0] == 0 ? kRowOfZeros : scales[0].exponent;
    p.grad_exponents[tile] = largest[1] == 0 ? kRowOfZeros : scales[1].exponent;
    if (!scales[0].finite || !scales[1].finite) p.marks[n] = 1;
  }
  const auto store = [&](void* array, const SplitHalfScale& scale, float (&x)[kPasses][4]) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int slice_row = block_row + i * kRowsAtOnce + thread_row;
      if (slice_row >= rows) break;
      __half* g_high =
          reinterpret_cast<__half*>(static_cast<float*>(array) + (slice_index * rows + slice_row) * p.pitch + first_col);
      float low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) scale.split(x[i][e], low[e]);
      store_whole_quad(g_high + quad, x[i]);
      store_whole_quad(g_high + kBlock + quad, low);
    }
  };
  store(p.weights, scales[0], probabilities);
  store(p.grads, scales[1], grads);
}

int64_t tiles_of(const SplitHalfScoreTermsParams& params) {
  const Slice& slice = params.slice;
  return slice.batch_count * ceil_div(slice.row_count, kBlock) * (params.pitch / kBlock);
}

}  // namespace

cudaError_t launch_split_half_rows_of_scores(const SplitHalfScoreTermsParams& params, cudaStream_t stream) {
  const int64_t rows = params.slice.batch_count * params.slice.row_count;
  return launch_rows(split_half_rows_of_scores_kernel, kCtaThreads, rows, kWarps, stream, params);
}

cudaError_t launch_split_half_score_terms(const SplitHalfScoreTermsParams& params, cudaStream_t stream) {
  return launch_rows(split_half_score_terms_kernel, kCtaThreads, tiles_of(params), 1, stream, params);
}

}  // namespace attention_ext
