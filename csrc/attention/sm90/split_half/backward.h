// The backward of float32 attention by half terms: what its kernels share, besides split_half.h.
#pragma once

#include "attention/sm90/split_half/split_half.h"
#include "core/arithmetic.h"
#include "plan/split_half_backward_slices.h"

namespace attention_ext {

// Of a row of a slice: how its weights become probabilities, and what is subtracted from their gradients.
struct alignas(16) SplitHalfRowValues {
  float reference, sum;  // of all its weights: the sum is relative to 2^reference, 1 where the row sees no key
  float delta;           // sum of P * dP, minus grad_lse
};

// P and dS of whole rows from weights and their gradients, as terms in the same place. A float's 64 columns of a row become 64 high
// and 64 low terms: (matrices, rows, columns / 64, 2, 64), a power of two for every 64 x 64.
struct SplitHalfScoreTermsParams {
  BatchDims batch;
  Slice slice;  // of whole rows: all keys that any row sees
  Dropout dropout;
  Sequence sequence;
  int64_t pitch;                     // keys rounded up to 64
  void* weights;                     // (matrices, rows, pitch), float: weights, then terms of P, of those that dropout keeps
  void* grads;                       // the same: gradients of the weights, then terms of dS
  const SplitHalfSegment* segments;  // (matrices, pitch / 64, rows)
  const float* deltas;               // the same (SplitHalfScoresParams)
  MatrixView grad_lse;               // (N, L), column unused; data null: absent
  SplitHalfRowValues* row_values;    // (matrices, rows)
  int32_t *weight_exponents, *grad_exponents;  // (matrices, rows / 64 rounded up, pitch / 64)
  uint8_t* marks;                              // (N,): 1 where two terms will not do
};

// Both products of a slice's tiles at once, for head dims that split_half_scores_twice names.
struct SplitHalfScorePairsParams {
  SplitHalfScoresParams weights, grads;  // as for ScoreProducts::kWeights and kWeightGrads
  SplitHalfScoreTermsParams terms;       // of whole rows
};

// One of the three gradients: out = factor * A . B, added to what earlier slices left in `out` itself.
struct SplitHalfGradientOf {
  MatrixView out;
  int64_t width;  // columns
  double factor;
};

// dQ = scale * dS . key of the slice's rows; dK = scale * dS^T . query and dV = factor * P^T . grad_out of its keys, summed over
// the query heads of a key head.
struct SplitHalfGradientsParams {
  BatchDims batch;
  Slice slice;  // its keys may go beyond those that any row sees: gradients of 0
  Sequence sequence;
  int64_t group;          // query heads per key head
  int64_t keys;           // that any row sees
  int64_t pitch;          // as above
  void *weights, *grads;  // terms of P and dS
  const int32_t *weight_exponents, *grad_exponents;
  const int32_t *query_exponents, *key_exponents, *grad_out_exponents;  // (matrices, rows / 64 rounded up), of the slice
  SplitHalfGradientOf of[3];
  SplitHalfGradientParts parts;
  unsigned* ticket;      // 0 before the launch and after it
  unsigned* parts_done;  // (tiles whose sums are cut, 2), the same
};

// The gradient of a mask of whole matrices from a slice's dS: what spans slices is carried in mask_grad itself.
struct SplitHalfMaskSumsParams {
  BatchDims batch;
  Slice slice;  // of whole rows
  Sequence sequence;
  int64_t S, pitch;
  const void* grads;              // (matrices, rows, pitch), dS as terms
  const int32_t* grad_exponents;  // of them; kTileOfFloats: floats after all
  MatrixView mask_grad;           // float, mask's own shape, strides 0 along batch dims of size 1
  int64_t sharing;                // score matrices of each of its own
};

// All query heads of a key head of which one is not for two half terms, made anew in float. Of all matrices and rows; or, for the
// gradient of a mask, dS alone of a slice's.
struct SplitHalfExactBackwardParams {
  BackwardParams call;
  const SplitHalfFacts *query, *key, *value, *grad_out;  // by flat number
  const uint8_t* marks;                                  // (N,)
  const uint32_t* largest_grads;                         // (N,)
  SplitHalfRowValues* row_values;                        // (N, L): here the reference is a row's largest score
  Slice slice;                                           // what is looked at
  float* score_grads;                                    // (matrices, rows, pitch) of it; null: dQ is made
  int32_t* grad_exponents;                               // of score_grads, as SplitHalfScoreTermsParams has them
  int64_t pitch;
};

// Of whole rows, from what their segments left: what split_half_score_terms, or the pairs' terms, are made of.
cudaError_t launch_split_half_rows_of_scores(const SplitHalfScoreTermsParams& params, cudaStream_t stream);
// What each segment leaves of its rows; or, when the rows' values are there, terms of P and dS. Terms of operands as below.
cudaError_t launch_split_half_score_pairs(const SplitHalfScorePairsParams& params, bool terms, void* query_terms,
                                          void* key_terms, void* grad_out_terms, void* value_terms, cudaStream_t stream);
cudaError_t launch_split_half_score_terms(const SplitHalfScoreTermsParams& params, cudaStream_t stream);
// query_terms: (2, matrices, rows, E rounded up to 8); the others likewise.
cudaError_t launch_split_half_gradients(const SplitHalfGradientsParams& params, void* query_terms, void* key_terms,
                                        void* grad_out_terms, cudaStream_t stream);
cudaError_t launch_split_half_mask_sums(const SplitHalfMaskSumsParams& params, cudaStream_t stream);
// Of all matrices.
cudaError_t launch_split_half_exact_backward(const SplitHalfExactBackwardParams& params, cudaStream_t stream);
// Of a slice of whole rows, of what is known to call for it when the slice is done: dS; without score_grads, rows' values and dQ.
cudaError_t launch_split_half_exact_rows(const SplitHalfExactBackwardParams& params, cudaStream_t stream);

// As pipeline_backward and its company.
int64_t split_half_backward_workspace(const BackwardParams& params);
bool split_half_backward_sums_mask(const BackwardParams& params);
cudaError_t split_half_backward(const BackwardParams& call, cudaStream_t stream);

}  // namespace attention_ext
