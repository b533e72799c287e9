// What two half terms are not enough for, in float on CUDA cores: what calls for it, a matrix's scores, and products of 16 rows by
// 64, by 256 threads, 16 a row.
#pragma once

#include <cstdint>

#include "attention/sm90/split_half/split_half.h"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "device/common/batch.cuh"

namespace attention_ext {

constexpr int kExactThreads = 256, kExactRowThreads = 16, kExactKeys = 64, kExactChunk = 32, kExactCols = 64;
constexpr int kExactTileRows = kExactThreads / kExactRowThreads;
constexpr int kExactOfThread = kExactKeys / kExactRowThreads;  // of a row of 64

struct ExactShared {
  float rows[kExactTileRows][kExactChunk + 1], others[kExactKeys][kExactChunk + 1];
  float weights[kExactTileRows][kExactKeys], values[kExactKeys][kExactCols];
};

// Rows of a matrix from the first one on, of which so many count.
struct ExactRows {
  const float* data;
  int64_t row_stride, col_stride;
  int count;
  __device__ __forceinline__ float at(int row, int col) const { return data[row * row_stride + col * col_stride]; }
};

// The most that the terms of two matrices leave out of a product of their rows.
__device__ __forceinline__ float left_out(const SplitHalfFacts& a, const SplitHalfFacts& b) {
  return __uint_as_float(a.left_out) * __uint_as_float(b.norm) + __uint_as_float(b.left_out) * __uint_as_float(a.norm);
}
// Whether that may be more than independent errors of 2^-22 an element of query and key.
__device__ __forceinline__ bool scores_need_exact(const ForwardParams& call, const SplitHalfFacts& query,
                                                  const SplitHalfFacts& key) {
  const float of_scores = fabsf(static_cast<float>(call.scale)) * kLog2E * left_out(query, key);
  const bool enough = of_scores <= 0x1p-22f * sqrtf(static_cast<float>(call.E));  // false for NaN
  return !enough || query.exact != 0 || key.exact != 0;
}

// What is made of a matrix.
struct ExactHead {
  const ForwardParams& call;
  int64_t n, mask_offset;
  KeyRange range;

  __device__ __forceinline__ ExactHead(const ForwardParams& call, int64_t n)
      : call(call),
        n(n),
        mask_offset(call.mask_type == MaskType::kNone ? 0 : batch_offset(call.batch, call.mask, n, 0)),
        range(key_range(call.sequence, n, call.S)) {}

  // Rows of an operand, from one on.
  __device__ __forceinline__ ExactRows rows_of(const MatrixView& view, int first, int64_t end) const {
    const float* g_matrix = static_cast<const float*>(view.data) + batch_offset(call.batch, view, n, 0);
    return {g_matrix + first * view.row_stride, view.row_stride, view.col_stride, static_cast<int>(end) - first};
  }
  // Of a product; -inf where the row does not see the key.
  __device__ __forceinline__ float score(float product, int row, int key) const {
    float x[1] = {product};
    if (row >= call.L || key >= range.end_of_row(row)) return negative_infinity(0.0f);
    make_scores<float>(x, static_cast<float>(call.scale), call.mask, call.mask_type, mask_offset, range, row, key);
    return x[0];
  }
  __device__ __forceinline__ bool keeps(int row, int key) const {
    return call.dropout.seed == nullptr || attention_ext::keeps(call.dropout, *call.dropout.seed, n, row, key);
  }
  __device__ __forceinline__ float keep_scale() const {
    return call.dropout.seed == nullptr ? 1.0f : static_cast<float>(call.dropout.keep_scale);
  }
};

__device__ __forceinline__ int exact_row() { return static_cast<int>(threadIdx.x) / kExactRowThreads; }
// Number i of this thread's places in a row of 64.
__device__ __forceinline__ int exact_place(int i) {
  return static_cast<int>(threadIdx.x) % kExactRowThreads + i * kExactRowThreads;
}

// x[i]: the product of rows[exact_row()] and others[exact_place(i)], `width` columns long. By all threads.
__device__ __forceinline__ void multiply_rows(const ExactRows& rows, const ExactRows& others, int width, ExactShared& s,
                                              float (&x)[kExactOfThread]) {
#pragma unroll
  for (int i = 0; i < kExactOfThread; ++i) x[i] = 0.0f;
#pragma unroll 1
  for (int e = 0; e < width; e += kExactChunk) {
    __syncthreads();  // the chunk before this one has been read
    for (int i = threadIdx.x; i < kExactKeys * kExactChunk; i += kExactThreads) {
      const int of = i / kExactChunk, col = e + i % kExactChunk;
      const bool in = col < width;
      s.others[of][i % kExactChunk] = in && of < others.count ? others.at(of, col) : 0.0f;
      if (of < kExactTileRows) s.rows[of][i % kExactChunk] = in && of < rows.count ? rows.at(of, col) : 0.0f;
    }
    __syncthreads();                  // the chunk is there
    float part[kExactOfThread] = {};  // a sum of sums: its error does not grow with the width
    for (int k = 0; k < kExactChunk; ++k) {
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) part[i] = fmaf(s.rows[exact_row()][k], s.others[exact_place(i)][k], part[i]);
    }
#pragma unroll
    for (int i = 0; i < kExactOfThread; ++i) x[i] += part[i];
  }
}

// visit(column, sum) for this thread's columns: sums of s.weights[exact_row()][k] times row k of values, `width` columns wide. By
// all threads, after all have written the weights.
template <class Visit>
__device__ __forceinline__ void multiply_weights(const ExactRows& values, int width, ExactShared& s, Visit visit) {
#pragma unroll 1
  for (int col = 0; col < width; col += kExactCols) {
    __syncthreads();  // the columns before these have been read
    for (int i = threadIdx.x; i < kExactKeys * kExactCols; i += kExactThreads) {
      const int key = i / kExactCols, of = col + i % kExactCols;
      s.values[key][i % kExactCols] = key < values.count && of < width ? values.at(key, of) : 0.0f;
    }
    __syncthreads();  // they and the weights are there
    float sums[kExactOfThread] = {};
    for (int key = 0; key < kExactKeys; ++key) {
#pragma unroll
      for (int i = 0; i < kExactOfThread; ++i) {
        sums[i] = fmaf(s.weights[exact_row()][key], s.values[key][exact_place(i)], sums[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kExactOfThread; ++i) {
      if (col + exact_place(i) < width) visit(col + exact_place(i), sums[i]);
    }
  }
}

// make(unit) for those of `units` units of work that found(unit) says, by CTAs that stay: every gridDim.x-th is this one's. All
// threads look at once; what some of them find is made by all.
template <class Found, class Make>
__device__ __forceinline__ void for_each_found(int64_t units, bool (&s_found)[kExactThreads], Found found, Make make) {
  const int64_t stride = gridDim.x;
#pragma unroll 1
  for (int64_t first = blockIdx.x; first < units; first += kExactThreads * stride) {
    const int64_t mine = first + threadIdx.x * stride;
    const bool is_found = mine < units && found(mine);
    if (__syncthreads_or(is_found) == 0) continue;
    s_found[threadIdx.x] = is_found;
    __syncthreads();  // what all have found is there
#pragma unroll 1
    for (int i = 0; i < kExactThreads; ++i) {
      if (s_found[i]) make(first + i * stride);
    }
    __syncthreads();  // and has been read
  }
}

}  // namespace attention_ext
