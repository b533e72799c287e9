// The pipeline's stages, one kernel each: their params and launchers, and the host drivers that run them slice by slice.
// A launcher returns its cudaError_t and never waits.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace attention_ext {

// What stage 1 writes: scores in the accumulator type; exp(score - lse) in the tensors' dtype; or, half types only,
// exp(score - reference of its segment) in the tensors' dtype with the segments' statistics.
enum class ScoresAs : int32_t { kScores, kProbabilities, kExponentials };

// What all stages have in common: the slice to work on, and its call.
struct StageParams {
  BatchDims batch;
  Slice slice;
  int64_t L;  // rows of all slices
  Dropout dropout;
  DataType type;
  Sequence sequence;
};

// Scores of one slice: scale * query . key, mask, causal.
struct QkScoresParams : StageParams {
  int64_t E;
  double scale;
  MatrixView query;       // (N, L, E)
  MatrixView key;         // (N / group, S, E)
  MatrixView mask;        // broadcasts to (N, L, S)
  MatrixView lse;         // (N, L), column unused; for probabilities
  const void* norm;       // (N, L) contiguous, accumulator type: factor of a row's probabilities; null: 1
  MatrixView out;         // slice (batch_count, row_count, col_count)
  MatrixView statistics;  // slice (batch_count, row_count, segments) of SegmentStatistics; for exponentials
  ScoresAs output;
  MaskType mask_type;
  bool write_hidden_tiles;  // fill tiles that no row sees with -inf instead of leaving them unwritten
};

// Rows of scores -> exp(score - row maximum) in `type`, the sum of those before rounding, and the log-sum-exp.
struct RowSoftmaxParams : StageParams {
  MatrixView scores;   // slice (batch_count, row_count, S), accumulator type
  MatrixView weights;  // slice (batch_count, row_count, S), `type`; may start at the same address as scores
  MatrixView row_sum;  // slice (batch_count, row_count), accumulator type, column unused
  MatrixView lse;      // (N, L), accumulator type, column unused
};

// Exponentials relative to their segments' references -> the same relative to the row's, the largest, in place; row sums,
// log-sum-exp.
struct SegmentSoftmaxParams : StageParams {
  MatrixView weights;     // slice (batch_count, row_count, col_count), half type
  MatrixView statistics;  // slice (batch_count, row_count, segments) of SegmentStatistics
  MatrixView row_sum;     // slice (batch_count, row_count), float, column unused
  MatrixView lse;         // (N, L), float, column unused
};

// weights . values * factor / row_sum: the attention output, and dQ = scale * dS . K.
struct ScoresValuesParams : StageParams {
  int64_t Ev;  // columns of values
  double factor;
  MatrixView weights;  // slice (batch_count, row_count, S), `type`
  MatrixView values;   // (N / group, S, Ev)
  MatrixView row_sum;  // slice (batch_count, row_count), accumulator type, column unused; data null: divide by nothing
  MatrixView out;      // (N, L, Ev), `type`, or the accumulator type with wide_out
  void* carry;  // half types, many keys: slice (batch_count, row_count, Ev rounded up to 4), float; null: one sum over all keys
  bool wide_out;
};

// delta[n, i] = sum over e of grad_out[n, i, e] * out[n, i, e], minus grad_lse[n, i]. Half types.
struct RowDotParams : StageParams {
  int64_t Ev;
  MatrixView grad_out;  // (N, L, Ev)
  MatrixView out;       // (N, L, Ev)
  MatrixView grad_lse;  // (N, L), column unused; data null: absent
  void* delta;          // (N, L) contiguous, float
};

// Makes the probabilities of whole rows sum to 1, where they do not: a large log-sum-exp, rounded to the accumulator type, leaves
// exp(score - lse) off by a factor common to the row. norm[n, i] is that factor, 1 where the sum is right within T's precision.
struct RowNormParams : StageParams {
  MatrixView probabilities;  // slice (batch_count, row_count, S), `type`
  void* norm;                // (N, L) contiguous, accumulator type
};

// dS = P * (keep * keep_scale * (grad_out . value^T) - delta). With dropout, P is overwritten with keep * P. `only_weight_grad`:
// neither: score_grad becomes keep * keep_scale * (grad_out . value^T).
struct ScoreGradParams : StageParams {
  int64_t Ev;
  MatrixView grad_out;       // (N, L, Ev)
  MatrixView value;          // (N / group, S, Ev)
  MatrixView probabilities;  // slice (batch_count, row_count, col_count), `type`
  MatrixView score_grad;     // slice (batch_count, row_count, col_count), `type`
  const void* delta;         // (N, L) contiguous, accumulator type
  bool only_weight_grad;
};

// float and double, whole rows: delta = sum of P * dP over the row, minus grad_lse, then dS = P * (dP - delta) over dP in place;
// with dropout P is overwritten with keep * P.
struct RowDeltaParams : StageParams {
  MatrixView probabilities;  // slice (batch_count, row_count, S)
  MatrixView score_grad;     // the same; dP on the way in
  MatrixView grad_lse;       // (N, L), column unused; data null: absent
  void* delta;               // (N, L) contiguous
};

// out = factor * sum over the group's query heads of left^T . right: dV from P and grad_out, dK from dS and query. The sum of a key
// head goes on from slice to slice where its query heads or rows lie in several. A slice with some of the rows holds one matrix.
struct KeyValueGradParams : StageParams {
  int64_t group;      // query heads per key head
  int64_t width;      // columns of right and out: E or Ev
  int64_t row_parts;  // 0: a CTA sums over the slice's query heads of a key head. Else the sum is made in parts: so many a head
  double factor;
  MatrixView left;   // slice (batch_count, row_count, col_count), `type`
  MatrixView right;  // (N, L, width)
  MatrixView out;    // (N / group, S, width), `type`, or the accumulator type with wide_out
  void* parts;       // (batch_count, row_parts, col_count, width rounded up to 4), accumulator type
  void* sums;        // from slice to slice: (col_count, width rounded up to 4), accumulator type; null: no sum spans slices
  bool wide_out;
};

// mask_grad[...] = score_grad summed over the batch dims, rows and columns along which the mask has size 1. Slices hold whole rows
// and follow one another; the last one that has a term of an element rounds it.
struct MaskGradParams : StageParams {
  bool rows_kept;         // the mask has L rows (else 1)
  bool cols_kept;         // the mask has S columns (else 1)
  DataType mask_type;     // of mask_grad
  MatrixView score_grad;  // slice (batch_count, row_count, col_count), `type`
  MatrixView mask_grad;   // mask's own shape; batch_stride 0 along a dim of size 1
  void* sums;             // laid out as mask_grad, accumulator type: from slice to slice; null: no sum spans slices
  void* scratch;          // where CTAs that share sums leave their parts; the fewer bytes, the fewer CTAs
  int64_t scratch_bytes;
  // (batch_count, row_count / 64 rounded up, row_stride / 64); not null: score_grad is half terms, 64 high and 64 low ones in the
  // place of 64 floats of a row, in units of 2^exponent of their 64 x 64. kTileOfFloats: floats after all.
  const int32_t* score_exponents;
};

// One kernel each.
cudaError_t launch_qk_scores(const QkScoresParams& params, cudaStream_t stream);
cudaError_t launch_row_softmax(const RowSoftmaxParams& params, cudaStream_t stream);
cudaError_t launch_segment_softmax(const SegmentSoftmaxParams& params, cudaStream_t stream);
cudaError_t launch_scores_values(const ScoresValuesParams& params, cudaStream_t stream);

cudaError_t launch_row_dot(const RowDotParams& params, cudaStream_t stream);
cudaError_t launch_row_norm(const RowNormParams& params, cudaStream_t stream);
cudaError_t launch_row_delta(const RowDeltaParams& params, cudaStream_t stream);
cudaError_t launch_score_grad(const ScoreGradParams& params, cudaStream_t stream);
cudaError_t launch_key_value_grad(const KeyValueGradParams& params, cudaStream_t stream);
cudaError_t launch_mask_grad(const MaskGradParams& params, cudaStream_t stream);

// Host drivers: slices so that the workspace stays under the cap, except where a single row (forward), or two numbers of each row
// and a row tile by 8 keys (backward), need more. The backward takes at least one query row.
cudaError_t pipeline_forward(const ForwardParams& params, cudaStream_t stream);
int64_t pipeline_backward_workspace(const BackwardParams& params);
bool pipeline_backward_sums_mask(const BackwardParams& params);  // whether it wants mask_sums: a sum spans slices
cudaError_t pipeline_backward(const BackwardParams& params, cudaStream_t stream);

// The forward's driver for other products than those that run on every card.
struct ForwardProducts {
  cudaError_t (*scores)(const QkScoresParams& params, cudaStream_t stream);      // as exponentials for half types
  cudaError_t (*values)(const ScoresValuesParams& params, cudaStream_t stream);  // carries nothing if `wgmma`
  bool wgmma;                                                                    // decides on slices: plan/slices.h
};
cudaError_t run_forward(const ForwardParams& params, const ForwardProducts& products, cudaStream_t stream);

}  // namespace attention_ext
