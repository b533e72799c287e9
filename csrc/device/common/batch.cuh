// From a flat batch index to an offset: the one place where batch dims, broadcasting and grouped heads are resolved.
#pragma once

#include <cstdint>

#include "core/tensors.h"

namespace attention_ext {

// Splits n into (n / size, n % size) with 32-bit division where both fit: 64-bit division is ten times slower.
__device__ __forceinline__ void divide(int64_t n, int64_t size, int64_t& quotient, int64_t& remainder) {
  if (((n | size) >> 32) == 0) {
    const uint32_t n32 = static_cast<uint32_t>(n), size32 = static_cast<uint32_t>(size);
    quotient = n32 / size32;
    remainder = n32 % size32;
  } else {
    quotient = n / size;
    remainder = n % size;
  }
}

// The same where everything is known to fit in 32 bits.
__device__ __forceinline__ void divide(uint32_t n, int64_t size, uint32_t& quotient, uint32_t& remainder) {
  const uint32_t size32 = static_cast<uint32_t>(size);
  quotient = n / size32;
  remainder = n % size32;
}

// Offset in elements of matrix n of a view. n counts (leading dims..., Hq) row-major over the whole problem and
// slice_index from the beginning of the slice.
template <class Index>  // int64_t, or uint32_t where N is known to fit
__device__ __forceinline__ int64_t batch_offset(const BatchDims& batch, const MatrixView& view, Index n, int64_t slice_index) {
  int64_t offset = slice_index * view.slice_stride;
  // One to three dims mostly, and divisions are long code, which kernels that count in 32 bits run once and fetch from L2.
  constexpr int kUnroll = sizeof(Index) == 4 ? 1 : 4;
#pragma unroll kUnroll
  for (int dim = batch.count - 1; dim >= 0; --dim) {
    Index index = n;
    if (dim > 0) divide(n, batch.size[dim], n, index);
    if (dim == batch.count - 1 && view.group > 1) index /= view.group;
    offset += static_cast<int64_t>(index) * view.batch_stride[dim];
  }
  return offset;
}

// Of the matrices that share one of a view, number `reduced`, counted row-major over the batch dims that the view has not. kept:
// the view's own matrix, counted row-major over those that it has (batch_stride not 0). It grows with `reduced`.
template <class Index>  // int64_t, or uint32_t where N is known to fit
__device__ __forceinline__ Index shared_matrix(const BatchDims& batch, const MatrixView& view, Index kept, Index reduced) {
  Index n = 0, weight = 1;
#pragma unroll 1  // divisions are long code
  for (int dim = batch.count - 1; dim >= 0; --dim) {
    const bool is_kept = view.batch_stride[dim] != 0;
    Index quotient, index;
    divide(is_kept ? kept : reduced, batch.size[dim], quotient, index);
    if (is_kept) {
      kept = quotient;
    } else {
      reduced = quotient;
    }
    n += index * weight;
    weight *= static_cast<Index>(batch.size[dim]);
  }
  return n;
}

}  // namespace attention_ext
