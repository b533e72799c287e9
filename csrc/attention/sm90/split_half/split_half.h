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
  float sum;        // of the weights
};
constexpr float kFarBelow = -0x1p20f, kFarAbove = 0x1p20f;  // beyond these references two rows of float are not told apart

// What a row has come to after some of its keys: the sum of weights relative to 2^reference, and the row of out relative to 2^top.
struct SplitHalfRowState {
  float reference, sum;
  int32_t top;
};

// What the two products of a slice have in common. A slice is some matrices, rows and keys; its arrays count from its own first.
struct SplitHalfStage {
  BatchDims batch;
  Slice slice;
  Dropout dropout;
  Sequence sequence;
  void* weights;               // terms (2, matrices, rows, pitch), times 2^15; pitch: keys rounded up to 8
  SplitHalfSegment* segments;  // (matrices, keys / 64 rounded up, rows)
  SplitHalfFacts* facts;       // of query, by flat number; exact is set where a score is too large for a reference
};

struct SplitHalfScoresParams : SplitHalfStage {
  int64_t E;
  double scale;
  MatrixView mask;  // broadcasts to (N, L, S), float
  MaskType mask_type;
  int64_t key_group;
  const int32_t *query_exponents, *key_exponents;
};

struct SplitHalfValuesParams : SplitHalfStage {
  int64_t S, Ev;  // keys of all slices
  double factor;  // of the weights that dropout keeps
  int64_t value_group;
  const int32_t* value_exponents;
  const SplitHalfRowState* before;  // (matrices, rows), from the keys before the slice's
  SplitHalfRowState* after;
  MatrixView out;  // (N, L, Ev); holds the row relative to 2^top until all of its keys are done
  MatrixView lse;
};

// exact[n] = 1 where two half terms will not do for matrix n.
struct SplitHalfExactParams {
  int64_t N, E, key_group, value_group;
  double scale;
  const SplitHalfFacts *query, *key, *value;
  uint8_t* exact;
};

// query_terms: (2, matrices, rows, E rounded up to 8); the others likewise.
cudaError_t launch_split_half_scores(const SplitHalfScoresParams& params, void* query_terms, void* key_terms, cudaStream_t stream);
cudaError_t launch_split_half_values(const SplitHalfValuesParams& params, void* value_terms, cudaStream_t stream);
cudaError_t launch_split_half_exact(const SplitHalfExactParams& params, cudaStream_t stream);

cudaError_t split_half_forward(const ForwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
