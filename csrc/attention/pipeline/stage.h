// The params of a stage from those of the call. Pure host code.
#pragma once

#include "attention/pipeline/params.h"

namespace attention_ext {

// The stage's params as far as all stages have them; the rest is zero.
template <class Stage>
Stage stage_of(const ForwardParams& params, const Slice& slice) {
  Stage stage = {};
  stage.batch = params.batch;
  stage.slice = slice;
  stage.L = params.L;
  stage.dropout = params.dropout;
  stage.type = params.type;
  stage.sequence = params.sequence;
  return stage;
}

// Of a stage that makes a slice's scores, but for what becomes of them.
template <class Stage>
Stage scores_of(const ForwardParams& params, const Slice& slice) {
  Stage scores = stage_of<Stage>(params, slice);
  scores.E = params.E;
  scores.scale = params.scale;
  scores.query = params.query;
  scores.key = params.key;
  scores.mask = params.mask;
  scores.mask_type = params.mask_type;
  return scores;
}

inline Slice whole_slice(const ForwardParams& params) { return {0, params.N, 0, params.L, 0, params.S}; }

// delta of all rows.
inline RowDotParams row_dot_of(const BackwardParams& params, void* delta) {
  RowDotParams dot = stage_of<RowDotParams>(params, whole_slice(params));
  dot.Ev = params.Ev;
  dot.grad_out = params.grad_out;
  dot.out = params.out;
  dot.grad_lse = params.grad_lse;
  dot.delta = delta;
  return dot;
}

// The factor of the weights that dropout keeps.
inline double kept_factor(const Dropout& dropout) { return dropout.seed != nullptr ? dropout.keep_scale : 1.0; }

// A matrix stack in the workspace: `rows` x `cols` per matrix, counted from the slice's own first row and column.
inline MatrixView slice_view(void* data, int64_t rows, int64_t pitch, bool vector) {
  MatrixView view = {};
  view.data = data;
  view.slice_stride = rows * pitch;
  view.row_stride = pitch;
  view.col_stride = 1;
  view.group = 1;
  view.vector = vector;
  return view;
}

// mask_grad's share of a slice of whole rows, of which `score_grad` is dS. scratch: what nobody reads any more.
inline MaskGradParams mask_grad_of(const BackwardParams& params, const Slice& slice, const MatrixView& score_grad,
                                   void* scratch, int64_t scratch_bytes) {
  MaskGradParams mask = stage_of<MaskGradParams>(params, slice);
  mask.rows_kept = params.mask_grad.row_stride != 0;
  mask.cols_kept = params.mask_grad.col_stride != 0;
  mask.score_grad = score_grad;
  mask.mask_grad = params.mask_grad;
  mask.mask_type = params.mask_type == MaskType::kFloat ? DataType::kFloat : params.type;
  mask.sums = params.mask_sums;
  mask.scratch = scratch;
  mask.scratch_bytes = scratch_bytes;
  return mask;
}

// Whether an element of mask_grad has terms in several slices of so many matrices and rows.
inline bool mask_sums_span(const BackwardParams& params, int64_t batches, int64_t rows) {
  bool shared = false;
  for (int dim = 0; dim < params.batch.count; ++dim) shared = shared || params.mask_grad.batch_stride[dim] == 0;
  return (shared && batches < params.N) || (params.mask_grad.row_stride == 0 && rows < params.L);
}

}  // namespace attention_ext
