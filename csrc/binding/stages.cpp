// The pipeline's three stages as operators of their own on CUDA: qk_scores, row_softmax, scores_values. For tests,
// timing and teaching; whole problems at once, results contiguous. A body: check, allocate, fill, launch.

#include <tuple>

#include "attention/pipeline/params.h"
#include "binding/checks.h"
#include "core/arithmetic.h"

namespace attention_ext {
namespace {

// The whole problem as one slice: rows, columns and matrices of a slice are then those of the tensors.
Slice whole(int64_t N, int64_t L, int64_t S) { return {0, N, 0, L, 0, S}; }

Tensor qk_scores(Tensor query, Tensor key, OptionalTensor attn_mask, bool is_causal, std::optional<double> scale,
                 bool enable_gqa) {
  const char* op = "qk_scores";
  QkScoresParams params = {};
  params.type = check_inputs(query, key, nullptr, enable_gqa);
  const int32_t device = query.get_device_index();
  const OperatorScope scope(device);
  Views views(enable_gqa);
  views.broadcast("query", query, 2);
  views.broadcast("key", key, 2);
  const int64_t L = query.size(query.dim() - 2), S = key.size(key.dim() - 2);
  params.slice = whole(views.count(), L, S);
  params.E = query.size(query.dim() - 1);
  params.scale = scale_or_default(scale, params.E);
  params.sequence.causal = is_causal;
  params.write_hidden_tiles = true;
  params.output = ScoresAs::kScores;

  const Sizes sizes = views.with({L, S});
  Tensor scores = allocate(sizes, contiguous_strides(sizes), accumulator_type(params.type), device);
  views.add(params.query, query);
  views.add(params.key, key);
  views.add(params.out, scores);
  params.mask_type = check_mask(attn_mask, query, sizes, is_causal, params.mask, views);
  views.finish(params.batch);

  check_status(op, launch_qk_scores(params, current_stream(device)), device);
  return scores;
}

std::tuple<Tensor, Tensor, Tensor> row_softmax(Tensor scores, std::string dtype) {
  const char* op = "row_softmax";
  check_defined("scores", scores);
  const int32_t device = scores.get_device_index();
  const bool is_double = dtype == "float64";
  const ScalarType accumulator = is_double ? ScalarType::Double : ScalarType::Float;
  const ScalarType type = is_double             ? ScalarType::Double
                          : dtype == "float32"  ? ScalarType::Float
                          : dtype == "float16"  ? ScalarType::Half
                          : dtype == "bfloat16" ? ScalarType::BFloat16
                                                : ScalarType::Undefined;
  if (type == ScalarType::Undefined) fail("dtype", "float16, bfloat16, float32 or float64", "\"" + dtype + "\"");
  if (scores.dim() < 2 || scores.scalar_type() != accumulator) {
    fail("scores", "rank 2 or more and " + text(accumulator) + " for " + dtype + " weights",
         shape_of(scores) + ", " + text(scores.scalar_type()));
  }
  check_limits("scores", scores, 2);
  const OperatorScope scope(device);
  Views views(false);
  views.broadcast("scores", scores, 2);
  const int64_t L = scores.size(scores.dim() - 2), S = scores.size(scores.dim() - 1);

  const Sizes sizes = views.with({L, S}), row_sizes = views.with({L});
  Tensor weights = allocate(sizes, contiguous_strides(sizes), type, device);
  Tensor row_sum = allocate(row_sizes, contiguous_strides(row_sizes), accumulator, device);
  Tensor lse = allocate(row_sizes, contiguous_strides(row_sizes), accumulator, device);

  RowSoftmaxParams params = {};
  params.slice = whole(views.count(), L, S);
  params.type = data_type("weights", weights);
  views.add(params.scores, scores);
  views.add(params.weights, weights);
  views.add(params.row_sum, row_sum, 1);
  views.add(params.lse, lse, 1);
  views.finish(params.batch);
  check_status(op, launch_row_softmax(params, current_stream(device)), device);
  return {weights, row_sum, lse};
}

Tensor scores_values(Tensor weights, Tensor row_sum, Tensor value, bool enable_gqa) {
  const char* op = "scores_values";
  const int64_t tail = enable_gqa ? 3 : 2;
  check_operand("weights", weights, weights, tail, "weights'");
  check_operand("value", value, weights, tail, "weights'");
  const int32_t device = weights.get_device_index();
  ScoresValuesParams params = {};
  params.type = data_type("weights", weights);
  const int64_t L = weights.size(weights.dim() - 2), S = weights.size(weights.dim() - 1);
  const Sizes whole_sizes = sizes_of(weights), own_sizes = sizes_of(value);
  const Sizes row_sizes(whole_sizes.begin(), whole_sizes.end() - 1);
  check_shape("row_sum", row_sum, row_sizes, accumulator_type(params.type), weights, 1);
  if (value.size(value.dim() - 2) != S) {
    fail("value", "the weights' last size S = " + std::to_string(S) + " as its second to last size", shape_of(value));
  }
  bool fits = own_sizes.size() <= whole_sizes.size();
  for (size_t i = tail + 1; fits && i <= own_sizes.size(); ++i) {
    const int64_t size = own_sizes[own_sizes.size() - i];
    fits = size == 1 || size == whole_sizes[whole_sizes.size() - i];
  }
  if (!fits) fail("value", "leading dimensions that broadcast to the weights' " + shape_of(weights), shape_of(value));
  const OperatorScope scope(device);
  Views views(enable_gqa);
  views.broadcast("weights", weights, 2);
  views.broadcast("value", value, 2);
  params.slice = whole(views.count(), L, S);
  params.Ev = value.size(value.dim() - 1);
  params.factor = 1.0;

  const Sizes sizes = views.with({L, params.Ev});
  Tensor out = allocate(sizes, contiguous_strides(sizes), value.scalar_type(), device);
  views.add(params.weights, weights);
  views.add(params.row_sum, row_sum, 1);
  views.add(params.values, value);
  views.add(params.out, out);
  views.finish(params.batch);
  const int64_t carry_bytes = views.count() * L * carry_row_bytes(S, params.Ev, element_bytes(params.type));
  Tensor carry = allocate_bytes(carry_bytes, device);
  params.carry = carry_bytes > 0 ? data_of(carry) : nullptr;

  check_status(op, launch_scores_values(params, current_stream(device)), device);
  return out;
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CUDA, m) {
  m.impl("qk_scores", TORCH_BOX(&attention_ext::qk_scores));
  m.impl("row_softmax", TORCH_BOX(&attention_ext::row_softmax));
  m.impl("scores_values", TORCH_BOX(&attention_ext::scores_values));
}
