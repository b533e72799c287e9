// Backward of half types: delta[n, i] = sum over e of grad_out[n, i, e] * out[n, i, e], minus grad_lse[n, i] where there is one.
//
// 16 lanes per row, eight columns a lane, read at once where the views allow; any strides. What is read bounds the time, so a lane
// has several reads on their way: of four rows, up to 128 columns. The sum is reduced by shuffles in a fixed order.
// Grid: one CTA of 256 threads per 64 rows of a matrix, so that divisions are once for four rows. No shared memory.
#include "attention/pipeline/params.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kLanes = 16, kRowsAtOnce = 4, kStep = kCtaThreads / kLanes, kTileRows = kStep * kRowsAtOnce;
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
    constexpr int kPass = kLanes * kChunk;
    for (; col + (kUnroll - 1) * kPass + kChunk <= cols; col += kUnroll * kPass) {
      Chunk<T> a[kUnroll], b[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        a[i] = *reinterpret_cast<const Chunk<T>*>(g_a + col + i * kPass);
        b[i] = *reinterpret_cast<const Chunk<T>*>(g_b + col + i * kPass);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) add_products(sum, a[i], b[i]);
    }
    for (; col + kChunk <= cols; col += kPass) {
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
__global__ void __launch_bounds__(kCtaThreads) row_dot_kernel(const __grid_constant__ RowDotParams p, int64_t first_tile) {
  int64_t n, tile;
  divide(first_tile + blockIdx.x, (p.L + kTileRows - 1) / kTileRows, n, tile);
  const int64_t first_row = tile * kTileRows + threadIdx.x / kLanes;
  const T *g_grad[kRowsAtOnce], *g_out[kRowsAtOnce];
  const T* g_grads = static_cast<const T*>(p.grad_out.data) + batch_offset(p.batch, p.grad_out, n, 0);
  const T* g_outs = static_cast<const T*>(p.out.data) + batch_offset(p.batch, p.out, n, 0);
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const int64_t row = min(first_row + i * kStep, p.L - 1);  // all lanes shuffle
    g_grad[i] = g_grads + row * p.grad_out.row_stride;
    g_out[i] = g_outs + row * p.out.row_stride;
  }

  const int cols = static_cast<int>(p.Ev), col = threadIdx.x % kLanes * kChunk;
  const bool vector = p.grad_out.vector && p.out.vector;
  float sums[kRowsAtOnce] = {};
  if (vector && cols % kChunk == 0 && cols <= kLanes * kChunk) {
    if (col < cols) {
      Chunk<T> a[kRowsAtOnce], b[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        a[i] = *reinterpret_cast<const Chunk<T>*>(g_grad[i] + col);
        b[i] = *reinterpret_cast<const Chunk<T>*>(g_out[i] + col);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) add_products(sums[i], a[i], b[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      sums[i] = vector ? dot<T, true>(g_grad[i], 1, g_out[i], 1, cols)
                       : dot<T, false>(g_grad[i], p.grad_out.col_stride, g_out[i], p.out.col_stride, cols);
    }
  }

#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    float sum = warp_sum<kLanes>(sums[i]);
    const int64_t row = first_row + i * kStep;
    if (threadIdx.x % kLanes == 0 && row < p.L) {
      if (p.grad_lse.data != nullptr) {
        const float* g_grad_lse = static_cast<const float*>(p.grad_lse.data) + batch_offset(p.batch, p.grad_lse, n, 0);
        sum -= g_grad_lse[row * p.grad_lse.row_stride];
      }
      static_cast<float*>(p.delta)[n * p.L + row] = sum;
    }
  }
}

}  // namespace

cudaError_t launch_row_dot(const RowDotParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) {
    return launch_rows(row_dot_kernel<decltype(element)>, kCtaThreads, params.slice.batch_count * ceil_div(params.L, kTileRows),
                       1, stream, params);
  });
}

}  // namespace attention_ext
