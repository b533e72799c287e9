// Which score matrices share a matrix of the mask, whose gradient is their sum.
#pragma once

#include "core/slice.h"
#include "core/tensors.h"
#include "device/common/batch.cuh"

namespace attention_ext {

// A matrix of the mask and, of the score matrices that share it, those within a slice: numbers [first, last), counted row-major
// over the batch dims that the mask has not.
struct MaskEntry {
  int64_t kept, first, last;
};

// The entry of a matrix of the slice; false where an earlier one has the same. sharing: matrices that share one of the mask.
__device__ __forceinline__ bool find_entry(const BatchDims& batch, const MatrixView& mask_grad, const Slice& slice,
                                           int64_t sharing, int64_t slice_index, MaskEntry& entry) {
  int64_t n = slice.batch_begin + slice_index, reduced = 0, kept_weight = 1, reduced_weight = 1;
  entry = {n, 0, 1};
  if (sharing == 1) return true;
  entry.kept = 0;
#pragma unroll 1
  for (int dim = batch.count - 1; dim >= 0; --dim) {
    int64_t index;
    divide(n, batch.size[dim], n, index);
    if (mask_grad.batch_stride[dim] != 0) {
      entry.kept += index * kept_weight;
      kept_weight *= batch.size[dim];
    } else {
      reduced += index * reduced_weight;
      reduced_weight *= batch.size[dim];
    }
  }
  const auto before = [&](int64_t number, int64_t end) { return shared_matrix(batch, mask_grad, entry.kept, number) < end; };
  if (reduced > 0 && !before(reduced - 1, slice.batch_begin)) return false;
  entry.first = reduced;
  entry.last = reduced + 1;
  for (int64_t most = sharing; entry.last < most;) {
    const int64_t middle = (entry.last + most) / 2;
    if (before(middle, slice.batch_begin + slice.batch_count)) {
      entry.last = middle + 1;
    } else {
      most = middle;
    }
  }
  return true;
}

}  // namespace attention_ext
