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
  params.type = check_inputs(op, query, key, nullptr);
  const int32_t device = query.get_device_index();
  const OperatorScope scope(device);
  Views views(op, enable_gqa);
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
  params.mask_type = check_mask(op, attn_mask, query, sizes, is_causal, params.mask, views);
  views.finish(params.batch);

  check_status(op, launch_qk_scores(params, current_stream(device)), device);
  return scores;
}

std::tuple<Tensor, Tensor, Tensor> row_softmax(Tensor scores, std::string dtype) {
  const char* op = "row_softmax";
  if (!scores.defined()) fail(op, "scores", "a tensor", "None");
  const int32_t device = scores.get_device_index();
  check_tensor(op, "scores", scores, 2, device);
  const bool is_double = dtype == "float64";
  const ScalarType accumulator = is_double ? ScalarType::Double : ScalarType::Float;
  const ScalarType type = is_double             ? ScalarType::Double
                          : dtype == "float32"  ? ScalarType::Float
                          : dtype == "float16"  ? ScalarType::Half
                          : dtype == "bfloat16" ? ScalarType::BFloat16
                                                : ScalarType::Undefined;
  if (type == ScalarType::Undefined) fail(op, "dtype", "float16, bfloat16, float32 or float64", dtype);
  check_type(op, "scores", scores, accumulator);
  const OperatorScope scope(device);
  Views views(op, false);
  views.broadcast("scores", scores, 2);
  const int64_t L = scores.size(scores.dim() - 2), S = scores.size(scores.dim() - 1);

  const Sizes sizes = views.with({L, S}), row_sizes = views.with({L});
  Tensor weights = allocate(sizes, contiguous_strides(sizes), type, device);
  Tensor row_sum = allocate(row_sizes, contiguous_strides(row_sizes), accumulator, device);
  Tensor lse = allocate(row_sizes, contiguous_strides(row_sizes), accumulator, device);

  RowSoftmaxParams params = {};
  params.slice = whole(views.count(), L, S);
  params.type = data_type(op, "weights", weights);
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
  if (!weights.defined()) fail(op, "weights", "a tensor", "None");
  const int32_t device = weights.get_device_index();
  check_tensor(op, "weights", weights, 2, device);
  check_tensor(op, "row_sum", row_sum, 1, device);
  check_tensor(op, "value", value, 2, device);
  ScoresValuesParams params = {};
  params.type = data_type(op, "weights", weights);
  check_type(op, "value", value, weights.scalar_type());
  check_type(op, "row_sum", row_sum, accumulator_type(params.type));
  const int64_t L = weights.size(weights.dim() - 2), S = weights.size(weights.dim() - 1);
  Sizes row_sizes = sizes_of(weights);
  row_sizes.pop_back();
  check_sizes(op, "row_sum", row_sum, row_sizes);
  if (value.size(value.dim() - 2) != S) {
    fail(op, "value", std::to_string(S) + " rows as weights has columns", std::to_string(value.size(value.dim() - 2)));
  }
  const OperatorScope scope(device);
  Views views(op, enable_gqa);
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
