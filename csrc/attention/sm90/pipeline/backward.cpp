// Backward driver of the pipeline by wgmma. What pipeline/backward.cpp does for every card, by two kernels a slice: probabilities
// and dS (score_gradients.cu), then everything that is a product with them (gradients.cu). Pure host code; no atomics on sums.
//
// plan/backward_slices.h cuts the call into slices of as many scores as the workspace holds, of all keys and rows or of some. What
// lies in several slices is carried in float: dQ where keys are cut, dK and dV where rows or query heads are. So a score is made
// once. Only where that is too large, one pass makes dQ and another dK and dV.
// Whole matrices are mostly made in one launch (backward_turns.cu), in which P and dS have places for some heads.
// Workspace: delta and norm, (N, L) in float; the ticket; of whole matrices counters; what is carried, of dQ (group, rows, E) and
// of dK and dV (keys, E + Ev), to 128 rows or keys; P and dS, of a slice or of as many matrices as have places, (batches,
// rows, pitch) in the tensors' dtype.
#include "attention/sm90/pipeline/backward.h"

#include "attention/pipeline/stage.h"
#include "attention/sm90/pipeline/row_values.h"
#include "core/arithmetic.h"
#include "core/device_info.h"
#include "plan/backward_slices.h"

namespace attention_ext {
namespace {

BackwardSizes sizes_of(const BackwardParams& params) {
  return {params.N,
          params.L,
          params.S,
          params.E,
          params.Ev,
          params.key_group,
          params.sequence.causal,
          params.mask_grad.data != nullptr};
}

BackwardPlan plan_backward(const BackwardParams& params) {
  return plan_backward_slices(sizes_of(params), params.workspace_bytes, current_device_info().sms);
}

// Runs one slice after another of a call.
class Run {
 public:
  Run(const BackwardParams& params, const BackwardPlan& plan, cudaStream_t stream)
      : params_(params), sizes_(sizes_of(params)), plan_(plan), stream_(stream), slices_(workspace(plan.slices_at)) {}

  cudaError_t begin() const {
    const cudaError_t status = cudaMemsetAsync(ticket(), 0, plan_.cleared(sizes_), stream_);
    if (status != cudaSuccess) return status;
    RowValues rows;
    rows.delta = delta();
    rows.norm = norm();
    return launch_row_values(params_, rows, stream_);
  }

  cudaError_t run_pass(const BackwardPass& pass) const {
    if (pass.ahead > 0) return run_in_one_launch(pass);
    const int64_t group = pass.group(sizes_);
    cudaError_t status = cudaSuccess;
    for (int64_t first = 0; first < params_.N; first += std::max(group, pass.batches)) {
      const int64_t end = std::min(first + std::max(group, pass.batches), params_.N);
      for_each_part(sizes_, pass, [&](const SlicePart& part) {
        for (int64_t batch = first; batch < end && status == cudaSuccess; batch += pass.batches) {
          const Slice slice = {batch,          std::min(pass.batches, end - batch),
                               part.row_begin, part.row_end - part.row_begin,
                               part.key_begin, part.key_end - part.key_begin};
          status = run_slice(pass, part, slice);
        }
        return status == cudaSuccess;
      });
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  }

 private:
  char* workspace(int64_t at) const { return static_cast<char*>(params_.workspace) + at; }
  float* delta() const { return reinterpret_cast<float*>(workspace(0)); }
  float* norm() const { return delta() + params_.N * params_.L; }
  unsigned* ticket() const { return reinterpret_cast<unsigned*>(workspace(plan_.slices_at - kWorkspaceAlignment)); }
  unsigned* counters() const { return reinterpret_cast<unsigned*>(slices_); }

  cudaError_t run_slice(const BackwardPass& pass, const SlicePart& part, const Slice& slice) const {
    const SlicePlaces places = slice_places(sizes_, pass, part);
    const ScoreGradientsParams scores = scores_of(slice, places, slice.batch_count);
    const MatrixView &probabilities = scores.probabilities, &score_grad = scores.score_grad;
    cudaError_t status = part.hidden ? cudaSuccess : launch_score_gradients(scores, stream_);
    if (status == cudaSuccess) status = launch_gradients(gradients_of(pass, part, scores), stream_);
    if (status != cudaSuccess || !pass.of_rows || params_.mask_grad.data == nullptr) return status;
    Slice whole_rows = slice;  // mask_grad has all keys, also those that no row of a causal slice sees
    whole_rows.col_count = params_.S;
    // The last thing of a slice: its probabilities, which nobody reads any more, become scratch.
    return launch_mask_grad(
        mask_grad_of(params_, whole_rows, score_grad, probabilities.data, places.score_grad - places.probabilities), stream_);
  }

  cudaError_t run_in_one_launch(const BackwardPass& pass) const {
    const Slice whole = whole_slice(params_);
    const SlicePart part = {0, params_.L, 0, params_.S, 0, params_.L, false};
    BackwardTurnsParams turns = {};
    turns.scores = scores_of(whole, slice_places(sizes_, pass, part), pass.batches);
    turns.gradients = gradients_of(pass, part, turns.scores);
    turns.ahead = pass.ahead;
    turns.counters = counters();
    return launch_backward_turns(turns, stream_);
  }

  // in_memory: matrices that P and dS have places for.
  ScoreGradientsParams scores_of(const Slice& slice, const SlicePlaces& places, int64_t in_memory) const {
    const int64_t pitch = slice_pitch(slice.col_count);
    ScoreGradientsParams scores = attention_ext::scores_of<ScoreGradientsParams>(params_, slice);
    scores.Ev = params_.Ev;
    scores.value = params_.value;
    scores.grad_out = params_.grad_out;
    scores.lse = params_.lse;
    scores.probabilities = slice_view(slices_ + places.probabilities, slice.row_count, pitch, true);
    scores.score_grad = slice_view(slices_ + places.score_grad, slice.row_count, pitch, true);
    scores.delta = delta();
    scores.norm = norm();
    scores.places = in_memory;
    scores.ticket = ticket();
    return scores;
  }

  // Of what `scores` are made for.
  GradientsParams gradients_of(const BackwardPass& pass, const SlicePart& part, const ScoreGradientsParams& scores) const {
    const int64_t E = params_.E, Ev = params_.Ev;
    const Slice& slice = scores.slice;
    GradientsParams gradients = stage_of<GradientsParams>(params_, slice);
    gradients.group = params_.key_group;
    gradients.sum_heads = pass.sum_heads;
    gradients.S = params_.S;
    gradients.query = params_.query;
    gradients.key = params_.key;
    gradients.grad_out = params_.grad_out;
    gradients.probabilities = scores.probabilities;
    gradients.score_grad = scores.score_grad;
    const double factor = kept_factor(params_.dropout) / weight_scale(params_.type);
    gradients.of[kGradQuery] = {params_.grad_query, E, params_.scale, nullptr, E};
    gradients.of[kGradKey] = {params_.grad_key, E, params_.scale, nullptr, E + Ev};
    gradients.of[kGradValue] = {params_.grad_value, Ev, factor, nullptr, E + Ev};
    if (carries_query(pass)) {
      const int64_t head = slice.batch_begin % pass.group(sizes_), row = slice.row_begin - part.carried_begin;
      gradients.of[kGradQuery].sums =
          reinterpret_cast<float*>(slices_) + head * carry_floats(part.carried_rows, E) + carry_floats(row, E);
    }
    if (carries_keys(sizes_, pass)) {
      float* sums = reinterpret_cast<float*>(slices_ + slice_places(sizes_, pass, part).key_carry);
      gradients.of[kGradKey].sums = sums;
      gradients.of[kGradValue].sums = sums + kSliceTile * E;
    }
    if (adds_in_turn(sizes_, pass)) gradients.added = counters() + done_counters(sizes_, pass);
    gradients.of_rows = pass.of_rows && !part.hidden;
    gradients.of_keys = pass.of_keys;
    gradients.wide_out = params_.wide_grads;
    gradients.ticket = ticket();
    gradients.places = scores.places;
    return gradients;
  }

  const BackwardParams& params_;
  BackwardSizes sizes_;
  const BackwardPlan& plan_;
  cudaStream_t stream_;
  char* slices_;
};

}  // namespace

int64_t wgmma_backward_workspace(const BackwardParams& params) { return plan_backward(params).bytes; }

bool wgmma_backward_sums_mask(const BackwardParams& params) {
  const BackwardPass pass = plan_backward(params).passes.front();
  return mask_sums_span(params, pass.batches, pass.cuts_rows() ? 1 : params.L);
}

cudaError_t wgmma_backward(const BackwardParams& params, cudaStream_t stream) {
  const BackwardPlan plan = plan_backward(params);
  const Run run(params, plan, stream);
  cudaError_t status = run.begin();
  for (size_t pass = 0; pass < plan.passes.size() && status == cudaSuccess; ++pass) status = run.run_pass(plan.passes[pass]);
  return status;
}

}  // namespace attention_ext
