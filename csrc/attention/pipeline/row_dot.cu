// Backward of half types: delta[n, i] = sum over e of grad_out[n, i, e] * out[n, i, e], minus grad_lse[n, i] where there is one.
//
// Grid: one CTA of 256 threads per 64 rows of the flattened (N, L), so that short matrices fill it too. Sums: row_dots.cuh.
#include "attention/pipeline/params.h"
#include "attention/pipeline/row_dots.cuh"
#include "core/dispatch.h"
#include "core/launch.cuh"

namespace attention_ext {
namespace {

template <class T>
__global__ void __launch_bounds__(kDotThreads)
    row_dot_kernel(const __grid_constant__ DotViews views, int64_t L, int64_t all, float* delta, int64_t first_row) {
  __shared__ DotRows rows;
  const int64_t at = first_row + static_cast<int64_t>(blockIdx.x) * kDotRows + threadIdx.x % kDotRows;
  int64_t n, row;
  divide(min(at, all - 1), L, n, row);  // all lanes shuffle
  const float value = find_dot_row(views, rows, n, row);
  __syncthreads();  // the places are there
  sum_dot_rows<T>(views, rows, value);
  __syncthreads();
  if (threadIdx.x < kDotRows && at < all) delta[at] = rows.delta(threadIdx.x);
}

}  // namespace

cudaError_t launch_row_dot(const RowDotParams& params, cudaStream_t stream) {
  const DotViews views = {params.batch, {params.grad_out, params.out, params.grad_lse, {}}, static_cast<int>(params.Ev)};
  const int64_t all = params.slice.batch_count * params.L;
  return dispatch_half_type(params.type, [&](auto element) {
    return launch_rows(row_dot_kernel<decltype(element)>, kDotThreads, all, kDotRows, stream, views, params.L, all,
                       static_cast<float*>(params.delta));
  });
}

}  // namespace attention_ext
