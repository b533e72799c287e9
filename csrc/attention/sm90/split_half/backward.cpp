// Backward driver of float32 attention by half terms. Pure host code; no atomics on sums, so the result is the same bits every
// time.
//
//   delta = sum(P * dP) - grad_lse        P = softmax(scale * Q . K^T + mask)
//   dP = keep / (1 - p) * dO . V^T        dS = P * (dP - delta)
//   dQ = scale * dS . K      dK = scale * dS^T . Q      dV = (keep * P)^T . dO / (1 - p)
//
// A slice is whole matrices, or some rows of one, with all keys that they see. Operands are split into terms once; where those of
// key and value do not fit, they are split piece by piece, for each slice of rows twice. Then weights and dP as floats (scores.cu),
// P and dS as terms in their place (score_terms.cu), and the three gradients (gradients.cu). In the end what two terms are not
// enough for (exact_backward.cu), mostly nothing.
#include "attention/sm90/split_half/backward.h"

#include "attention/pipeline/stage.h"
#include "attention/sm90/split_half/terms_map.h"
#include "core/device_info.h"
#include "plan/split_half_backward_slices.h"

namespace attention_ext {
namespace {

SplitHalfBackwardSlices plan_backward(const BackwardParams& p) {
  return split_half_backward_slices({p.N, p.L, p.S, p.E, p.Ev, p.key_group, p.sequence.causal}, p.workspace_bytes,
                                    current_device_info().sms);
}

class Backward {
 public:
  Backward(const BackwardParams& params, cudaStream_t stream)
      : params_(params),
        stream_(stream),
        plan_(plan_backward(params)),
        keys_(params.sequence.causal ? std::min(params.S, params.L) : params.S) {}

  cudaError_t run() {
    cudaError_t status = cudaMemsetAsync(params_.workspace, 0, plan_.cleared, stream_);
    for (int64_t batch = 0; batch < params_.N; batch += plan_.matrices) {
      for (int64_t row = 0; row < params_.L && status == cudaSuccess; row += plan_.rows) {
        status = run_slice(
            {batch, std::min(plan_.matrices, params_.N - batch), row, std::min(plan_.rows, params_.L - row), 0, keys_});
      }
    }
    return status == cudaSuccess ? run_exact() : status;
  }

 private:
  enum : int { kQuery, kKey, kValue, kGradOut };

  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(params_.workspace) + offset);
  }
  int32_t* exponents(int operand) const {
    const int64_t rows = plan_.row_blocks(), keys = plan_.key_blocks(), before[] = {0, 2 * rows, 2 * rows + keys, rows};
    return at<int32_t>(plan_.exponents_at) + before[operand];
  }

  // visit(a slice with a piece of the keys), piece after piece.
  template <class Visit>
  cudaError_t for_each_piece(const Slice& slice, const Visit& visit) const {
    cudaError_t status = cudaSuccess;
    for (int64_t key = 0; key < keys_ && status == cudaSuccess; key += plan_.keys) {
      Slice piece = slice;
      piece.col_begin = key;
      piece.col_count = std::min(plan_.keys, keys_ - key);
      status = visit(piece);
    }
    return status;
  }
  // Whether none of a slice's rows sees a key of it.
  bool hidden(const Slice& slice) const {
    return params_.sequence.causal && slice.col_begin >= slice.row_begin + slice.row_count;
  }

  cudaError_t run_slice(const Slice& slice) const {
    cudaError_t status = for_each_piece(slice, [&](const Slice& piece) {
      if (hidden(piece)) return cudaSuccess;
      const cudaError_t split = split_operands(piece, piece.col_begin == 0, plan_.keys < keys_ || slice.row_begin == 0, true);
      return split == cudaSuccess ? make_scores(piece) : split;
    });
    if (status == cudaSuccess) status = make_terms(slice);
    if (status != cudaSuccess) return status;
    return for_each_piece(slice, [&](Slice piece) {
      if (hidden(piece) && slice.row_begin > 0) return cudaSuccess;  // else its gradients become 0
      cudaError_t split = cudaSuccess;
      if (plan_.keys < keys_ && !hidden(piece)) split = split_operands(piece, false, true, false);
      if (piece.col_begin + piece.col_count == keys_) piece.col_count = params_.S - piece.col_begin;
      return split == cudaSuccess ? make_gradients(piece) : split;
    });
  }

  cudaError_t split_operands(const Slice& piece, bool of_rows, bool of_keys, bool of_values) const {
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
    if (of_keys && of_values) add(kValue, p.value, p.Ev, plan_.value_at);
    if (of_keys) add(kKey, p.key, p.E, plan_.key_at);
    if (of_rows) add(kGradOut, p.grad_out, p.Ev, plan_.grad_out_at);
    if (of_rows) add(kQuery, p.query, p.E, plan_.query_at);
    return count == 0 ? cudaSuccess : launch_split_half_blocks(operands, count, stream_);
  }

  // Weights, and their gradients.
  cudaError_t make_scores(const Slice& piece) const {
    const BackwardParams& p = params_;
    SplitHalfScoresParams scores = {};
    scores.batch = p.batch;
    scores.slice = piece;
    scores.sequence = p.sequence;
    scores.weights = at<void>(plan_.weights_at);
    scores.segments = at<SplitHalfSegment>(plan_.segments_at);
    scores.pitch = plan_.pitch;
    scores.L = p.L;
    scores.marks = at<uint8_t>(plan_.marks_at);
    scores.E = p.E;
    scores.scale = p.scale;
    scores.mask = p.mask;
    scores.mask_type = p.mask_type;
    scores.key_group = p.key_group;
    scores.query_exponents = exponents(kQuery);
    scores.key_exponents = exponents(kKey);
    const cudaError_t status =
        launch_split_half_scores(scores, ScoreProducts::kWeights, at<void>(plan_.query_at), at<void>(plan_.key_at), stream_);
    if (status != cudaSuccess) return status;

    SplitHalfScoresParams grads = scores;
    grads.dropout = p.dropout;
    grads.factor = kept_factor(p.dropout);
    grads.weights = at<void>(plan_.grads_at);
    grads.E = p.Ev;
    grads.mask_type = MaskType::kNone;
    grads.query_exponents = exponents(kGradOut);
    grads.key_exponents = exponents(kValue);
    return launch_split_half_scores(grads, ScoreProducts::kWeightGrads, at<void>(plan_.grad_out_at), at<void>(plan_.value_at),
                                    stream_);
  }

  cudaError_t make_terms(const Slice& slice) const {
    SplitHalfScoreTermsParams terms = {};
    terms.batch = params_.batch;
    terms.slice = slice;
    terms.dropout = params_.dropout;
    terms.sequence = params_.sequence;
    terms.pitch = plan_.pitch;
    terms.weights = at<void>(plan_.weights_at);
    terms.grads = at<void>(plan_.grads_at);
    terms.segments = at<SplitHalfSegment>(plan_.segments_at);
    terms.grad_lse = params_.grad_lse;
    terms.row_values = at<SplitHalfRowValues>(plan_.row_values_at);
    terms.weight_exponents = at<int32_t>(plan_.tiles_at);
    terms.grad_exponents = terms.weight_exponents + plan_.tiles();
    terms.marks = at<uint8_t>(plan_.marks_at);
    terms.largest_grads = at<uint32_t>(plan_.largest_at);
    return launch_split_half_score_terms(terms, stream_);
  }

  cudaError_t make_gradients(const Slice& piece) const {
    const BackwardParams& p = params_;
    SplitHalfGradientsParams gradients = {};
    gradients.batch = p.batch;
    gradients.slice = piece;
    gradients.sequence = p.sequence;
    gradients.group = p.key_group;
    gradients.keys = keys_;
    gradients.pitch = plan_.pitch;
    gradients.weights = at<void>(plan_.weights_at);
    gradients.grads = at<void>(plan_.grads_at);
    gradients.weight_exponents = at<int32_t>(plan_.tiles_at);
    gradients.grad_exponents = gradients.weight_exponents + plan_.tiles();
    gradients.query_exponents = exponents(kQuery);
    gradients.key_exponents = exponents(kKey);
    gradients.grad_out_exponents = exponents(kGradOut);
    gradients.of[kGradQuery] = {p.grad_query, p.E, p.scale};
    gradients.of[kGradKey] = {p.grad_key, p.E, p.scale};
    gradients.of[kGradValue] = {p.grad_value, p.Ev, kept_factor(p.dropout)};
    gradients.ticket = at<unsigned>(plan_.ticket_at);
    return launch_split_half_gradients(gradients, at<void>(plan_.query_at), at<void>(plan_.key_at), at<void>(plan_.grad_out_at),
                                       stream_);
  }

  cudaError_t run_exact() const {
    const auto facts = [&](int operand) { return at<SplitHalfFacts>(0) + operand * params_.N; };
    return launch_split_half_exact_backward({params_, facts(kQuery), facts(kKey), facts(kValue), facts(kGradOut),
                                             at<uint8_t>(plan_.marks_at), at<uint32_t>(plan_.largest_at),
                                             at<SplitHalfRowValues>(plan_.exact_at)},
                                            stream_);
  }

  const BackwardParams& params_;
  cudaStream_t stream_;
  SplitHalfBackwardSlices plan_;
  int64_t keys_;  // that any row sees
};

}  // namespace

int64_t split_half_backward_workspace(const BackwardParams& params) { return plan_backward(params).bytes; }

bool split_half_backward_sums_mask(const BackwardParams&) { return false; }  // it is given no call that wants mask_grad

cudaError_t split_half_backward(const BackwardParams& params, cudaStream_t stream) { return Backward(params, stream).run(); }

}  // namespace attention_ext
