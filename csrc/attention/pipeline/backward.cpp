// Backward driver: probabilities are recomputed from the log-sum-exp, slice by slice, so that the workspace stays under
// its cap whatever the shape. Pure host code; no atomics anywhere, so the result is the same bits every time.
//
//   delta = sum(dO * O) - grad_lse        P = exp(scale * Q . K^T + mask - lse)
//   dS = P * (keep / (1 - p) * (dO . V^T) - delta)
//   dQ = scale * dS . K      dK = scale * dS^T . Q      dV = (keep * P)^T . dO / (1 - p)      mask_grad = sum of dS
//
// If P and dS of a matrix fit, one joint pass makes everything from slices of whole matrices. Else pass A makes dQ and mask_grad
// from slices of rows and pass B makes dK and dV from slices of keys, of one matrix after another.
// A key head's dK and dV are one sum over its query heads and their rows. Where these lie in several slices, the sum is carried
// from one to the next; where they are too few for the card or too many for Tensor Cores to sum (arithmetic.h), it is made in
// parts.
// Workspace: delta and norm, each (N, L) in the accumulator type; then of a slice P and dS, each (batches, rows, pitch) in the
// tensors' dtype; what is carried of dQ, dK and dV; and parts of dV, then of dK.
#include <numeric>

#include "attention/pipeline/stage.h"
#include "core/arithmetic.h"

namespace attention_ext {
namespace {

constexpr int64_t kKeyGranule = 8;  // of slices of keys: dropout drops four at a time, and a pitch below 8 would save nothing
constexpr int64_t kPartsShare = 8;  // one in so many bytes may go to parts of dK and dV that only speed them up

struct SliceShape {
  int64_t batches, rows, cols;
  int64_t array_bytes(int64_t element) const {
    return round_up(batches * rows * slice_pitch(cols) * element, kWorkspaceAlignment);
  }
};

// Of one of the two arrays of a number for each row.
int64_t row_values_bytes(const BackwardParams& params) { return params.N * params.L * accumulator_bytes(params.type); }

// How a pass makes dK or dV, `width` columns of sums over `group` query heads.
struct KeyValueSums {
  int64_t row_parts;  // of the launch (params.h)
  int64_t parts_bytes;
  int64_t carry_bytes, carry_at;  // of a key head's sums from slice to slice; 0: none lies in several
};

// Direct sums where they keep the card busy, else parts; those that are not needed within `room` bytes.
KeyValueSums plan_sums(const BackwardParams& params, int64_t group, int64_t width, const SliceShape& shape, int64_t room) {
  // CTAs between one and two an SM of an H100; rows whose product is worth a CTA of its own, the sum of parts included.
  constexpr int64_t kEnoughCtas = 192, kFewRows = 512;
  const int64_t most_rows = element_bytes(params.type) == 2 ? kPartKeys : group * params.L;
  const int64_t heads = std::min(group, shape.batches);  // of a key head, in a slice
  const int64_t tiles = ceil_div(shape.cols, kSliceTile) * ceil_div(width, kSliceTile);
  const int64_t row_bytes = round_up(width, 4) * accumulator_bytes(params.type),
                part_bytes = shape.batches * shape.cols * row_bytes;
  const bool whole = shape.batches % group == 0;  // groups
  const bool enough = shape.batches / heads * tiles >= kEnoughCtas || heads * shape.rows < 2 * kFewRows;
  KeyValueSums sums = {};
  if (!enough || heads * shape.rows > most_rows || (!whole && group % shape.batches != 0)) {
    const int64_t wanted = std::min({kEnoughCtas / std::max(shape.batches * tiles, int64_t{1}), shape.rows / kFewRows,
                                     room / std::max(part_bytes, int64_t{1})});
    sums.row_parts = std::max({wanted, ceil_div(shape.rows, most_rows), int64_t{1}});
    if (sums.row_parts == 1 && heads == 1) sums.row_parts = 0;
  }
  sums.parts_bytes = sums.row_parts * part_bytes;
  sums.carry_bytes = whole && shape.rows == params.L ? 0 : round_up(shape.cols * row_bytes, kWorkspaceAlignment);
  return sums;
}

struct BackwardPlan {
  bool joint;
  SliceShape by_rows;       // joint pass or pass A
  SliceShape by_keys;       // pass B
  KeyValueSums key, value;  // of the joint pass or pass B
  int64_t arrays_at;        // bytes: where P begins, after delta and norm
  int64_t carry_at;         // where dQ's sums over many keys are carried, after P and dS
  int64_t parts_at;         // where parts of dK and dV lie, after what is carried of them
  int64_t bytes;
};

// What the joint pass or pass B has next to P and dS, from byte `at` on. Returns where it ends.
int64_t plan_key_value(const BackwardParams& params, const SliceShape& shape, int64_t room, int64_t at, BackwardPlan& plan) {
  plan.key = plan_sums(params, params.key_group, params.E, shape, room);
  plan.value = plan_sums(params, params.value_group, params.Ev, shape, room);
  plan.key.carry_at = at;
  plan.value.carry_at = at + plan.key.carry_bytes;
  plan.parts_at = plan.value.carry_at + plan.value.carry_bytes;
  return plan.parts_at + std::max(plan.key.parts_bytes, plan.value.parts_bytes);
}

// The joint pass: as many whole matrices as there is room for, whole groups where that takes few of them away. False: not one.
bool plan_joint(const BackwardParams& params, int64_t bytes_for_slices, int64_t most, BackwardPlan& plan) {
  const int64_t group = std::lcm(params.key_group, params.value_group), element = element_bytes(params.type);
  const int64_t carry = params.L * carry_row_bytes(params.S, params.E, element);
  while (most > 0) {
    int64_t batches = even_piece(params.N, most, 1, 1);
    const int64_t whole = batches < group ? 0 : even_piece(params.N / group, batches / group, 1, 1) * group;
    if (4 * whole >= 3 * batches) batches = whole;
    plan.by_rows = {batches, params.L, params.S};
    plan.carry_at = plan.arrays_at + 2 * plan.by_rows.array_bytes(element);
    const int64_t key_value_at = round_up(plan.carry_at + batches * carry, kWorkspaceAlignment);
    plan.bytes = plan_key_value(params, plan.by_rows, bytes_for_slices / kPartsShare, key_value_at, plan);
    if (plan.bytes - plan.arrays_at <= bytes_for_slices) return true;
    most = batches - 1;
  }
  return false;
}

// Pass B: as many rows of a matrix as may be summed at once, and as many keys as there is room for; but fewer rows rather than less
// than kFewKeys. At least one tile of rows and eight keys, whatever the cap.
void plan_by_keys(const BackwardParams& params, int64_t bytes_for_slices, BackwardPlan& plan) {
  constexpr int64_t kFewKeys = 4 * kSliceTile;
  const int64_t element = element_bytes(params.type), score_bytes = 2 * element;  // of one row and one key: P and dS
  const int64_t carry = (round_up(params.E, 4) + round_up(params.Ev, 4)) * accumulator_bytes(params.type);  // per key
  const int64_t room = bytes_for_slices / kPartsShare;
  const int64_t budget = std::max<int64_t>(bytes_for_slices - room - 4 * kWorkspaceAlignment, 0);

  int64_t rows = element == 2 ? std::min(params.L, kPartKeys) : params.L;
  const int64_t keys = std::min(slice_pitch(params.S), kFewKeys);
  if (rows * keys * score_bytes > budget) rows = (budget - keys * carry) / (keys * score_bytes);
  if (rows < params.L) rows = even_piece(params.L, std::max(rows, kSliceTile), kSliceTile, kSliceTile);
  const bool carried = rows < params.L || params.key_group > 1 || params.value_group > 1;
  const int64_t bytes_of_key = rows * score_bytes + (carried ? carry : 0);
  const int64_t cols = std::max(budget / bytes_of_key / kKeyGranule * kKeyGranule, kKeyGranule);
  plan.by_keys = {1, rows, even_piece(params.S, cols, kKeyGranule, kSliceTile)};
  const int64_t at = plan.arrays_at + 2 * plan.by_keys.array_bytes(element);
  plan.bytes = std::max(plan.bytes, plan_key_value(params, plan.by_keys, room, at, plan));
}

BackwardPlan plan_backward(const BackwardParams& params) {
  const int64_t element = element_bytes(params.type);
  // delta and norm count towards the cap, of which slices may have a quarter in any case, and a 64th is left for what the allocator
  // may add to a large block.
  const int64_t cap = std::max<int64_t>(params.workspace_bytes, 0), row_values = 2 * row_values_bytes(params);
  const int64_t bytes_for_slices = std::max(cap - row_values - cap / 64, cap / 4);
  const int64_t budget = std::max<int64_t>(bytes_for_slices - 2 * kWorkspaceAlignment, 0) / (2 * element);  // elements of P
  const int64_t carry = carry_row_bytes(params.S, params.E, element);
  const int64_t rows_in_budget = budget / (slice_pitch(params.S) + carry / (2 * element));
  BackwardPlan plan = {};
  plan.arrays_at = round_up(row_values, kWorkspaceAlignment);
  plan.joint = plan_joint(params, bytes_for_slices, rows_in_budget / params.L, plan);
  if (plan.joint) return plan;
  if (rows_in_budget >= params.L) {
    plan.by_rows = {even_piece(params.N, rows_in_budget / params.L, 1, 1), params.L, params.S};
  } else {
    plan.by_rows = {1, even_piece(params.L, rows_in_budget, 1, kSliceTile), params.S};
  }
  plan.carry_at = plan.arrays_at + 2 * plan.by_rows.array_bytes(element);
  plan.bytes = plan.carry_at + plan.by_rows.batches * plan.by_rows.rows * carry;
  plan_by_keys(params, bytes_for_slices, plan);
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
  return launch_row_dot(row_dot_of(params, params.workspace), stream);
}

// P and dS of a slice. Whole rows (a slice of pass A) find the rows' norms, slices of keys (pass B) use them.
cudaError_t make_score_grad(const BackwardParams& params, const Arrays& arrays, const Slice& slice, bool whole_rows,
                            cudaStream_t stream) {
  QkScoresParams scores = scores_of<QkScoresParams>(params, slice);
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
  return launch_mask_grad(mask_grad_of(params, slice, arrays.score_grad, arrays.probabilities.data,
                                       plan.by_rows.array_bytes(element_bytes(params.type))),
                          stream);
}

// A slice's share of dV and dK.
cudaError_t make_key_value_grad(const BackwardParams& params, const BackwardPlan& plan, const Arrays& arrays,
                                const Slice& slice, cudaStream_t stream) {
  char* workspace = static_cast<char*>(params.workspace);
  const auto place = [&](const KeyValueSums& sums, KeyValueGradParams& stage) {
    stage.row_parts = sums.row_parts;
    stage.parts = workspace + plan.parts_at;
    stage.sums = sums.carry_bytes > 0 ? workspace + sums.carry_at : nullptr;
  };
  KeyValueGradParams value = stage_of<KeyValueGradParams>(params, slice);
  value.group = params.value_group;
  value.width = params.Ev;
  value.factor = kept_factor(params.dropout);
  value.left = arrays.probabilities;
  value.right = params.grad_out;
  value.out = params.grad_value;
  value.wide_out = params.wide_grads;
  place(plan.value, value);
  const cudaError_t status = launch_key_value_grad(value, stream);
  if (status != cudaSuccess) return status;

  KeyValueGradParams key = value;
  key.group = params.key_group;
  key.width = params.E;
  key.factor = params.scale;
  key.left = arrays.score_grad;
  key.right = params.query;
  key.out = params.grad_key;
  place(plan.key, key);
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
  for (int64_t col = 0; col < params.S; col += shape.cols) {
    for (int64_t batch = 0; batch < params.N; batch += shape.batches) {
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
  return mask_sums_span(params, plan.by_rows.batches, plan.by_rows.rows);
}

cudaError_t pipeline_backward(const BackwardParams& params, cudaStream_t stream) {
  const BackwardPlan plan = plan_backward(params);
  cudaError_t status = make_delta(params, stream);
  if (status == cudaSuccess) status = pass_by_rows(params, plan, stream);
  if (status == cudaSuccess && !plan.joint) status = pass_by_keys(params, plan, stream);
  return status;
}

}  // namespace attention_ext
