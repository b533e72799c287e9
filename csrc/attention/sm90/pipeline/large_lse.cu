// Backward by wgmma (Hopper): the probabilities of rows with a large log-sum-exp made to sum to 1; what pipeline/row_norm.cu does.
//
// P = exp(score - lse) takes lse as the forward rounded it. At |lse| = 3e5 float's spacing is 0.03, so P is off by 3 %, and a row
// of finfo.min has lost the sum's share altogether; the error is one factor for the whole row, of dS as well. Below kLargeLse it
// is less than what the probabilities are rounded by. score_gradients.cu leaves the sums of such rows, tile by tile.
// Grid: one CTA of 256 threads per 256 rows of the slice. A thread looks at a row, a warp mends one. No shared memory.
#include "attention/sm90/pipeline/backward.h"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"
#include "plan/slices.h"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256;

// A sum that is off by less is right: rounding every probability again would cost more than it mends.
template <class T>
constexpr float kTolerance = sizeof(T) == 2 && weight_scale(kDataType<T>) > 1.0f ? 1.0f / 1024 : 1.0f / 128;

// One row, by a warp.
template <class T>
__device__ __forceinline__ void mend_row(const LargeLseParams& p, int64_t flat_row) {
  int64_t slice_index, slice_row;
  divide(flat_row, p.slice.row_count, slice_index, slice_row);
  const int64_t n = p.slice.batch_begin + slice_index, row = p.slice.row_begin + slice_row;
  const int visible = key_range(p.sequence, n, p.slice.col_count).end_of_row(static_cast<int>(row)), lane = threadIdx.x % 32;
  const int64_t pitch = (p.slice.col_count + kWgmmaTileCols - 1) / kWgmmaTileCols;
  float sum = 0.0f;
  for (int tile = lane; tile * kWgmmaTileCols < visible; tile += 32) sum += p.row_sums[flat_row * pitch + tile];
  sum = warp_sum(sum) * (1.0f / weight_scale(kDataType<T>));
  // Written so that NaN stays NaN and an empty row stays 0.
  const float norm = sum == 0.0f || fabsf(sum - 1.0f) <= kTolerance<T> ? 1.0f : 1.0f / sum;
  if (lane == 0) p.norm[n * p.L + row] = norm;
  if (norm == 1.0f) return;
  const int64_t offset = slice_index * p.score_grad.slice_stride + slice_row * p.score_grad.row_stride;  // of P as well
  const auto scale_row = [&](T* g_row) {
    for (int col = lane * 4; col < visible; col += 128) {
      float quad[4];
      load_quad<T>(quad, g_row, col, visible, 1, true);
#pragma unroll
      for (int e = 0; e < 4; ++e) quad[e] *= norm;
      store_quad(g_row, col, visible, 1, true, quad);
    }
  };
  scale_row(static_cast<T*>(p.probabilities.data) + offset);
  scale_row(static_cast<T*>(p.score_grad.data) + offset);
}

template <class T>
__global__ void __launch_bounds__(kCtaThreads) large_lse_kernel(const __grid_constant__ LargeLseParams p, int64_t first_row) {
  const int64_t flat_row = first_row + static_cast<int64_t>(blockIdx.x) * kCtaThreads + threadIdx.x;
  float lse = 0.0f;
  if (flat_row < p.slice.batch_count * p.slice.row_count) {
    int64_t slice_index, slice_row;
    divide(flat_row, p.slice.row_count, slice_index, slice_row);
    lse = static_cast<const float*>(p.lse.data)[batch_offset(p.batch, p.lse, p.slice.batch_begin + slice_index, slice_index) +
                                                (p.slice.row_begin + slice_row) * p.lse.row_stride];
  }
  uint32_t pending = __ballot_sync(0xffffffffu, !(fabsf(lse) < kLargeLse));
  for (; pending != 0; pending &= pending - 1) mend_row<T>(p, flat_row - threadIdx.x % 32 + __ffs(pending) - 1);
}

}  // namespace

cudaError_t launch_large_lse(const LargeLseParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) {
    return launch_rows(large_lse_kernel<decltype(element)>, kCtaThreads, params.slice.batch_count * params.slice.row_count,
                       kCtaThreads, stream, params);
  });
}

}  // namespace attention_ext
