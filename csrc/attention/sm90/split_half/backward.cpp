// Backward driver of float32 attention by half terms. Pure host code; no atomics on sums, so the result is the same bits every
// time.
//
//   delta = sum(P * dP) - grad_lse        P = softmax(scale * Q . K^T + mask)
//   dP = keep / (1 - p) * dO . V^T        dS = P * (dP - delta)
//   dQ = scale * dS . K      dK = scale * dS^T . Q      dV = (keep * P)^T . dO / (1 - p)
//
// A slice is whole matrices, or some of their rows, with all keys that these see. Operands are split into terms once; where those
// of key and value do not fit, they are split piece by piece, for each slice of rows twice. Then weights and dP as floats
// (scores.cu), P and dS as terms in their place (score_terms.cu), and the three gradients (gradients.cu). Of narrow heads P and dS
// come without those floats, from scores that are made twice (score_pairs.cu). The gradient of a mask is the sum of dS
// (mask_sums.cu, or the pipeline's).
// Up to head dim 64 two kernels do all of that without scores in memory, and a third one a mask's gradient (fused_backward/).
// In the end what two terms are not enough for (exact_backward.cu), mostly nothing; of dS before it is summed.
#include "attention/sm90/split_half/backward.h"

#include <algorithm>
#include <iterator>

#include "attention/pipeline/stage.h"
#include "attention/sm90/split_half/fused_backward/fused_backward.h"
#include "attention/sm90/split_half/terms_map.h"
#include "core/device_info.h"
#include "plan/split_half_backward_slices.h"

namespace attention_ext {
namespace {

// Of the mask whose gradient is wanted; 0: of none.
int64_t mask_matrices_of(const BackwardParams& p) {
  int64_t matrices = p.mask_grad.data == nullptr ? 0 : 1;
  for (int dim = 0; dim < p.batch.count; ++dim) {
    if (p.mask_grad.batch_stride[dim] != 0) matrices *= p.batch.size[dim];
  }
  return matrices;
}

// The call with its batch dims in another order: first those that the mask has. So the matrices that share one of the mask follow
// each other, a slice has few of these, which stay in L2, and its sums for the mask's gradient are of many terms. Flat numbers
// change with the order of dims, so it stays where these mean something: heads of a group, lengths of keys, dropout.
BackwardParams in_order_of_mask(const BackwardParams& call) {
  BackwardParams p = call;
  if (p.mask_type == MaskType::kNone || p.key_group > 1 || p.sequence.key_lengths != nullptr || p.dropout.seed != nullptr)
    return p;
  int order[kMaxBatchDims], count = 0;
  for (const bool has : {true, false}) {
    for (int dim = 0; dim < p.batch.count; ++dim) {
      if ((call.mask.batch_stride[dim] != 0) == has) order[count++] = dim;
    }
  }
  const auto reorder = [&](int64_t (&of_dims)[kMaxBatchDims]) {
    int64_t before[kMaxBatchDims];
    std::copy(std::begin(of_dims), std::end(of_dims), before);
    for (int dim = 0; dim < count; ++dim) of_dims[dim] = before[order[dim]];
  };
  reorder(p.batch.size);
  for (MatrixView* view : {&p.query, &p.key, &p.value, &p.mask, &p.out, &p.lse, &p.grad_out, &p.grad_lse, &p.grad_query,
                           &p.grad_key, &p.grad_value, &p.mask_grad}) {
    reorder(view->batch_stride);
  }
  return p;
}

// Whether the mask whose gradient is wanted has rows and columns of its own.
bool whole_mask(const BackwardParams& p) { return p.mask_grad.row_stride != 0 && p.mask_grad.col_stride != 0; }

SplitHalfBackwardPlan plan_backward(const BackwardParams& p) {
  const int64_t mask_matrices = mask_matrices_of(p);
  const bool fused = split_half_backward_fuses(p.E, p.Ev, p.dropout.seed != nullptr, mask_matrices > 0, whole_mask(p));
  return plan_split_half_backward({p.N, p.L, p.S, p.E, p.Ev, p.key_group, p.sequence.causal, mask_matrices, fused},
                                  p.workspace_bytes, current_device_info().sms);
}

class Backward {
 public:
  Backward(const BackwardParams& params, const SplitHalfBackwardSlices& slices, cudaStream_t stream)
      : params_(params), stream_(stream), slices_(slices) {}

  cudaError_t clear() const { return cudaMemsetAsync(params_.workspace, 0, slices_.cleared, stream_); }
  // Of the range's rows.
  cudaError_t run() const {
    cudaError_t status = cudaSuccess;
    if (slices_.part_bytes > 0) status = cudaMemsetAsync(at<void>(slices_.parts_at), 0, slices_.part_bytes, stream_);
    for (int64_t batch = 0; batch < params_.N && status == cudaSuccess; batch += slices_.matrices) {
      status = run_slice(
          {batch, std::min(slices_.matrices, params_.N - batch), slices_.row_begin, slices_.rows, 0, slices_.all_keys});
    }
    return status;
  }
  cudaError_t run_exact() const { return launch_split_half_exact_backward(exact_of(whole_slice(params_)), stream_); }

 private:
  enum : int { kQuery, kKey, kValue, kGradOut };

  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(params_.workspace) + offset);
  }
  int32_t* exponents(int operand) const {
    const int64_t rows = slices_.row_blocks(), keys = slices_.key_blocks(), before[] = {0, 2 * rows, 2 * rows + keys, rows};
    return at<int32_t>(slices_.exponents_at) + before[operand];
  }

  SplitHalfExactBackwardParams exact_of(const Slice& slice) const {
    const auto facts = [&](int operand) { return at<SplitHalfFacts>(0) + operand * params_.N; };
    return {params_,
            facts(kQuery),
            facts(kKey),
            facts(kValue),
            facts(kGradOut),
            at<uint8_t>(slices_.marks_at),
            at<uint32_t>(slices_.largest_at),
            at<SplitHalfRowValues>(slices_.exact_at),
            slice,
            nullptr,
            nullptr,
            slices_.pitch};
  }

  // visit(a slice with a piece of its keys), piece after piece.
  template <class Visit>
  cudaError_t for_each_piece(const Slice& slice, const Visit& visit) const {
    cudaError_t status = cudaSuccess;
    for (int64_t key = 0; key < slice.col_count && status == cudaSuccess; key += slices_.keys) {
      Slice piece = slice;
      piece.col_begin = key;
      piece.col_count = std::min(slices_.keys, slice.col_count - key);
      status = visit(piece);
    }
    return status;
  }
  bool in_pieces() const { return slices_.keys < slices_.all_keys; }

  cudaError_t run_slice(const Slice& slice) const {
    if (slices_.fused) return run_fused(slice);
    const bool twice = split_half_scores_twice(params_.E, params_.Ev);
    cudaError_t status = for_each_piece(slice, [&](const Slice& piece) {
      const cudaError_t split = split_operands(piece, piece.col_begin == 0, true);
      if (split != cudaSuccess) return split;
      return twice ? make_pairs(slice, piece, false) : make_scores(piece);
    });
    if (status == cudaSuccess) status = launch_split_half_rows_of_scores(terms_of(slice), stream_);
    if (status == cudaSuccess && !twice) status = launch_split_half_score_terms(terms_of(slice), stream_);
    if (status != cudaSuccess) return status;
    status = for_each_piece(slice, [&](Slice piece) {
      cudaError_t split = in_pieces() ? split_operands(piece, false, twice) : cudaSuccess;
      if (split == cudaSuccess && twice) split = make_pairs(slice, piece, true);
      // With keys that no row sees, whose gradients are 0.
      const bool last = slice.row_begin + slice.row_count == params_.L && piece.col_begin + piece.col_count == slice.col_count;
      if (last) piece.col_count = params_.S - piece.col_begin;
      return split == cudaSuccess ? make_gradients(piece) : split;
    });
    return status == cudaSuccess && params_.mask_grad.data != nullptr ? make_mask_grad(slice) : status;
  }

  // Without scores in memory.
  cudaError_t run_fused(const Slice& slice) const {
    const BackwardParams& p = params_;
    SplitHalfBiasGradParams fused = {};
    fused.batch = p.batch;
    fused.slice = slice;
    fused.sequence = p.sequence;
    fused.S = p.S;
    fused.E = p.E;
    fused.Ev = p.Ev;
    fused.group = p.key_group;
    fused.scale = p.scale;
    fused.mask = p.mask;
    fused.mask_type = p.mask_type;
    fused.query_exponents = exponents(kQuery);
    fused.grad_out_exponents = exponents(kGradOut);
    fused.key_exponents = exponents(kKey);
    fused.value_exponents = exponents(kValue);
    fused.grad_lse = p.grad_lse;
    fused.grad_query = p.grad_query;
    fused.grad_key = p.grad_key;
    fused.grad_value = p.grad_value;
    fused.records = at<SplitHalfQueryRecord>(slices_.records_at);
    fused.marks = at<uint8_t>(slices_.marks_at);
    fused.largest_grads = at<uint32_t>(slices_.largest_at);
    static_assert(sizeof(SplitHalfQueryRecord) == kSplitHalfRecordBytes);
    cudaError_t status = split_operands(slice, true, true);
    const auto then = [&](auto launch) {
      if (status != cudaSuccess) return;
      status = launch(fused, at<void>(slices_.query_at), at<void>(slices_.key_at), at<void>(slices_.grad_out_at),
                      at<void>(slices_.value_at), stream_);
    };
    then(launch_split_half_row_grads);
    then(launch_split_half_column_grads);
    if (status != cudaSuccess || p.mask_grad.data == nullptr) return status;
    fused.exact = exact_of(slice);
    fused.mask_grad = p.mask_grad;
    fused.matrices = mask_matrices_of(p);
    fused.sharing = p.N / fused.matrices;
    status = launch_split_half_exact_rows(fused.exact, stream_);
    then(launch_split_half_bias_grads);
    return status;
  }

  // Of key always.
  cudaError_t split_operands(const Slice& piece, bool of_rows, bool of_values) const {
    const BackwardParams& p = params_;
    SplitHalfBlocksParams operands[4];
    int count = 0;
    const auto add = [&](int operand, const MatrixView& view, int64_t cols, int64_t terms_at) {
      const bool keys = operand == kKey || operand == kValue;
      const int64_t group = keys ? p.key_group : 1;
      operands[count++] = {p.batch,
                           view,
                           piece.batch_begin,
                           group,
                           matrices_of_slice(piece, group),
                           keys ? piece.col_begin : piece.row_begin,
                           keys ? piece.col_count : piece.row_count,
                           cols,
                           at<void>(terms_at),
                           exponents(operand),
                           at<SplitHalfFacts>(0) + operand * p.N,
                           keys ? p.sequence.key_lengths : nullptr,
                           p.sequence.heads,
                           operand == kValue || operand == kGradOut};
    };
    if (of_values) add(kValue, p.value, p.Ev, slices_.value_at);
    add(kKey, p.key, p.E, slices_.key_at);
    if (of_rows) add(kGradOut, p.grad_out, p.Ev, slices_.grad_out_at);
    if (of_rows) add(kQuery, p.query, p.E, slices_.query_at);
    return launch_split_half_blocks(operands, count, stream_);
  }

  // Of products of query and key, and of grad_out and value.
  SplitHalfScoresParams weights_of(const Slice& piece) const {
    const BackwardParams& p = params_;
    SplitHalfScoresParams scores = {};
    scores.batch = p.batch;
    scores.slice = piece;
    scores.sequence = p.sequence;
    scores.weights = at<void>(slices_.weights_at);
    scores.segments = at<SplitHalfSegment>(slices_.segments_at);
    scores.pitch = slices_.pitch;
    scores.L = p.L;
    scores.marks = at<uint8_t>(slices_.marks_at);
    scores.E = p.E;
    scores.scale = p.scale;
    scores.mask = p.mask;
    scores.mask_type = p.mask_type;
    scores.key_group = p.key_group;
    scores.query_exponents = exponents(kQuery);
    scores.key_exponents = exponents(kKey);
    return scores;
  }
  SplitHalfScoresParams weight_grads_of(const Slice& piece) const {
    const BackwardParams& p = params_;
    SplitHalfScoresParams grads = weights_of(piece);
    grads.dropout = p.dropout;
    grads.factor = kept_factor(p.dropout);
    grads.weights = at<void>(slices_.grads_at);
    grads.weights_of_grads = at<float>(slices_.weights_at);
    grads.deltas = at<float>(slices_.deltas_at);
    grads.largest_grads = at<uint32_t>(slices_.largest_at);
    grads.E = p.Ev;
    grads.mask_type = MaskType::kNone;
    grads.query_exponents = exponents(kGradOut);
    grads.key_exponents = exponents(kValue);
    return grads;
  }
  cudaError_t make_scores(const Slice& piece) const {
    const cudaError_t status = launch_split_half_scores(weights_of(piece), ScoreProducts::kWeights, at<void>(slices_.query_at),
                                                        at<void>(slices_.key_at), stream_);
    if (status != cudaSuccess) return status;
    return launch_split_half_scores(weight_grads_of(piece), ScoreProducts::kWeightGrads, at<void>(slices_.grad_out_at),
                                    at<void>(slices_.value_at), stream_);
  }
  cudaError_t make_pairs(const Slice& slice, const Slice& piece, bool terms) const {
    return launch_split_half_score_pairs({weights_of(piece), weight_grads_of(piece), terms_of(slice)}, terms,
                                         at<void>(slices_.query_at), at<void>(slices_.key_at), at<void>(slices_.grad_out_at),
                                         at<void>(slices_.value_at), stream_);
  }

  SplitHalfScoreTermsParams terms_of(const Slice& slice) const {
    SplitHalfScoreTermsParams terms = {};
    terms.batch = params_.batch;
    terms.slice = slice;
    terms.dropout = params_.dropout;
    terms.sequence = params_.sequence;
    terms.pitch = slices_.pitch;
    terms.weights = at<void>(slices_.weights_at);
    terms.grads = at<void>(slices_.grads_at);
    terms.segments = at<SplitHalfSegment>(slices_.segments_at);
    terms.deltas = at<float>(slices_.deltas_at);
    terms.grad_lse = params_.grad_lse;
    terms.row_values = at<SplitHalfRowValues>(slices_.row_values_at);
    terms.weight_exponents = at<int32_t>(slices_.tiles_at);
    terms.grad_exponents = terms.weight_exponents + slices_.tiles();
    terms.marks = at<uint8_t>(slices_.marks_at);
    return terms;
  }

  // The last thing of a slice, when the terms of P are scratch, as nobody reads them any more.
  cudaError_t make_mask_grad(const Slice& slice) const {
    const SplitHalfScoreTermsParams terms = terms_of(slice);
    SplitHalfExactBackwardParams exact = exact_of(slice);
    exact.score_grads = at<float>(slices_.grads_at);
    exact.grad_exponents = terms.grad_exponents;
    const cudaError_t status = launch_split_half_exact_rows(exact, stream_);
    if (status != cudaSuccess) return status;
    if (whole_mask(params_)) {
      return launch_split_half_mask_sums(
          {params_.batch, slice, params_.sequence, params_.S, slices_.pitch, at<void>(slices_.grads_at), terms.grad_exponents,
           params_.mask_grad, params_.N / mask_matrices_of(params_)},
          stream_);
    }
    Slice whole_rows = slice;  // mask_grad has all keys, also those that no row of the slice sees
    whole_rows.col_count = params_.S;
    const MatrixView score_grad = slice_view(at<void>(slices_.grads_at), slice.row_count, slices_.pitch, true);
    MaskGradParams mask =
        mask_grad_of(params_, whole_rows, score_grad, at<void>(slices_.weights_at), slices_.grads_at - slices_.weights_at);
    mask.score_exponents = terms.grad_exponents;
    return launch_mask_grad(mask, stream_);
  }

  cudaError_t make_gradients(const Slice& piece) const {
    const BackwardParams& p = params_;
    SplitHalfGradientsParams gradients = {};
    gradients.batch = p.batch;
    gradients.slice = piece;
    gradients.sequence = p.sequence;
    gradients.group = p.key_group;
    gradients.keys = slices_.all_keys;
    gradients.pitch = slices_.pitch;
    gradients.weights = at<void>(slices_.weights_at);
    gradients.grads = at<void>(slices_.grads_at);
    gradients.weight_exponents = at<int32_t>(slices_.tiles_at);
    gradients.grad_exponents = gradients.weight_exponents + slices_.tiles();
    gradients.query_exponents = exponents(kQuery);
    gradients.key_exponents = exponents(kKey);
    gradients.grad_out_exponents = exponents(kGradOut);
    gradients.of[kGradQuery] = {p.grad_query, p.E, p.scale};
    gradients.of[kGradKey] = {p.grad_key, p.E, p.scale};
    gradients.of[kGradValue] = {p.grad_value, p.Ev, kept_factor(p.dropout)};
    gradients.parts = slices_.parts;
    gradients.ticket = at<unsigned>(slices_.ticket_at);
    gradients.parts_done = at<unsigned>(slices_.parts_at);
    return launch_split_half_gradients(gradients, at<void>(slices_.query_at), at<void>(slices_.key_at),
                                       at<void>(slices_.grad_out_at), stream_);
  }

  const BackwardParams& params_;
  cudaStream_t stream_;
  const SplitHalfBackwardSlices& slices_;
};

}  // namespace

int64_t split_half_backward_workspace(const BackwardParams& params) { return plan_backward(params).bytes; }

bool split_half_backward_sums_mask(const BackwardParams& params) {
  const SplitHalfBackwardPlan plan = plan_backward(params);
  if (plan.ranges.front().fused) return false;  // they span slices in the gradient
  int64_t matrices = params.N;
  for (const SplitHalfBackwardSlices& range : plan.ranges) matrices = std::min(matrices, range.matrices);
  return mask_sums_span(params, matrices, plan.ranges.front().rows);  // if there are more ranges, of fewer rows than all
}

cudaError_t split_half_backward(const BackwardParams& call, cudaStream_t stream) {
  const BackwardParams params = in_order_of_mask(call);
  const SplitHalfBackwardPlan plan = plan_backward(params);
  const Backward first(params, plan.ranges.front(), stream);  // what outlasts slices lies at one place in all ranges
  cudaError_t status = first.clear();
  for (const SplitHalfBackwardSlices& range : plan.ranges) {
    if (status == cudaSuccess) status = Backward(params, range, stream).run();
  }
  return status == cudaSuccess ? first.run_exact() : status;
}

}  // namespace attention_ext
