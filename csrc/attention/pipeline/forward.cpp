// Forward driver: scores, softmax and weights . values for one slice of the (N, L) rows after another, so that the workspace
// stays under its cap whatever the shape. Pure host code. plan/slices.h says how the workspace is laid out.
#include "attention/pipeline/stage.h"
#include "core/device_info.h"
#include "plan/slices.h"

namespace attention_ext {
namespace {

ForwardSlices plan_forward(const ForwardParams& params, const ForwardProducts& products) {
  return forward_slices(params.N, params.L, params.S, params.Ev, element_bytes(params.type), params.workspace_bytes,
                        products.wgmma, current_device_info().sms, params.sequence.causal);
}

cudaError_t run_slice(const ForwardParams& params, const ForwardProducts& products, const ForwardSlices& plan,
                      const Slice& slice, cudaStream_t stream) {
  char* workspace = static_cast<char*>(params.workspace);
  const bool by_segments = plan.segments > 0;
  const MatrixView weights = slice_view(workspace, plan.rows, plan.pitch, true);
  const MatrixView statistics = slice_view(workspace + plan.statistics_at, plan.rows, plan.segments, false);
  const MatrixView row_sum = slice_view(workspace + plan.row_sum_at, plan.rows, 1, false);

  QkScoresParams scores = scores_of<QkScoresParams>(params, slice);
  scores.out = weights;
  scores.statistics = statistics;
  scores.output = by_segments ? ScoresAs::kExponentials : ScoresAs::kScores;
  cudaError_t status = products.scores(scores, stream);
  if (status != cudaSuccess) return status;

  if (by_segments) {
    SegmentSoftmaxParams softmax = stage_of<SegmentSoftmaxParams>(params, slice);
    softmax.weights = weights;
    softmax.statistics = statistics;
    softmax.row_sum = row_sum;
    softmax.lse = params.lse;
    status = launch_segment_softmax(softmax, stream);
  } else {
    RowSoftmaxParams softmax = stage_of<RowSoftmaxParams>(params, slice);
    softmax.scores = weights;
    softmax.weights = weights;
    softmax.row_sum = row_sum;
    softmax.lse = params.lse;
    status = launch_row_softmax(softmax, stream);
  }
  if (status != cudaSuccess) return status;

  ScoresValuesParams values = stage_of<ScoresValuesParams>(params, slice);
  values.Ev = params.Ev;
  values.factor = kept_factor(params.dropout);
  values.weights = weights;
  values.values = params.value;
  values.row_sum = row_sum;
  values.carry = plan.bytes > plan.carry_at ? workspace + plan.carry_at : nullptr;
  values.out = params.out;
  return products.values(values, stream);
}

constexpr ForwardProducts kProducts = {launch_qk_scores, launch_scores_values, false};

}  // namespace

cudaError_t run_forward(const ForwardParams& params, const ForwardProducts& products, cudaStream_t stream) {
  if (params.N == 0 || params.L == 0) return cudaSuccess;
  const ForwardSlices plan = plan_forward(params, products);
  for (int64_t batch = 0; batch < params.N; batch += plan.batches) {
    for (int64_t row = 0; row < params.L; row += plan.rows) {
      const Slice slice = {batch,   std::min(plan.batches, params.N - batch), row, std::min(plan.rows, params.L - row), 0,
                           params.S};
      const cudaError_t status = run_slice(params, products, plan, slice, stream);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

cudaError_t pipeline_forward(const ForwardParams& params, cudaStream_t stream) {
  return run_forward(params, kProducts, stream);
}

}  // namespace attention_ext
