// float32 attention on Hopper's Tensor Cores: every operand as two half terms, products by wgmma, parts summed in float.
// docs/kernels/sm90_split_half.md has the scheme and what bounds its errors.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "gemm/split_half/params.h"

namespace attention_ext {

// Scores and weights of a row, 64 keys of a segment at a time: weight 2^(score * log2(e) - reference), reference a whole number.
struct SplitHalfSegment {
  float reference;  // -inf: the row sees none of the keys; kFarBelow: all scores are lower than that
  float sum;        // of the weights; negative: of a single key's
};
constexpr float kFarBelow = -0x1p20f, kFarAbove = 0x1p20f;  // beyond these references two rows of float are not told apart

// What a row has come to after some of its keys: the sum of weights relative to 2^reference, and the row of out relative to 2^top.
struct SplitHalfRowState {
  float reference, sum;
  int32_t top;
  int32_t keys;  // that it has seen: 0, 1, or 2 for more
};

// What the kernels of a slice have in common. A slice is some matrices, rows and keys; its arrays count from its own first.
struct SplitHalfStage {
  BatchDims batch;
  Slice slice;
  Dropout dropout;
  Sequence sequence;
  void* weights;               // terms (2, matrices, rows, pitch), times 2^15; pitch: keys rounded up to 8
  SplitHalfSegment* segments;  // (matrices, keys / 64 rounded up, rows)
  int64_t L, Ev;               // rows of all slices, columns of values
  double factor;               // of the weights that dropout keeps
  int64_t key_group, value_group;
  const int32_t *query_exponents, *key_exponents, *value_exponents;
  MatrixView out;  // (N, L, Ev); between slices of keys it holds rows relative to 2^top
  MatrixView lse;
  // (N, L / 16 rounded up): 1 where a row sees a single key, whose value it is to be bit by bit, or where scores of these rows are
  // too large, or too far below 0, for a reference.
  uint8_t* marks;
};

struct SplitHalfScoresParams : SplitHalfStage {
  int64_t E;
  double scale;
  MatrixView mask;  // broadcasts to (N, L, S), float
  MaskType mask_type;
  int64_t pitch;  // of weights as floats, which are of all keys: whole segments
  // Of gradients of weights: those weights, as floats; what a segment adds to delta, relative to its reference; and of a matrix the
  // largest whose weight is not 0, its bits.
  const float* weights_of_grads;
  float* deltas;  // (matrices, pitch / 64, rows): the sum of weight * gradient; of a single key's segment its gradient
  uint32_t* largest_grads;  // (N,), begun with zeros
};

// What becomes of products of query and key, and where: weights as terms, marks of rows. In the backward: weights as floats, marks
// of matrices; and, of grad_out and value in their places, gradients of weights as floats, by `factor`.
enum class ScoreProducts { kWeightTerms, kWeights, kWeightGrads };

struct SplitHalfValuesParams : SplitHalfStage {
  int64_t S;                        // keys of all slices
  const SplitHalfRowState* before;  // (matrices, rows), from the keys before the slice's
  SplitHalfRowState* after;
};

constexpr int kExactRows = 16;  // that are marked, and made anew, together

// What two half terms are not enough for, made anew in float: the rows that are marked, and all of a matrix whose facts say so.
struct SplitHalfExactParams {
  ForwardParams call;
  const SplitHalfFacts *query, *key, *value;  // by flat number
  const uint8_t* marks;
};

// query_terms: (2, matrices, rows, E rounded up to 8); the others likewise.
cudaError_t launch_split_half_scores(const SplitHalfScoresParams& params, ScoreProducts as, void* query_terms, void* key_terms,
                                     cudaStream_t stream);
cudaError_t launch_split_half_values(const SplitHalfValuesParams& params, void* value_terms, cudaStream_t stream);
// Both products of whole matrices, head dims up to 128.
cudaError_t launch_split_half_fused(const SplitHalfScoresParams& params, void* query_terms, void* key_terms, void* value_terms,
                                    cudaStream_t stream);
cudaError_t launch_split_half_exact(const SplitHalfExactParams& params, cudaStream_t stream);

cudaError_t split_half_forward(const ForwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
