// Backward: delta[n, i] = sum over e of grad_out[n, i, e] * out[n, i, e], minus grad_lse[n, i] where there is one.
//
// One warp per row, lanes over columns, any strides; the sum is reduced by shuffles in a fixed order.
// Grid: one CTA of 256 threads per 8 rows of the flattened (N, L). No shared memory.
#include "attention/pipeline/params.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kRowsPerCta = kCtaThreads / 32;

template <class T>
__global__ void __launch_bounds__(kCtaThreads) row_dot_kernel(const __grid_constant__ RowDotParams p, int64_t first_row) {
  using Acc = Accumulator<T>;
  const int64_t flat_row = first_row + static_cast<int64_t>(blockIdx.x) * kRowsPerCta + threadIdx.x / 32;
  if (flat_row >= p.slice.batch_count * p.L) return;  // a whole warp
  int64_t n, row;
  divide(flat_row, p.L, n, row);

  const T* g_grad =
      static_cast<const T*>(p.grad_out.data) + batch_offset(p.batch, p.grad_out, n, 0) + row * p.grad_out.row_stride;
  const T* g_out = static_cast<const T*>(p.out.data) + batch_offset(p.batch, p.out, n, 0) + row * p.out.row_stride;
  Acc sum = 0;
  const int cols = static_cast<int>(p.Ev);
  for (int col = threadIdx.x % 32 * 4; col < cols; col += 128) {
    Acc grad[4], out[4];
    load_quad<T>(grad, g_grad, col, cols, p.grad_out.col_stride, p.grad_out.vector);
    load_quad<T>(out, g_out, col, cols, p.out.col_stride, p.out.vector);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum += grad[e] * out[e];
  }
  sum = warp_sum(sum);

  if (threadIdx.x % 32 == 0) {
    if (p.grad_lse.data != nullptr) {
      const Acc* g_grad_lse = static_cast<const Acc*>(p.grad_lse.data) + batch_offset(p.batch, p.grad_lse, n, 0);
      sum -= g_grad_lse[row * p.grad_lse.row_stride];
    }
    static_cast<Acc*>(p.delta)[flat_row] = sum;
  }
}

}  // namespace

cudaError_t launch_row_dot(const RowDotParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) {
    return launch_rows(row_dot_kernel<decltype(element)>, kCtaThreads, params.slice.batch_count * params.L, kRowsPerCta, stream,
                       params);
  });
}

}  // namespace attention_ext
