// The backward of float32 attention by half terms without scores in memory, for head dims up to 64: a row kernel for dQ, a column
// kernel for dK and dV, and one for a mask's gradient, each of which makes scores anew from the operands' terms.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/split_half/backward.h"

namespace attention_ext {

// Of 64 queries of a matrix, what the row kernel leaves for the column kernel: P = 2^(x + offset) * inverse / 2^15 with
// x = score log2(e), dS = P * (dP - delta). A query that sees no key, or does not exist, has an offset of -inf.
struct SplitHalfQueryRecord {
  float offset[kSplitHalfBlock], inverse[kSplitHalfBlock], delta[kSplitHalfBlock];
};

// Of a slice: whole matrices, all heads of a group of queries among them.
struct SplitHalfFusedBackwardParams {
  BatchDims batch;
  Slice slice;  // its keys: those that any row sees
  Sequence sequence;
  int64_t S, E, Ev;
  int64_t group;  // query heads per key head
  double scale;
  MatrixView mask;  // broadcasts to (N, L, S)
  MaskType mask_type;
  const int32_t *query_exponents, *grad_out_exponents, *key_exponents, *value_exponents;  // (matrices, rows / 64 rounded up)
  MatrixView grad_lse;  // (N, L), column unused; data null: absent
  MatrixView grad_query, grad_key, grad_value;
  SplitHalfQueryRecord* records;  // (matrices, rows / 64 rounded up), 16-byte aligned
  uint8_t* marks;                 // (N,): 1 where two terms will not do
  uint32_t* largest_grads;        // (N,): SplitHalfScoresParams
};

// The gradient of a mask of whole matrices, whose sums span slices in mask_grad itself. Of the slice's heads that are made anew in
// float the rows' values are there.
struct SplitHalfBiasGradParams : SplitHalfFusedBackwardParams {
  SplitHalfExactBackwardParams exact;
  MatrixView mask_grad;       // float, mask's own shape, strides 0 along batch dims of size 1
  int64_t matrices, sharing;  // of the mask; score matrices of each
};

// query_terms: (2, matrices, rows, E rounded up to 8); the others likewise. Rows come before columns and the
// mask.
cudaError_t launch_split_half_row_grads(const SplitHalfFusedBackwardParams& params, void* query_terms, void* key_terms,
                                        void* grad_out_terms, void* value_terms, cudaStream_t stream);
cudaError_t launch_split_half_column_grads(const SplitHalfFusedBackwardParams& params, void* query_terms, void* key_terms,
                                           void* grad_out_terms, void* value_terms, cudaStream_t stream);

cudaError_t launch_split_half_bias_grads(const SplitHalfBiasGradParams& params, void* query_terms, void* key_terms,
                                         void* grad_out_terms, void* value_terms, cudaStream_t stream);

}  // namespace attention_ext
