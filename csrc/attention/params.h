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
  bool wgmma_products;      // stages 1 and 3 by wgmma, on Hopper
  void* workspace;          // at least pipeline_forward_workspace bytes, 256-byte aligned
  int64_t workspace_bytes;  // what the slices may take
};

struct BackwardParams {
  BatchDims batch;
  int64_t N, L, S, E, Ev;
  int64_t key_group, value_group;  // Hq / Hk, Hq / Hv
  int64_t group;                   // their least common multiple, which slices of whole groups are multiples of
  double scale;
  MatrixView query, key, value;              // (N, L, E), (N / group, S, E), (N / group, S, Ev)
  MatrixView mask;                           // broadcasts to (N, L, S)
  MatrixView out, grad_out;                  // (N, L, Ev)
  MatrixView lse, grad_lse;                  // (N, L), accumulator type; grad_lse.data null: absent
  MatrixView grad_query;                     // (N, L, E), as the next two in `type`, or in the accumulator type with wide_grads
  MatrixView grad_key;                       // (N / group, S, E), dense
  MatrixView grad_value;                     // (N / group, S, Ev), dense
  int64_t grad_key_bytes, grad_value_bytes;  // of the two dense outputs, for clearing them when there is no query
  MatrixView mask_grad;                      // mask's own shape, accumulator type, zeroed by the caller; data null: not wanted
  bool mask_rows_kept, mask_cols_kept;
  bool wide_grads;
  void* norm;   // (N, L) scratch, accumulator type
  void* delta;  // (N, L) scratch, accumulator type
  Dropout dropout;
  DataType type;
  MaskType mask_type;
  Sequence sequence;
  void* workspace;          // at least pipeline_backward_workspace bytes, 256-byte aligned
  int64_t workspace_bytes;  // what the slices may take
};

}  // namespace attention_ext
