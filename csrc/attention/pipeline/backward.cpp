// Backward driver: probabilities are recomputed from the log-sum-exp, slice by slice, so that the workspace stays under
// its cap whatever the shape. Pure host code; no atomics anywhere, so the result is the same bits every time.
//
//   delta = sum(dO * O) - grad_lse        P = exp(scale * Q . K^T + mask - lse)
//   dS = P * (keep / (1 - p) * (dO . V^T) - delta)
//   dQ = scale * dS . K      dK = scale * dS^T . Q      dV = (keep * P)^T . dO / (1 - p)      mask_grad = sum of dS
//
// If P and dS of all query heads of a key head fit, one joint pass makes everything. Else pass A makes dQ and mask_grad
// from slices of rows and pass B makes dK and dV from slices of keys, over all heads of the group and all query rows: in one sum,
// or, where they are too many for the workspace or for Tensor Cores to sum (arithmetic.h), in slices of rows that carry it from one
// to the next.
// Workspace: delta and norm, each (N, L) in the accumulator type; then of a slice P and dS, each (batches, rows, pitch) in the
// tensors' dtype, and what is carried.
#include <numeric>

#include "attention/pipeline/stage.h"
#include "core/arithmetic.h"

namespace attention_ext {
namespace {

constexpr int64_t kKeyGranule = 8;  // of slices of keys: dropout draws four at a time, and a pitch below 8 would save nothing

struct SliceShape {
  int64_t batches, rows, cols;
  int64_t array_bytes(int64_t element) const {
    return round_up(batches * rows * slice_pitch(cols) * element, kWorkspaceAlignment);
  }
};

// Query rows whose share of dK and dV is one sum, over them and the heads of a group: half types' may not be long (arithmetic.h).
int64_t most_summed_rows(const BackwardParams& params) {
  if (element_bytes(params.type) > 2) return params.L;
  return std::max(kPartKeys / std::max(params.key_group, params.value_group) / kSliceTile * kSliceTile, kSliceTile);
}

// Of one of the two arrays of a number for each row.
int64_t row_values_bytes(const BackwardParams& params) { return params.N * params.L * accumulator_bytes(params.type); }

struct BackwardPlan {
  bool joint;
  SliceShape by_rows;      // joint pass or pass A
  SliceShape by_keys;      // pass B
  int64_t arrays_at;       // bytes: where P begins, after delta and norm
  int64_t carry_at;        // where dQ's sums over many keys are carried, after P and dS
  int64_t key_carry_at;    // where pass B carries dK's sums over slices of rows
  int64_t value_carry_at;  // and dV's
  int64_t bytes;
};

// Pass B: all heads of a group, as many of their rows as may be summed at once, and as many keys as there is room for; but fewer
// rows rather than less than kFewKeys. At least one tile of rows and eight keys, whatever the cap.
void plan_by_keys(const BackwardParams& params, int64_t group, int64_t bytes_for_slices, BackwardPlan& plan) {
  constexpr int64_t kFewKeys = 4 * kSliceTile;
  const int64_t score_bytes = 2 * element_bytes(params.type) * group;  // of one row and one key: P and dS
  const int64_t accumulator = accumulator_bytes(params.type);
  const int64_t key_carry = group / params.key_group * round_up(params.E, 4) * accumulator;  // bytes per key
  const int64_t value_carry = group / params.value_group * round_up(params.Ev, 4) * accumulator;
  const int64_t budget = std::max<int64_t>(bytes_for_slices - 4 * kWorkspaceAlignment, 0);

  int64_t rows = std::min(params.L, most_summed_rows(params));
  const int64_t keys = std::min(slice_pitch(params.S), kFewKeys);
  if (rows * keys * score_bytes > budget) rows = (budget - keys * (key_carry + value_carry)) / (keys * score_bytes);
  if (rows < params.L) rows = even_piece(params.L, std::max(rows, kSliceTile), kSliceTile, kSliceTile);
  const bool in_parts = rows < params.L;
  const int64_t bytes_of_key = rows * score_bytes + (in_parts ? key_carry + value_carry : 0);
  const int64_t cols = std::max(budget / bytes_of_key / kKeyGranule * kKeyGranule, kKeyGranule);
  plan.by_keys = {group, rows, even_piece(params.S, cols, kKeyGranule, kSliceTile)};
  plan.key_carry_at = plan.arrays_at + 2 * plan.by_keys.array_bytes(element_bytes(params.type));
  plan.value_carry_at = plan.key_carry_at + (in_parts ? round_up(plan.by_keys.cols * key_carry, kWorkspaceAlignment) : 0);
  plan.bytes = std::max(plan.bytes, plan.value_carry_at + (in_parts ? plan.by_keys.cols * value_carry : 0));
}

BackwardPlan plan_backward(const BackwardParams& params) {
  const int64_t element = element_bytes(params.type);
  const int64_t group = std::lcm(params.key_group, params.value_group);  // that slices of whole groups are multiples of
  // delta and norm count towards the cap, of which slices may have a quarter in any case, and a 64th is left for what the allocator
  // may add to a large block.
  const int64_t cap = std::max<int64_t>(params.workspace_bytes, 0), row_values = 2 * row_values_bytes(params);
  const int64_t bytes_for_slices = std::max(cap - row_values - cap / 64, cap / 4);
  const int64_t budget = std::max<int64_t>(bytes_for_slices - 2 * kWorkspaceAlignment, 0) / (2 * element);  // elements of P
  const int64_t carry = carry_row_bytes(params.S, params.E, element);
  const int64_t rows_in_budget = budget / (slice_pitch(params.S) + carry / (2 * element));
  BackwardPlan plan = {};
  plan.arrays_at = round_up(row_values, kWorkspaceAlignment);
  plan.joint = rows_in_budget / params.L >= group && params.L <= most_summed_rows(params);
  if (plan.joint) {
    plan.by_rows = {even_piece(params.N / group, rows_in_budget / (params.L * group), 1, 1) * group, params.L, params.S};
  } else if (rows_in_budget >= params.L) {
    plan.by_rows = {even_piece(params.N, rows_in_budget / params.L, 1, 1), params.L, params.S};
  } else {
    plan.by_rows = {1, even_piece(params.L, rows_in_budget, 1, kSliceTile), params.S};
  }
  plan.carry_at = plan.arrays_at + 2 * plan.by_rows.array_bytes(element);
  plan.bytes = plan.carry_at + plan.by_rows.batches * plan.by_rows.rows * carry;
  if (!plan.joint) plan_by_keys(params, group, bytes_for_slices, plan);
  return plan;
}

// Where a pass finds what it works on in the workspace.
struct Arrays {
  void *delta, *norm;
  MatrixView probabilities, score_grad;
};

Arrays arrays_of(const BackwardParams& params, const BackwardPlan& plan, const SliceShape& shape) {
  char *workspace = static_cast<char*>(params.workspace), *arrays = workspace + plan.arrays_at;
  const int64_t pitch = slice_pitch(shape.cols), bytes = shape.array_bytes(element_bytes(params.type));
  return {workspace, workspace + row_values_bytes(params), slice_view(arrays, shape.rows, pitch, true),
          slice_view(arrays + bytes, shape.rows, pitch, true)};
}

// Half types: delta of all rows. float and double take it from whole rows of pass A.
cudaError_t make_delta(const BackwardParams& params, cudaStream_t stream) {
  if (element_bytes(params.type) > 2) return cudaSuccess;
  RowDotParams dot = stage_of<RowDotParams>(params, {0, params.N, 0, params.L, 0, params.S});
  dot.Ev = params.Ev;
  dot.grad_out = params.grad_out;
  dot.out = params.out;
  dot.grad_lse = params.grad_lse;
  dot.delta = params.workspace;
  return launch_row_dot(dot, stream);
}

// P and dS of a slice. Whole rows (a slice of pass A) find the rows' norms, slices of keys (pass B) use them.
cudaError_t make_score_grad(const BackwardParams& params, const Arrays& arrays, const Slice& slice, bool whole_rows,
                            cudaStream_t stream) {
  QkScoresParams scores = scores_of(params, slice);
  scores.lse = params.lse;
  scores.norm = whole_rows ? nullptr : arrays.norm;
  scores.output = ScoresAs::kProbabilities;
  scores.out = arrays.probabilities;
  cudaError_t status = launch_qk_scores(scores, stream);
  if (status != cudaSuccess) return status;

  if (whole_rows) {
    RowNormParams norm = stage_of<RowNormParams>(params, slice);
    norm.probabilities = arrays.probabilities;
    norm.norm = arrays.norm;
    status = launch_row_norm(norm, stream);
    if (status != cudaSuccess) return status;
  }

  ScoreGradParams grad = stage_of<ScoreGradParams>(params, slice);
  grad.Ev = params.Ev;
  grad.grad_out = params.grad_out;
  grad.value = params.value;
  grad.probabilities = arrays.probabilities;
  grad.score_grad = arrays.score_grad;
  grad.delta = arrays.delta;
  grad.only_weight_grad = whole_rows && element_bytes(params.type) > 2;
  status = launch_score_grad(grad, stream);
  if (status != cudaSuccess || !grad.only_weight_grad) return status;

  RowDeltaParams delta = stage_of<RowDeltaParams>(params, slice);
  delta.probabilities = arrays.probabilities;
  delta.score_grad = arrays.score_grad;
  delta.grad_lse = params.grad_lse;
  delta.delta = arrays.delta;
  return launch_row_delta(delta, stream);
}

// dQ of a slice of rows.
cudaError_t make_query_grad(const BackwardParams& params, const BackwardPlan& plan, const Arrays& arrays, const Slice& slice,
                            cudaStream_t stream) {
  ScoresValuesParams query = stage_of<ScoresValuesParams>(params, slice);
  query.Ev = params.E;
  query.factor = params.scale;
  query.weights = arrays.score_grad;
  query.values = params.key;
  if (carry_row_bytes(params.S, params.E, element_bytes(params.type)) > 0) {
    query.carry = static_cast<char*>(params.workspace) + plan.carry_at;
  }
  query.out = params.grad_query;
  query.wide_out = params.wide_grads;
  return launch_scores_values(query, stream);
}

// The last thing of a slice: its probabilities, which nobody reads any more, become scratch.
cudaError_t make_mask_grad(const BackwardParams& params, const BackwardPlan& plan, const Arrays& arrays, const Slice& slice,
                           cudaStream_t stream) {
  if (params.mask_grad.data == nullptr) return cudaSuccess;
  MaskGradParams mask = stage_of<MaskGradParams>(params, slice);
  mask.rows_kept = params.mask_grad.row_stride != 0;
  mask.cols_kept = params.mask_grad.col_stride != 0;
  mask.score_grad = arrays.score_grad;
  mask.mask_grad = params.mask_grad;
  mask.mask_type = params.mask_type == MaskType::kFloat ? DataType::kFloat : params.type;
  mask.sums = params.mask_sums;
  mask.scratch = arrays.probabilities.data;
  mask.scratch_bytes = plan.by_rows.array_bytes(element_bytes(params.type));
  return launch_mask_grad(mask, stream);
}

// dV and dK of a slice of keys that holds whole groups, or a slice of rows' share of them.
cudaError_t make_key_value_grad(const BackwardParams& params, const BackwardPlan& plan, const Arrays& arrays,
                                const Slice& slice, cudaStream_t stream) {
  const auto carry = [&](int64_t at) {
    return slice.row_count < params.L ? static_cast<char*>(params.workspace) + at : nullptr;
  };
  KeyValueGradParams value = stage_of<KeyValueGradParams>(params, slice);
  value.group = params.value_group;
  value.width = params.Ev;
  value.factor = kept_factor(params.dropout);
  value.left = arrays.probabilities;
  value.right = params.grad_out;
  value.out = params.grad_value;
  value.carry = carry(plan.value_carry_at);
  value.wide_out = params.wide_grads;
  const cudaError_t status = launch_key_value_grad(value, stream);
  if (status != cudaSuccess) return status;

  KeyValueGradParams key = value;
  key.group = params.key_group;
  key.width = params.E;
  key.factor = params.scale;
  key.left = arrays.score_grad;
  key.right = params.query;
  key.out = params.grad_key;
  key.carry = carry(plan.key_carry_at);
  return launch_key_value_grad(key, stream);
}

// The joint pass, or pass A where key gradients are made elsewhere.
cudaError_t pass_by_rows(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream) {
  const SliceShape& shape = plan.by_rows;
  const Arrays arrays = arrays_of(params, plan, shape);
  for (int64_t batch = 0; batch < params.N; batch += shape.batches) {
    for (int64_t row = 0; row < params.L; row += shape.rows) {
      const Slice slice = {batch,   std::min(shape.batches, params.N - batch), row, std::min(shape.rows, params.L - row), 0,
                           params.S};
      cudaError_t status = make_score_grad(params, arrays, slice, true, stream);
      if (status == cudaSuccess) status = make_query_grad(params, plan, arrays, slice, stream);
      if (status == cudaSuccess && plan.joint) status = make_key_value_grad(params, plan, arrays, slice, stream);
      if (status == cudaSuccess) status = make_mask_grad(params, plan, arrays, slice, stream);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

cudaError_t pass_by_keys(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream) {
  const SliceShape& shape = plan.by_keys;
  const Arrays arrays = arrays_of(params, plan, shape);
  for (int64_t batch = 0; batch < params.N; batch += shape.batches) {
    for (int64_t col = 0; col < params.S; col += shape.cols) {
      for (int64_t row = 0; row < params.L; row += shape.rows) {
        const Slice slice = {
            batch, shape.batches, row, std::min(shape.rows, params.L - row), col, std::min(shape.cols, params.S - col)};
        cudaError_t status = make_score_grad(params, arrays, slice, false, stream);
        if (status == cudaSuccess) status = make_key_value_grad(params, plan, arrays, slice, stream);
        if (status != cudaSuccess) return status;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace

int64_t pipeline_backward_workspace(const BackwardParams& params) { return plan_backward(params).bytes; }

bool pipeline_backward_sums_mask(const BackwardParams& params) {
  const BackwardPlan plan = plan_backward(params);
  bool shared = false;
  for (int dim = 0; dim < params.batch.count; ++dim) shared = shared || params.mask_grad.batch_stride[dim] == 0;
  return (shared && plan.by_rows.batches < params.N) || (params.mask_grad.row_stride == 0 && plan.by_rows.rows < params.L);
}

cudaError_t pipeline_backward(const BackwardParams& params, cudaStream_t stream) {
  const BackwardPlan plan = plan_backward(params);
  cudaError_t status = make_delta(params, stream);
  if (status == cudaSuccess) status = pass_by_rows(params, plan, stream);
  if (status == cudaSuccess && !plan.joint) status = pass_by_keys(params, plan, stream);
  return status;
}

}  // namespace attention_ext
