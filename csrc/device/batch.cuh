// From a flat batch index to an offset: the one place where batch dims, broadcasting and grouped heads are resolved.
#pragma once

#include <cstdint>

#include "../params.h"

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

// Offset in elements of matrix n of a view. n counts (leading dims..., Hq) row-major over the whole problem and
// slice_index from the beginning of the slice.
__device__ __forceinline__ int64_t batch_offset(const BatchDims& batch, const MatrixView& view, int64_t n,
                                                int64_t slice_index) {
  int64_t offset = slice_index * view.slice_stride;
  for (int dim = batch.count - 1; dim >= 0; --dim) {
    int64_t index = n;
    if (dim > 0) divide(n, batch.size[dim], n, index);
    if (dim == batch.count - 1 && view.group > 1) index /= view.group;
    offset += index * view.batch_stride[dim];
  }
  return offset;
}

}  // namespace attention_ext
