// Which score matrices share a matrix of the mask, whose gradient is their sum.
#pragma once

#include "core/tensors.h"
#include "device/common/batch.cuh"

namespace attention_ext {

// Score matrix number `reduced` of mask matrix number `kept`, which is counted row-major over the batch dims that the mask has
// (batch_stride not 0). It grows with `reduced`.
__device__ __forceinline__ int64_t matrix_index(const BatchDims& batch, const MatrixView& mask_grad, int64_t kept,
                                                int64_t reduced) {
  int64_t n = 0, weight = 1;
#pragma unroll 1  // divisions are long code
  for (int dim = batch.count - 1; dim >= 0; --dim) {
    const bool is_kept = mask_grad.batch_stride[dim] != 0;
    int64_t quotient, index;
    divide(is_kept ? kept : reduced, batch.size[dim], quotient, index);
    if (is_kept) {
      kept = quotient;
    } else {
      reduced = quotient;
    }
    n += index * weight;
    weight *= batch.size[dim];
  }
  return n;
}

}  // namespace attention_ext
