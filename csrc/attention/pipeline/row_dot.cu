// Backward of half types: delta[n, i] = sum over e of grad_out[n, i, e] * out[n, i, e], minus grad_lse[n, i] where there is one.
//
// 16 lanes per row, eight columns a lane, read at once where the views allow; any strides. What is read bounds the time, so a lane
// has several reads on their way. The sum is reduced by shuffles in a fixed order.
// Grid: one CTA of 256 threads per 16 rows of the flattened (N, L). No shared memory.
#include "attention/pipeline/params.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kLanes = 16, kRowsPerCta = kCtaThreads / kLanes;
constexpr int kChunk = 8, kUnroll = 4;  // columns a lane and pass; passes at once

template <class T>
struct alignas(16) Chunk {
  T value[kChunk];
};

template <class T>
__device__ __forceinline__ void add_products(float& sum, const Chunk<T>& a, const Chunk<T>& b) {
#pragma unroll
  for (int e = 0; e < kChunk; ++e) sum += to_accumulator(a.value[e]) * to_accumulator(b.value[e]);
}

// kVector: both rows are adjacent in memory and begin on 16-byte boundaries.
template <class T, bool kVector>
__device__ __forceinline__ float dot(const T* g_a, int64_t stride_a, const T* g_b, int64_t stride_b, int cols) {
  float sum = 0.0f;
  int col = threadIdx.x % kLanes * kChunk;
  if constexpr (kVector) {
    constexpr int kStep = kLanes * kChunk;
    for (; col + (kUnroll - 1) * kStep + kChunk <= cols; col += kUnroll * kStep) {
      Chunk<T> a[kUnroll], b[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        a[i] = *reinterpret_cast<const Chunk<T>*>(g_a + col + i * kStep);
        b[i] = *reinterpret_cast<const Chunk<T>*>(g_b + col + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) add_products(sum, a[i], b[i]);
    }
    for (; col + kChunk <= cols; col += kStep) {
      add_products(sum, *reinterpret_cast<const Chunk<T>*>(g_a + col), *reinterpret_cast<const Chunk<T>*>(g_b + col));
    }
  }
  for (; col < cols; col += kLanes * kChunk) {
    for (int e = col; e < min(col + kChunk, cols); ++e) {
      sum += to_accumulator(g_a[e * stride_a]) * to_accumulator(g_b[e * stride_b]);
    }
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kCtaThreads) row_dot_kernel(const __grid_constant__ RowDotParams p, int64_t first_row) {
  const int64_t rows = p.slice.batch_count * p.L;
  const int64_t own_row = first_row + static_cast<int64_t>(blockIdx.x) * kRowsPerCta + threadIdx.x / kLanes;
  const int64_t flat_row = min(own_row, rows - 1);  // all lanes shuffle
  int64_t n, row;
  divide(flat_row, p.L, n, row);

  const T* g_grad =
      static_cast<const T*>(p.grad_out.data) + batch_offset(p.batch, p.grad_out, n, 0) + row * p.grad_out.row_stride;
  const T* g_out = static_cast<const T*>(p.out.data) + batch_offset(p.batch, p.out, n, 0) + row * p.out.row_stride;
  const int cols = static_cast<int>(p.Ev);
  float sum = p.grad_out.vector && p.out.vector ? dot<T, true>(g_grad, 1, g_out, 1, cols)
                                                : dot<T, false>(g_grad, p.grad_out.col_stride, g_out, p.out.col_stride, cols);
  sum = warp_sum<kLanes>(sum);

  if (threadIdx.x % kLanes == 0 && own_row < rows) {
    if (p.grad_lse.data != nullptr) {
      const float* g_grad_lse = static_cast<const float*>(p.grad_lse.data) + batch_offset(p.batch, p.grad_lse, n, 0);
      sum -= g_grad_lse[row * p.grad_lse.row_stride];
    }
    static_cast<float*>(p.delta)[flat_row] = sum;
  }
}

}  // namespace

cudaError_t launch_row_dot(const RowDotParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) {
    return launch_rows(row_dot_kernel<decltype(element)>, kCtaThreads, params.slice.batch_count * params.L, kRowsPerCta, stream,
                       params);
  });
}

}  // namespace attention_ext
