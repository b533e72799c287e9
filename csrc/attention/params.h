// A call of attention as host code hands it to a kernel: the whole forward, the whole backward. Sizes: core/tensors.h.
#pragma once

#include "attention/visibility/sequence.h"
#include "core/slice.h"
#include "core/tensors.h"

namespace attention_ext {

// The whole forward: out = softmax(scale * query . key^T + mask) . value.
struct ForwardParams {
  BatchDims batch;
  int64_t N, L, S, E, Ev;
  double scale;
  MatrixView query;  // (N, L, E)
  MatrixView key;    // (N / group, S, E)
  MatrixView value;  // (N / group, S, Ev)
  MatrixView mask;   // broadcasts to (N, L, S)
  MatrixView out;    // (N, L, Ev)
  MatrixView lse;    // (N, L), accumulator type, natural logarithm, -inf for a row without a visible key
  Dropout dropout;
  DataType type;
  MaskType mask_type;
  Sequence sequence;
  void* workspace;          // 256-byte aligned, as large as the kernel's own function says
  int64_t workspace_bytes;  // that the caller would have it stay under
};

// Matrices that the mask has of its own; at least 1.
inline int64_t mask_matrices(const ForwardParams& params) {
  int64_t matrices = 1;
  for (int dim = 0; dim < params.batch.count; ++dim) {
    if (params.mask.batch_stride[dim] != 0) matrices *= params.batch.size[dim];
  }
  return matrices;
}

// The whole backward: the forward's call, its results given, and the gradients. At least one query row.
struct BackwardParams : ForwardParams {
  int64_t key_group, value_group;  // Hq / Hk, Hq / Hv
  MatrixView grad_out;             // (N, L, Ev)
  MatrixView grad_lse;             // (N, L), accumulator type; data null: absent
  MatrixView grad_query;           // (N, L, E), as the next two in `type`, or in the accumulator type with wide_grads
  MatrixView grad_key;             // (N / group, S, E), dense
  MatrixView grad_value;           // (N / group, S, Ev), dense
  MatrixView mask_grad;            // mask's own shape and dtype, strides 0 along dims of size 1; data null: not wanted
  void* mask_sums;                 // laid out as mask_grad, accumulator type; null: not wanted
  bool wide_grads;
};

}  // namespace attention_ext
