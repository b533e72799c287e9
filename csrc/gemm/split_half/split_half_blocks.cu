// Matrices of float as sums of two half terms, 64 rows with one exponent: x = (high + low) * 2^exponent, the block's largest
// magnitude in [2^14, 2^15) of half precision. A row's own exponent (split_half_rows.cu) could not be taken out of a sum over rows.
//
// high = half(x / 2^exponent), low = half(x / 2^exponent - high): the error is at most the larger of 2^-23 of the element and 2^-39
// of the block's largest. What that comes to in a product is known from the largest norms of rows, and of what is left out of rows.
// Infinities, NaN, and rows that are tiny within their block where that counts, are reported (SplitHalfFacts::exact).
// A cluster of one, two or four CTAs takes a block, so that it stays in their registers, 64 elements a thread, between the search
// for its largest and the split; above 1024 columns it is read twice.
// Grid: 256 threads a CTA, a warp a row at a time. Shared memory: 4 bytes and 32 for its warps.
#include <cuda_fp16.h>

#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"
#include "device/sm80/cp_async.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "gemm/split_half/epilogue.cuh"
#include "gemm/split_half/params.h"
#include "gemm/split_half/terms.cuh"

namespace attention_ext {
namespace {

constexpr int kThreads = 256, kOperands = 4;

struct Operands {
  SplitHalfBlocksParams of[kOperands];
  unsigned end[kOperands];  // the number of the first block after each one's
};

// kQuads: four columns each, that a lane has of a row; 0: as many as there are, not kept.
template <int kCluster, int kQuads>
__global__ void __launch_bounds__(kThreads) split_half_blocks_kernel(const __grid_constant__ Operands operands) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  launch_dependents();
  constexpr int kWarps = kThreads / 32, kRows = kSplitHalfBlock / kCluster / kWarps;  // kRows: of a warp
  constexpr float kSmallRow = 0x1p-16f;  // of the block's largest: from here on fewer than 22 bits are left
  __shared__ uint32_t s_warp_largest[kWarps], s_largest;
  unsigned block = blockIdx.x / kCluster;
  int number = 0;
  while (block >= operands.end[number]) ++number;
  const SplitHalfBlocksParams& p = operands.of[number];
  if (number > 0) block -= operands.end[number - 1];
  const unsigned blocks = static_cast<unsigned>((p.rows + kSplitHalfBlock - 1) / kSplitHalfBlock);
  const int64_t matrix = block / blocks, n = (p.first / p.group + matrix) * p.group, pitch = (p.cols + 7) / 8 * 8;
  block %= blocks;
  const int cols = static_cast<int>(p.cols), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The warp's first row, of the part; rows from it on that exist, and that count.
  const int64_t first_row = static_cast<int64_t>(block) * kSplitHalfBlock + (blockIdx.x % kCluster * kWarps + warp) * kRows;
  const int rows = static_cast<int>(max(min(p.rows - first_row, static_cast<int64_t>(kRows)), int64_t{0}));
  const int64_t length = p.row_lengths == nullptr ? p.row_begin + p.rows : p.row_lengths[n / p.heads];
  const int counted = static_cast<int>(max(min(length - p.row_begin - first_row, static_cast<int64_t>(rows)), int64_t{0}));
  const float* g_rows = static_cast<const float*>(p.source.data) + batch_offset(p.batch, p.source, n, 0) +
                        (p.row_begin + first_row) * p.source.row_stride;

  float x[kQuads == 0 ? 1 : kRows * kQuads][4];
  const auto load = [&](float (&quad)[4], int row, int col) {
    if (row < counted && col < cols) {
      load_quad<float>(quad, g_rows + row * p.source.row_stride, col, cols, p.source.col_stride, p.source.vector);
    } else {
      quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
    }
  };
  // visit(quad, column) for this lane's of a row.
  const auto for_each_quad = [&](int row, auto visit) {
    if constexpr (kQuads == 0) {
#pragma unroll 4
      for (int col = lane * 4; col < pitch; col += 128) {
        float quad[4];
        load(quad, row, col);
        visit(quad, col);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) visit(x[row * kQuads + i], lane * 4 + i * 128);
    }
  };
  if constexpr (kQuads > 0) {  // all loads at once
#pragma unroll
    for (int i = 0; i < kRows * kQuads; ++i) load(x[i], i / kQuads, lane * 4 + i % kQuads * 128);
  }

  uint32_t largest = 0, largest_of_row[kRows];  // magnitudes compare as their bits do, NaN above infinity
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    largest_of_row[row] = 0;
    for_each_quad(row, [&](const float (&quad)[4], int) {
#pragma unroll
      for (int e = 0; e < 4; ++e) largest_of_row[row] = max(largest_of_row[row], __float_as_uint(quad[e]) & 0x7fffffffu);
    });
    largest_of_row[row] = __reduce_max_sync(0xffffffffu, largest_of_row[row]);
    largest = max(largest, largest_of_row[row]);
  }
  if (lane == 0) s_warp_largest[warp] = largest;
  __syncthreads();  // all warps' largest are there
#pragma unroll
  for (int i = 0; i < kWarps; ++i) largest = max(largest, s_warp_largest[i]);
  if constexpr (kCluster > 1) {
    if (threadIdx.x == 0) s_largest = largest;
    cluster_sync();
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) largest = max(largest, load_of_cluster(shared_address(&s_largest), rank));
    cluster_sync();  // no CTA ends while another reads of it
  }
  const SplitHalfScale scale(largest);
  if (threadIdx.x == 0 && blockIdx.x % kCluster == 0) {
    p.exponents[matrix * blocks + block] = largest == 0 ? kRowOfZeros : scale.exponent;
  }

  __half* g_high = static_cast<__half*>(p.terms) + (matrix * p.rows + first_row) * pitch;
  __half* g_low = g_high + p.matrices * p.rows * pitch;
  float norm = 0.0f, left_out = 0.0f;  // the largest of this warp's rows
  bool exact = !scale.finite;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= rows) break;
    float squares = 0.0f, left_squares = 0.0f;
    for_each_quad(row, [&](float (&quad)[4], int col) {
      if (col >= pitch) return;
      float low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float left = scale.split(quad[e], low[e]);
        squares += quad[e] * quad[e];
        left_squares += left * left;
      }
      store_whole_quad(g_high + row * pitch + col, quad);
      store_whole_quad(g_low + row * pitch + col, low);
    });
    norm = maximum(norm, warp_sum(squares));
    left_out = maximum(left_out, warp_sum(left_squares));
    const float of_row = __uint_as_float(largest_of_row[row]);
    exact = exact || (p.rows_weighted && of_row > 0.0f && of_row < kSmallRow * __uint_as_float(largest));
  }
  if (lane != 0) return;
  SplitHalfFacts& facts = p.facts[n];
  atomicMax(&facts.norm, __float_as_uint(times_power_of_two(sqrtf(norm), scale.exponent)));
  if (left_out > 0.0f) atomicMax(&facts.left_out, __float_as_uint(times_power_of_two(sqrtf(left_out), scale.exponent)));
  if (exact) facts.exact = 1;
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <int kCluster, int kQuads>
cudaError_t launch(const Operands& operands, cudaStream_t stream) {
  LaunchShape shape = {static_cast<int64_t>(operands.end[kOperands - 1]) * kCluster, kThreads};
  shape.cluster = kCluster;
  return launch_kernel(split_half_blocks_kernel<kCluster, kQuads>, shape, stream, operands);
}

}  // namespace

cudaError_t launch_split_half_blocks(const SplitHalfBlocksParams* params, int count, cudaStream_t stream) {
  Operands operands = {};
  int64_t blocks = 0, cols = 0;
  for (int i = 0; i < kOperands; ++i) {
    if (i < count) {
      operands.of[i] = params[i];
      blocks += params[i].matrices * ((params[i].rows + kSplitHalfBlock - 1) / kSplitHalfBlock);
      cols = params[i].cols > cols ? params[i].cols : cols;
    }
    operands.end[i] = static_cast<unsigned>(blocks);
  }
  return cols <= 128    ? launch<1, 1>(operands, stream)
         : cols <= 256  ? launch<1, 2>(operands, stream)
         : cols <= 512  ? launch<2, 4>(operands, stream)
         : cols <= 1024 ? launch<4, 8>(operands, stream)
                        : launch<4, 0>(operands, stream);
}

}  // namespace attention_ext
