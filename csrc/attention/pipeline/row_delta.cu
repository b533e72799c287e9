// Backward of float and double: delta of each row from the probabilities and the weights' gradients themselves, then dS in place.
//
// delta = sum(P * dP) is the same number as sum(grad_out * out), but a row with one visible key then gives dS = 0 to the last bit,
// as float32 asks for. Half types cannot: they would have to round dP first.
// One warp per row, lanes over quads of columns; sums by shuffles in a fixed order. With dropout P becomes keep * P on the way.
// Grid: one CTA of 256 threads per 8 rows of the slice. No shared memory.
#include "attention/pipeline/params.h"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"
#include "gemm/tile.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kRowsPerCta = kCtaThreads / 32;

template <class T>
__global__ void __launch_bounds__(kCtaThreads)
    row_delta_kernel(const __grid_constant__ RowDeltaParams p, int tile, int64_t first_row) {
  const int64_t flat_row = first_row + static_cast<int64_t>(blockIdx.x) * kRowsPerCta + threadIdx.x / 32;
  if (flat_row >= p.slice.batch_count * p.slice.row_count) return;  // a whole warp
  int64_t slice_index, slice_row;
  divide(flat_row, p.slice.row_count, slice_index, slice_row);
  const int64_t n = p.slice.batch_begin + slice_index, row = p.slice.row_begin + slice_row;
  const KeyRange range = key_range(p.sequence, n, p.slice.col_count);
  const int visible = range.end_of_row(static_cast<int>(row));
  // Whole tiles were written, beyond the last visible key with P = 0; dS becomes 0 there.
  const int tile_row = static_cast<int>(row - slice_row % tile);
  const int written = min((range.end_of_tile(tile_row, tile) + tile - 1) / tile * tile, static_cast<int>(p.slice.col_count));
  const int lane_col = threadIdx.x % 32 * 4;

  T* g_probabilities = static_cast<T*>(p.probabilities.data) + slice_index * p.probabilities.slice_stride +
                       slice_row * p.probabilities.row_stride;
  T* g_grad =
      static_cast<T*>(p.score_grad.data) + slice_index * p.score_grad.slice_stride + slice_row * p.score_grad.row_stride;
  T delta = 0;
  for (int col = lane_col; col < visible; col += 128) {
    T probability[4], grad[4];
    load_quad<T>(probability, g_probabilities, col, visible, 1, true);
    load_quad<T>(grad, g_grad, col, visible, 1, true);
#pragma unroll
    for (int e = 0; e < 4; ++e) delta += probability[e] == T(0) ? T(0) : probability[e] * grad[e];
  }
  delta = warp_sum(delta);
  if (p.grad_lse.data != nullptr) {
    const T* g_grad_lse = static_cast<const T*>(p.grad_lse.data) + batch_offset(p.batch, p.grad_lse, n, 0);
    delta -= g_grad_lse[row * p.grad_lse.row_stride];
  }
  if (threadIdx.x % 32 == 0) static_cast<T*>(p.delta)[n * p.L + row] = delta;

  const bool dropping = p.dropout.seed != nullptr;
  const int64_t seed = dropping ? *p.dropout.seed : 0;
  for (int col = lane_col; col < written; col += 128) {
    T probability[4], grad[4];
    load_quad<T>(probability, g_probabilities, col, written, 1, true);
    load_quad<T>(grad, g_grad, col, written, 1, true);
#pragma unroll
    for (int e = 0; e < 4; ++e) grad[e] = probability[e] == T(0) ? T(0) : probability[e] * (grad[e] - delta);
    store_quad(g_grad, col, written, 1, true, grad);
    if (dropping) {
      drop_quad(probability, p.dropout, seed, n, static_cast<int>(row), col);
      store_quad(g_probabilities, col, written, 1, true, probability);
    }
  }
}

}  // namespace

cudaError_t launch_row_delta(const RowDeltaParams& params, cudaStream_t stream) {
  return dispatch_among<float, double>(params.type, [&](auto element) {
    using T = decltype(element);
    return launch_rows(row_delta_kernel<T>, kCtaThreads, params.slice.batch_count * params.slice.row_count, kRowsPerCta, stream,
                       params, RowsByRows<T>::kM);
  });
}

}  // namespace attention_ext
