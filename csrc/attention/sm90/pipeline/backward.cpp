// Backward driver of the pipeline by wgmma. What pipeline/backward.cpp does for every card, by two kernels a slice: probabilities
// and dS (score_gradients.cu), then everything that is a product with them (gradients.cu). Pure host code; no atomics anywhere.
//
// If P and dS of a matrix fit, one joint pass makes everything from slices of whole matrices. Else pass A makes dQ and mask_grad
// from slices of rows, and pass B dK and dV from slices of keys. A key head's dK and dV are one sum over its query heads and their
// rows; where these lie in several slices, it is carried from one to the next.
// Workspace: delta and norm, (N, L) in float; then of a slice P and dS, (batches, rows, pitch) in the tensors' dtype; the sums of
// its rows of P, (batches, rows, column tiles) in float; and what is carried of dK and dV.
#include "attention/sm90/pipeline/backward.h"

#include "attention/pipeline/stage.h"
#include "core/arithmetic.h"
#include "plan/slices.h"

namespace attention_ext {
namespace {

constexpr int64_t kElement = 2;      // bytes of a half type
constexpr int64_t kKeyGranule = 16;  // of slices of keys: masks of a byte a key are read 16 bytes at a time

struct SliceShape {
  int64_t batches, rows, cols;
  int64_t array_bytes() const { return round_up(batches * rows * slice_pitch(cols) * kElement, kWorkspaceAlignment); }
  int64_t sums_bytes() const { return round_up(batches * rows * ceil_div(cols, kWgmmaTileCols) * 4, kWorkspaceAlignment); }
  int64_t bytes() const { return 2 * array_bytes() + sums_bytes(); }
};

struct Plan {
  bool joint;
  SliceShape by_rows;  // joint pass or pass A
  SliceShape by_keys;  // pass B
  int64_t arrays_at;   // bytes: where P begins, after delta and norm
  int64_t carry_at;    // of the joint pass or pass B; 0: no sum spans slices
  int64_t bytes;
};

int64_t row_values_bytes(const BackwardParams& params) { return params.N * params.L * 4; }

// Of dK and dV of so many keys.
int64_t carry_bytes(const BackwardParams& params, int64_t keys) { return keys * (params.E + params.Ev) * 4; }

// The largest divisor of a group that is at most so many.
int64_t part_of_group(int64_t group, int64_t most) {
  int64_t part = std::max<int64_t>(std::min(group, most), 1);
  while (group % part != 0) --part;
  return part;
}

// As many whole matrices as there is room for: whole groups or an equal part of one, of which no sum gets too long.
bool plan_joint(const BackwardParams& params, int64_t room, Plan& plan) {
  const int64_t group = params.key_group;
  const auto fits = [&](int64_t batches) {
    plan.by_rows = {batches, params.L, params.S};
    const bool carried = batches < group;
    plan.carry_at = carried ? plan.arrays_at + plan.by_rows.bytes() : 0;
    plan.bytes = plan.arrays_at + plan.by_rows.bytes() + (carried ? carry_bytes(params, params.S) : 0);
    return plan.bytes - plan.arrays_at <= room;
  };
  if (params.L > kPartKeys) return false;
  const int64_t most = room / SliceShape{1, params.L, params.S}.bytes();
  if (most >= group && group * params.L <= kPartKeys) {
    return fits(even_piece(params.N / group, most / group, 1, 1) * group);
  }
  for (int64_t part = part_of_group(group, std::min(most, kPartKeys / params.L)); most > 0;
       part = part_of_group(group, part - 1)) {
    if (fits(part)) return true;
    if (part == 1) return false;
  }
  return false;
}

// Pass B: all rows of as many query heads of a group as leave room for enough keys; else as many rows. At least one tile of rows
// and 16 keys, whatever the room.
void plan_by_keys(const BackwardParams& params, int64_t room, Plan& plan) {
  constexpr int64_t kFewKeys = 4 * kWgmmaTileCols, kScoreBytes = 2 * kElement;
  const int64_t keys = std::min(slice_pitch(params.S), kFewKeys);
  room = std::max<int64_t>(room - 4 * kWorkspaceAlignment, 0);
  const int64_t rows_of_few = (room - carry_bytes(params, keys)) / (keys * kScoreBytes);  // that fit next to a few keys
  int64_t rows = std::min({params.L, kPartKeys, rows_of_few}), heads = 1;
  if (rows == params.L) {
    heads = part_of_group(params.key_group, std::min(rows_of_few, kPartKeys) / rows);
  } else {
    rows = even_piece(params.L, std::max(rows, kSliceTile), kSliceTile, kSliceTile);
  }
  const bool carried = rows < params.L || heads < params.key_group;
  const int64_t bytes_of_key = heads * rows * kScoreBytes + (carried ? carry_bytes(params, 1) : 0);
  const int64_t cols = std::max(room / bytes_of_key / kKeyGranule * kKeyGranule, kKeyGranule);
  plan.by_keys = {heads, rows, even_piece(params.S, cols, kKeyGranule, kWgmmaTileCols)};
  const int64_t end = plan.arrays_at + 2 * plan.by_keys.array_bytes();
  plan.carry_at = carried ? end : 0;
  plan.bytes = std::max(plan.bytes, end + (carried ? carry_bytes(params, plan.by_keys.cols) : 0));
}

Plan plan_backward(const BackwardParams& params) {
  // delta and norm count towards the cap, of which slices may have a quarter in any case, and a 64th is left for what the allocator
  // may add to a large block.
  const int64_t cap = std::max<int64_t>(params.workspace_bytes, 0), row_values = 2 * row_values_bytes(params);
  const int64_t room = std::max(cap - row_values - cap / 64, cap / 4);
  Plan plan = {};
  plan.arrays_at = round_up(row_values, kWorkspaceAlignment);
  plan.joint = plan_joint(params, room, plan);
  if (plan.joint) return plan;
  const int64_t row_bytes = 2 * slice_pitch(params.S) * kElement + ceil_div(params.S, kWgmmaTileCols) * 4;
  const int64_t rows = std::max<int64_t>(room - 3 * kWorkspaceAlignment, 0) / row_bytes;
  plan.by_rows = rows >= params.L ? SliceShape{even_piece(params.N, rows / params.L, 1, 1), params.L, params.S}
                                  : SliceShape{1, even_piece(params.L, rows, 1, kSliceTile), params.S};
  plan.bytes = plan.arrays_at + plan.by_rows.bytes();
  plan_by_keys(params, room, plan);
  return plan;
}

// Runs one slice after another of a call.
class Run {
 public:
  Run(const BackwardParams& params, const Plan& plan, cudaStream_t stream)
      : params_(params), plan_(plan), stream_(stream), workspace_(static_cast<char*>(params.workspace)) {}

  cudaError_t make_delta() const {
    RowDotParams dot = stage_of<RowDotParams>(params_, {0, params_.N, 0, params_.L, 0, params_.S});
    dot.Ev = params_.Ev;
    dot.grad_out = params_.grad_out;
    dot.out = params_.out;
    dot.grad_lse = params_.grad_lse;
    dot.delta = workspace_;
    return launch_row_dot(dot, stream_);
  }

  // The joint pass, or pass A where key gradients are made elsewhere.
  cudaError_t by_rows() const {
    const SliceShape& shape = plan_.by_rows;
    for (int64_t batch = 0; batch < params_.N; batch += shape.batches) {
      for (int64_t row = 0; row < params_.L; row += shape.rows) {
        const Slice slice = {
            batch, std::min(shape.batches, params_.N - batch), row, std::min(shape.rows, params_.L - row), 0, params_.S};
        cudaError_t status = make_scores(shape, slice, true);
        if (status == cudaSuccess) status = make_gradients(shape, slice, true, plan_.joint);
        if (status == cudaSuccess) status = make_mask_grad(shape, slice);
        if (status != cudaSuccess) return status;
      }
    }
    return cudaSuccess;
  }

  cudaError_t by_keys() const {
    const SliceShape& shape = plan_.by_keys;
    for (int64_t col = 0; col < params_.S; col += shape.cols) {
      for (int64_t batch = 0; batch < params_.N; batch += shape.batches) {
        for (int64_t row = 0; row < params_.L; row += shape.rows) {
          const Slice slice = {
              batch, shape.batches, row, std::min(shape.rows, params_.L - row), col, std::min(shape.cols, params_.S - col)};
          cudaError_t status = make_scores(shape, slice, false);
          if (status == cudaSuccess) status = make_gradients(shape, slice, false, true);
          if (status != cudaSuccess) return status;
        }
      }
    }
    return cudaSuccess;
  }

 private:
  const float* delta() const { return reinterpret_cast<const float*>(workspace_); }
  float* norm() const { return reinterpret_cast<float*>(workspace_ + row_values_bytes(params_)); }
  MatrixView probabilities(const SliceShape& shape) const {
    return slice_view(workspace_ + plan_.arrays_at, shape.rows, slice_pitch(shape.cols), true);
  }
  MatrixView score_grad(const SliceShape& shape) const {
    return slice_view(workspace_ + plan_.arrays_at + shape.array_bytes(), shape.rows, slice_pitch(shape.cols), true);
  }
  float* row_sums(const SliceShape& shape) const {
    return reinterpret_cast<float*>(workspace_ + plan_.arrays_at + 2 * shape.array_bytes());
  }

  // P and dS. Slices of whole rows find the rows' norms, slices of keys use them.
  cudaError_t make_scores(const SliceShape& shape, const Slice& slice, bool whole_rows) const {
    ScoreGradientsParams scores = stage_of<ScoreGradientsParams>(params_, slice);
    scores.E = params_.E;
    scores.Ev = params_.Ev;
    scores.scale = params_.scale;
    scores.query = params_.query;
    scores.key = params_.key;
    scores.value = params_.value;
    scores.grad_out = params_.grad_out;
    scores.mask = params_.mask;
    scores.mask_type = params_.mask_type;
    scores.lse = params_.lse;
    scores.probabilities = probabilities(shape);
    scores.score_grad = score_grad(shape);
    scores.delta = delta();
    scores.norm = whole_rows ? nullptr : norm();
    scores.row_sums = whole_rows ? row_sums(shape) : nullptr;
    const cudaError_t status = launch_score_gradients(scores, stream_);
    if (status != cudaSuccess || !whole_rows) return status;

    LargeLseParams large = stage_of<LargeLseParams>(params_, slice);
    large.lse = params_.lse;
    large.probabilities = scores.probabilities;
    large.score_grad = scores.score_grad;
    large.row_sums = scores.row_sums;
    large.norm = norm();
    return launch_large_lse(large, stream_);
  }

  cudaError_t make_gradients(const SliceShape& shape, const Slice& slice, bool of_rows, bool of_keys) const {
    GradientsParams gradients = stage_of<GradientsParams>(params_, slice);
    gradients.group = params_.key_group;
    gradients.S = params_.S;
    gradients.query = params_.query;
    gradients.key = params_.key;
    gradients.grad_out = params_.grad_out;
    gradients.probabilities = probabilities(shape);
    gradients.score_grad = score_grad(shape);
    float* sums = plan_.carry_at > 0 ? reinterpret_cast<float*>(workspace_ + plan_.carry_at) : nullptr;
    const double factor = kept_factor(params_.dropout) / weight_scale(params_.type);
    gradients.of[kGradQuery] = {params_.grad_query, params_.E, params_.scale, nullptr};
    gradients.of[kGradKey] = {params_.grad_key, params_.E, params_.scale, sums};
    gradients.of[kGradValue] = {params_.grad_value, params_.Ev, factor,
                                sums == nullptr ? nullptr : sums + shape.cols * params_.E};
    gradients.of_rows = of_rows;
    gradients.of_keys = of_keys;
    gradients.wide_out = params_.wide_grads;
    return launch_gradients(gradients, stream_);
  }

  // The last thing of a slice: its probabilities, which nobody reads any more, become scratch.
  cudaError_t make_mask_grad(const SliceShape& shape, const Slice& slice) const {
    if (params_.mask_grad.data == nullptr) return cudaSuccess;
    return launch_mask_grad(mask_grad_of(params_, slice, score_grad(shape), probabilities(shape).data, shape.array_bytes()),
                            stream_);
  }

  const BackwardParams& params_;
  const Plan& plan_;
  cudaStream_t stream_;
  char* workspace_;
};

}  // namespace

int64_t wgmma_backward_workspace(const BackwardParams& params) { return plan_backward(params).bytes; }

bool wgmma_backward_sums_mask(const BackwardParams& params) {
  const Plan plan = plan_backward(params);
  return mask_sums_span(params, plan.by_rows.batches, plan.by_rows.rows);
}

cudaError_t wgmma_backward(const BackwardParams& params, cudaStream_t stream) {
  const Plan plan = plan_backward(params);
  const Run run(params, plan, stream);
  cudaError_t status = run.make_delta();
  if (status == cudaSuccess) status = run.by_rows();
  if (status == cudaSuccess && !plan.joint) status = run.by_keys();
  return status;
}

}  // namespace attention_ext
