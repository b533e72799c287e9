// float32 attention by half terms: operands split, scores, weights . values for one slice after another; then what two half terms
// are not enough for, mostly nothing. Pure host code.
#include "attention/pipeline/stage.h"
#include "attention/sm90/split_half/split_half.h"
#include "attention/sm90/split_half/terms_map.h"
#include "core/device_info.h"
#include "core/operand.h"
#include "plan/split_half_slices.h"

namespace attention_ext {
namespace {

class Forward {
 public:
  Forward(const ForwardParams& params, cudaStream_t stream)
      : params_(params),
        stream_(stream),
        plan_(split_half_slices({params.N, params.L, params.S, params.E, params.Ev, params.key.group, params.value.group,
                                 params.sequence.causal, is_dense(params.batch, params.out, params.L, params.Ev)},
                                params.workspace_bytes, current_device_info().sms)) {}

  cudaError_t run() {
    cudaError_t status = cudaMemsetAsync(params_.workspace, 0, plan_.query_at, stream_);
    for (int64_t batch = 0; batch < params_.N; batch += plan_.matrices) {
      for (int64_t row = 0; row < params_.L; row += plan_.rows) {
        for (int64_t key = 0; key < params_.S; key += plan_.keys) {
          const Slice slice = {batch, std::min(plan_.matrices, params_.N - batch), row, std::min(plan_.rows, params_.L - row),
                               key,   std::min(plan_.keys, params_.S - key)};
          // No row sees a key from here on.
          if (params_.sequence.causal && key > 0 && key >= slice.row_begin + slice.row_count) break;
          if (status == cudaSuccess) status = run_slice(slice);
        }
      }
    }
    return status == cudaSuccess ? run_exact() : status;
  }

 private:
  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(params_.workspace) + offset);
  }
  SplitHalfFacts* facts(int operand) const { return at<SplitHalfFacts>(0) + operand * params_.N; }

  // Dense out, from a row on.
  void* out_at(int64_t n, int64_t row) const {
    return static_cast<float*>(params_.out.data) + (n * params_.L + row) * params_.Ev;
  }

  cudaError_t run_slice(const Slice& slice) const {
    const ForwardParams& p = params_;
    const int64_t end_matrix = slice.batch_begin + slice.batch_count;
    // What of out has not been written yet holds terms until then.
    void *query_terms = plan_.query_in_out ? out_at(slice.batch_begin, slice.row_begin) : at<void>(plan_.query_at),
         *key_terms = plan_.keys_in_out(end_matrix) ? out_at(end_matrix, 0) : at<void>(plan_.key_at),
         *value_terms = at<void>(plan_.value_at);
    int32_t* exponents[] = {at<int32_t>(plan_.exponents_at), at<int32_t>(plan_.exponents_at) + plan_.query_blocks(),
                            at<int32_t>(plan_.exponents_at) + plan_.query_blocks() + plan_.key_blocks()};
    const auto operand = [&](int number, const MatrixView& view, int64_t group, int64_t begin, int64_t rows, int64_t cols,
                             void* terms) {
      const bool keys = number > 0;
      return SplitHalfBlocksParams{p.batch,
                                   view,
                                   slice.batch_begin,
                                   group,
                                   matrices_of_slice(slice, group),
                                   begin,
                                   rows,
                                   cols,
                                   terms,
                                   exponents[number],
                                   facts(number),
                                   keys ? p.sequence.key_lengths : nullptr,
                                   p.sequence.heads,
                                   number == 2};
    };
    const SplitHalfBlocksParams operands[] = {
        operand(2, p.value, p.value.group, slice.col_begin, slice.col_count, p.Ev, value_terms),
        operand(1, p.key, p.key.group, slice.col_begin, slice.col_count, p.E, key_terms),
        operand(0, p.query, 1, slice.row_begin, slice.row_count, p.E, query_terms)};
    // The query's terms outlast slices of keys. Those of values, where they lie in the place of the keys', wait for the scores.
    const auto split = [&](int first, int end) { return launch_split_half_blocks(operands + first, end - first, stream_); };
    const bool apart = plan_.apart(end_matrix);
    cudaError_t status = split(apart ? 0 : 1, slice.col_begin == 0 ? 3 : 2);
    if (status != cudaSuccess) return status;

    SplitHalfScoresParams scores = {};
    scores.batch = p.batch;
    scores.slice = slice;
    scores.dropout = p.dropout;
    scores.sequence = p.sequence;
    scores.weights = at<void>(plan_.weights_at);
    scores.segments = at<SplitHalfSegment>(plan_.segments_at);
    scores.L = p.L;
    scores.marks = at<uint8_t>(plan_.marks_at);
    scores.E = p.E;
    scores.scale = p.scale;
    scores.mask = p.mask;
    scores.mask_type = p.mask_type;
    scores.key_group = p.key.group;
    scores.query_exponents = exponents[0];
    scores.key_exponents = exponents[1];
    scores.Ev = p.Ev;
    scores.factor = kept_factor(p.dropout);
    scores.value_group = p.value.group;
    scores.value_exponents = exponents[2];
    scores.out = p.out;
    scores.lse = p.lse;
    if (plan_.fused) {
      return launch_split_half_fused(scores, query_terms, key_terms, value_terms, stream_);
    }
    status = launch_split_half_scores(scores, ScoreProducts::kWeightTerms, query_terms, key_terms, stream_);
    if (status == cudaSuccess && !apart) status = split(0, 1);
    if (status != cudaSuccess) return status;

    // States are read and written by CTAs of different columns: two arrays, in turn.
    const int64_t parity = slice.col_begin / plan_.keys % 2, states = plan_.matrices * plan_.rows;
    SplitHalfValuesParams values = {};
    static_cast<SplitHalfStage&>(values) = scores;
    values.S = p.S;
    values.before = at<SplitHalfRowState>(plan_.states_at) + parity * states;
    values.after = at<SplitHalfRowState>(plan_.states_at) + (1 - parity) * states;
    return launch_split_half_values(values, value_terms, stream_);
  }

  cudaError_t run_exact() const {
    return launch_split_half_exact({params_, facts(0), facts(1), facts(2), at<uint8_t>(plan_.marks_at)}, stream_);
  }

  const ForwardParams& params_;
  cudaStream_t stream_;
  SplitHalfSlices plan_;
};

}  // namespace

cudaError_t split_half_forward(const ForwardParams& params, cudaStream_t stream) { return Forward(params, stream).run(); }

}  // namespace attention_ext
