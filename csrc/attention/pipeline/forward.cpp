// Forward driver: scores, softmax and weights . values for one slice of the (N, L) rows after another, so that the workspace
// stays under its cap whatever the shape. Pure host code. forward_slices.h says how the workspace is laid out.
#include "attention/pipeline/slice_view.h"
#include "attention/sm90/pipeline/products.h"
#include "plan/slices.h"

namespace attention_ext {
namespace {

ForwardSlices plan_forward(const ForwardParams& params) {
  return forward_slices(params.N, params.L, params.S, params.Ev, element_bytes(params.type), params.workspace_bytes,
                        params.wgmma_products);
}

// Stages 1 and 2: leaves weights and row sums in the workspace.
cudaError_t make_weights(const ForwardParams& params, const ForwardSlices& plan, const Slice& slice, const MatrixView& weights,
                         const MatrixView& row_sum, cudaStream_t stream) {
  char* workspace = static_cast<char*>(params.workspace);
  const bool by_segments = plan.segments > 0;
  const MatrixView statistics = slice_view(workspace + plan.statistics_at, plan.rows, plan.segments, false);

  QkScoresParams qk = {};
  qk.batch = params.batch;
  qk.slice = slice;
  qk.L = params.L;
  qk.E = params.E;
  qk.scale = params.scale;
  qk.query = params.query;
  qk.key = params.key;
  qk.mask = params.mask;
  qk.out = weights;
  qk.statistics = statistics;
  qk.output = by_segments ? ScoresAs::kExponentials : ScoresAs::kScores;
  qk.type = params.type;
  qk.mask_type = params.mask_type;
  qk.sequence = params.sequence;
  const cudaError_t status = params.wgmma_products ? launch_wgmma_scores(qk, stream) : launch_qk_scores(qk, stream);
  if (status != cudaSuccess) return status;

  if (by_segments) {
    SegmentSoftmaxParams softmax = {};
    softmax.batch = params.batch;
    softmax.slice = slice;
    softmax.weights = weights;
    softmax.statistics = statistics;
    softmax.row_sum = row_sum;
    softmax.lse = params.lse;
    softmax.dropout = params.dropout;
    softmax.type = params.type;
    softmax.sequence = params.sequence;
    return launch_segment_softmax(softmax, stream);
  }
  RowSoftmaxParams softmax = {};
  softmax.batch = params.batch;
  softmax.slice = slice;
  softmax.scores = weights;
  softmax.weights = weights;
  softmax.row_sum = row_sum;
  softmax.lse = params.lse;
  softmax.dropout = params.dropout;
  softmax.type = params.type;
  softmax.sequence = params.sequence;
  return launch_row_softmax(softmax, stream);
}

cudaError_t run_slice(const ForwardParams& params, const ForwardSlices& plan, const Slice& slice, cudaStream_t stream) {
  char* workspace = static_cast<char*>(params.workspace);
  const MatrixView weights = slice_view(workspace, plan.rows, plan.pitch, true);
  const MatrixView row_sum = slice_view(workspace + plan.row_sum_at, plan.rows, 1, false);
  const cudaError_t status = make_weights(params, plan, slice, weights, row_sum, stream);
  if (status != cudaSuccess) return status;

  ScoresValuesParams product = {};
  product.batch = params.batch;
  product.slice = slice;
  product.Ev = params.Ev;
  product.factor = params.dropout.seed != nullptr ? params.dropout.keep_scale : 1.0;
  product.weights = weights;
  product.values = params.value;
  product.row_sum = row_sum;
  product.carry = plan.bytes > plan.carry_at ? workspace + plan.carry_at : nullptr;
  product.out = params.out;
  product.type = params.type;
  product.sequence = params.sequence;
  return params.wgmma_products ? launch_wgmma_values(product, stream) : launch_scores_values(product, stream);
}

}  // namespace

int64_t pipeline_forward_workspace(const ForwardParams& params) {
  return params.N == 0 || params.L == 0 ? 0 : plan_forward(params).bytes;
}

cudaError_t pipeline_forward(const ForwardParams& params, cudaStream_t stream) {
  if (params.N == 0 || params.L == 0) return cudaSuccess;
  const ForwardSlices plan = plan_forward(params);
  for (int64_t batch = 0; batch < params.N; batch += plan.batches) {
    for (int64_t row = 0; row < params.L; row += plan.rows) {
      const Slice slice = {batch,   std::min(plan.batches, params.N - batch), row, std::min(plan.rows, params.L - row), 0,
                           params.S};
      const cudaError_t status = run_slice(params, plan, slice, stream);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

}  // namespace attention_ext
