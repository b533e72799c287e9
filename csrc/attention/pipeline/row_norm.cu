// Backward: the factor that makes the recomputed probabilities of a row sum to 1, applied in place where it is not 1.
//
// P = exp(score - lse) takes lse as the forward rounded it. At |lse| = 3e5 float's spacing is 0.03, so P is off by 3 %, and a row
// of finfo.min has lost the sum's share altogether; the error is one factor for the whole row, and a sum finds it.
// 1. One warp per row sums it, lanes over quads of columns, by shuffles in a fixed order.
// 2. A sum within T's precision of 1 is right: rounding every probability again would cost more than it mends.
// Grid: one CTA of 256 threads per 8 rows of the slice. No shared memory.
#include "attention/pipeline/params.h"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kRowsPerCta = kCtaThreads / 32;

template <class T>
constexpr double kTolerance = 0;
template <>
constexpr double kTolerance<__half> = 1.0 / 1024;
template <>
constexpr double kTolerance<__nv_bfloat16> = 1.0 / 128;

template <class T>
__global__ void __launch_bounds__(kCtaThreads) row_norm_kernel(const __grid_constant__ RowNormParams p, int64_t first_row) {
  using Acc = Accumulator<T>;
  const int64_t flat_row = first_row + static_cast<int64_t>(blockIdx.x) * kRowsPerCta + threadIdx.x / 32;
  if (flat_row >= p.slice.batch_count * p.slice.row_count) return;  // a whole warp
  int64_t slice_index, slice_row;
  divide(flat_row, p.slice.row_count, slice_index, slice_row);
  const int64_t n = p.slice.batch_begin + slice_index, row = p.slice.row_begin + slice_row;
  const int visible = key_range(p.sequence, n, p.slice.col_count).end_of_row(static_cast<int>(row));

  T* g_row = static_cast<T*>(p.probabilities.data) + slice_index * p.probabilities.slice_stride +
             slice_row * p.probabilities.row_stride;
  Acc sum = 0;
  for (int col = threadIdx.x % 32 * 4; col < visible; col += 128) {
    Acc quad[4];
    load_quad<T>(quad, g_row, col, visible, 1, true);
    sum += quad[0] + quad[1] + (quad[2] + quad[3]);
  }
  sum = warp_sum(sum);
  const Acc error = sum > Acc(1) ? sum - Acc(1) : Acc(1) - sum;
  // Written so that NaN stays NaN and an empty row stays 0.
  const Acc norm = sum == Acc(0) || error <= Acc(kTolerance<T>) ? Acc(1) : Acc(1) / sum;
  if (threadIdx.x % 32 == 0) static_cast<Acc*>(p.norm)[n * p.L + row] = norm;
  if (norm == Acc(1)) return;
  for (int col = threadIdx.x % 32 * 4; col < visible; col += 128) {
    Acc quad[4];
    load_quad<T>(quad, g_row, col, visible, 1, true);
#pragma unroll
    for (int e = 0; e < 4; ++e) quad[e] *= norm;
    store_quad(g_row, col, visible, 1, true, quad);
  }
}

}  // namespace

cudaError_t launch_row_norm(const RowNormParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) {
    return launch_rows(row_norm_kernel<decltype(element)>, kCtaThreads, params.slice.batch_count * params.slice.row_count,
                       kRowsPerCta, stream, params);
  });
}

}  // namespace attention_ext
