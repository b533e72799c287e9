// The backward of the pipeline by wgmma, on Hopper: one kernel for whole matrices, two for a slice where there is no room for that.
// Before them one makes what belongs to rows (row_values.h).
#pragma once

#include "attention/pipeline/params.h"

namespace attention_ext {

// From here on a row's rounded log-sum-exp may leave its probabilities off by more than they are rounded: they are summed, and made
// to sum to 1. Half a unit of float's last place is 6e-5 here, and a score this large is no better.
constexpr float kLargeLse = 1024.0f;

// fp16 keeps probabilities times this, so that 1 / S is no subnormal for any S that the kernel takes. bfloat16 needs none.
constexpr float weight_scale(DataType type) { return type == DataType::kHalf ? 256.0f : 1.0f; }
constexpr float weight_shift(DataType type) { return type == DataType::kHalf ? 8.0f : 0.0f; }  // log2 of it

// P = exp(scale * query . key + mask - lse) and dS = P * (keep * keep_scale * (grad_out . value) - delta) of a slice, P times
// weight_scale and, with dropout, times keep. Tiles that no row sees are left out.
struct ScoreGradientsParams : StageParams {
  int64_t E, Ev;
  double scale;
  MatrixView query;          // (N, L, E)
  MatrixView key;            // (N / group, S, E)
  MatrixView value;          // (N / group, S, Ev)
  MatrixView grad_out;       // (N, L, Ev)
  MatrixView mask;           // broadcasts to (N, L, S)
  MatrixView lse;            // (N, L), column unused
  MatrixView probabilities;  // slice (batch_count, row_count, col_count)
  MatrixView score_grad;     // the same
  MaskType mask_type;
  const float* delta;  // (N, L)
  const float* norm;   // (N, L), of rows with a large lse: factors of their probabilities
  int64_t places;      // of matrices in P and dS: the slice's i-th lies in place i % places
  unsigned* ticket;    // 0 before the launch and after it
};

// One of the three gradients: out = factor * A . B. Where it is made of several sums they go on in `sums`, as float, from the
// slice's first row or key on: for 128 of them after the other 8 columns at a time, of these 4 elements for each of 256 threads, as
// they lie in registers. null: there is one sum.
struct GradientOf {
  MatrixView out;
  int64_t width;  // columns, a multiple of 8
  double factor;
  float* sums;
  int64_t pitch;  // columns from 128 rows or keys to the next ones: those of dK and dV lie side by side
};

// dQ = scale * dS . key of the slice's rows; dK = scale * dS^T . query and dV = factor * P^T . grad_out of its keys, summed over
// the query heads of a key head, `sum_heads` at a time.
struct GradientsParams : StageParams {
  int64_t group, sum_heads;  // query heads per key head, and of a sum
  int64_t S;                 // keys of all slices
  MatrixView query;          // (N, L, E)
  MatrixView key;            // (N / group, S, E)
  MatrixView grad_out;       // (N, L, Ev)
  MatrixView probabilities;  // slice (batch_count, row_count, col_count)
  MatrixView score_grad;     // the same
  GradientOf of[3];          // in `type`, or float with wide_out
  bool of_rows, of_keys;     // whether to make dQ; dK and dV
  bool wide_out;
  unsigned* ticket;  // 0 before the launch and after it
  // Of each tile of dK and dV and warp: sums of the launch that it has added to `sums`. 0 before the launch and after it. null: the
  // launch has one sum of each.
  unsigned* added;
  int64_t places;  // as of scores
};

// Both for whole matrices in one launch. P and dS have places for the matrices of some heads, which are used again. A head here is
// `sum_heads` query heads: a key head with all of its own, or with some.
struct BackwardTurnsParams {
  ScoreGradientsParams scores;
  GradientsParams gradients;  // of rows and of keys, no sums
  int64_t ahead;              // heads whose scores are made before the first gradients
  unsigned* counters;         // 2 for each head, 0 before the launch
};

cudaError_t launch_score_gradients(const ScoreGradientsParams& params, cudaStream_t stream);
cudaError_t launch_gradients(const GradientsParams& params, cudaStream_t stream);
cudaError_t launch_backward_turns(const BackwardTurnsParams& params, cudaStream_t stream);

// As pipeline_backward and its company.
int64_t wgmma_backward_workspace(const BackwardParams& params);
bool wgmma_backward_sums_mask(const BackwardParams& params);
cudaError_t wgmma_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
