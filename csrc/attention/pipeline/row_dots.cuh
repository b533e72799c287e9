// Dot products of rows of grad_out and out, for kernels whose CTA takes 64 rows of whatever matrices: of them delta is made.
//
// A thread for each row and view finds where the row lies, so divisions run side by side. Then 16 lanes take a row, eight columns a
// lane, read at once where the views allow; any strides. What is read bounds the time, so a lane has the reads of four rows on
// their way. A row's sum is reduced by shuffles in a fixed order, whichever CTA and lanes take it: the same bits.
// 256 threads. Shared memory: DotRows.
#pragma once

#include "core/tensors.h"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/common/types.cuh"

namespace attention_ext {

enum DotView : int { kDotGradOut, kDotOut, kDotGradLse, kDotLse, kDotViews };

constexpr int kDotRows = 64, kDotThreads = kDotRows * kDotViews;
constexpr int kDotChunk = 8, kDotLanes = 16;  // columns of a lane; lanes of a row

struct DotViews {
  BatchDims batch;
  MatrixView of[kDotViews];  // (N, L, Ev) the first two, (N, L) in float the others; data null: absent, and 0
  int cols;                  // Ev
};

struct DotRows {
  int64_t place[2][kDotRows];  // of grad_out and out
  float sum[kDotRows];
  float value[2][kDotRows];  // of grad_lse and lse

  __device__ __forceinline__ float delta(int slot) const { return sum[slot] - value[0][slot]; }
  __device__ __forceinline__ float lse(int slot) const { return value[1][slot]; }
};

template <class T>
struct alignas(16) DotChunk {
  T value[kDotChunk];
};

// The place of row `row` of matrix n, which is the CTA's row threadIdx.x % kDotRows, in the view threadIdx.x / kDotRows. Returns
// what the view holds of it, of grad_lse and lse: on its way, as long as it is not used.
template <class Index>  // int64_t, or uint32_t where N is known to fit
__device__ __forceinline__ float find_dot_row(const DotViews& views, DotRows& rows, Index n, int64_t row) {
  const int of = static_cast<int>(threadIdx.x) / kDotRows;
  const MatrixView& view = views.of[of];
  if (view.data == nullptr) return 0.0f;
  const int64_t place = batch_offset(views.batch, view, n, 0) + row * view.row_stride;
  if (of >= kDotGradLse) return static_cast<const float*>(view.data)[place];
  rows.place[of][threadIdx.x % kDotRows] = place;
  return 0.0f;
}

// The sums, when all places are there, and what find_dot_row returned; both are to be seen after the next barrier.
template <class T>
__device__ __forceinline__ void sum_dot_rows(const DotViews& views, DotRows& rows, float value) {
  constexpr int kStep = kDotThreads / kDotLanes, kAtOnce = kDotRows / kStep, kPass = kDotLanes * kDotChunk;
  const MatrixView &grad = views.of[kDotGradOut], &out = views.of[kDotOut];
  const int first = threadIdx.x / kDotLanes, cols = views.cols;
  const T *g_grad[kAtOnce], *g_out[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    g_grad[i] = static_cast<const T*>(grad.data) + rows.place[kDotGradOut][first + i * kStep];
    g_out[i] = static_cast<const T*>(out.data) + rows.place[kDotOut][first + i * kStep];
  }
  float sums[kAtOnce] = {};
  int col = threadIdx.x % kDotLanes * kDotChunk;
  if (grad.vector && out.vector) {
#pragma unroll 1
    for (; col + kDotChunk <= cols; col += kPass) {
      DotChunk<T> a[kAtOnce], b[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        a[i] = *reinterpret_cast<const DotChunk<T>*>(g_grad[i] + col);
        b[i] = *reinterpret_cast<const DotChunk<T>*>(g_out[i] + col);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < kDotChunk; ++e) sums[i] += to_accumulator(a[i].value[e]) * to_accumulator(b[i].value[e]);
      }
    }
  }
#pragma unroll 1
  for (; col < cols; col += kPass) {
#pragma unroll 1
    for (int e = col; e < min(col + kDotChunk, cols); ++e) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] += to_accumulator(g_grad[i][e * grad.col_stride]) * to_accumulator(g_out[i][e * out.col_stride]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const float sum = warp_sum<kDotLanes>(sums[i]);
    if (threadIdx.x % kDotLanes == 0) rows.sum[first + i * kStep] = sum;
  }
  const int of = static_cast<int>(threadIdx.x) / kDotRows;
  if (of >= kDotGradLse) rows.value[of - kDotGradLse][threadIdx.x % kDotRows] = value;
}

}  // namespace attention_ext
