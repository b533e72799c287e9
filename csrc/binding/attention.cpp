// sdpa_forward and sdpa_backward on CUDA, for torch's stable ABI. A body: check, allocate, fill, launch.

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>

#include "attention/pipeline/params.h"
#include "attention/sm90/fused/fused.h"
#include "attention/sm90/pipeline/backward.h"
#include "attention/sm90/pipeline/pipeline.h"
#include "attention/sm90/rows/rows.h"
#include "attention/sm90/rows_backward/rows_backward.h"
#include "attention/sm90/split_half/backward.h"
#include "binding/checks.h"
#include "binding/choice.h"

namespace attention_ext {
namespace {

// What runs the rows of kForwardKernels and of kBackwardKernels, in their order.
using ForwardLauncher = cudaError_t (*)(const ForwardParams&, cudaStream_t);
constexpr ForwardLauncher kForwardLaunchers[] = {pipeline_forward,   rows_forward,   fused_forward_512,
                                                 fused_forward_1024, wgmma_pipeline, split_half_forward};
static_assert(std::size(kForwardLaunchers) == std::tuple_size_v<ForwardTable>);
struct BackwardLauncher {
  cudaError_t (*run)(const BackwardParams&, cudaStream_t);
  int64_t (*workspace)(const BackwardParams&);
  bool (*sums_mask)(const BackwardParams&);  // whether it wants mask_sums
};
constexpr BackwardLauncher kBackwardLaunchers[] = {
    {pipeline_backward, pipeline_backward_workspace, pipeline_backward_sums_mask},
    {rows_backward, rows_backward_workspace, rows_backward_sums_mask},
    {wgmma_backward, wgmma_backward_workspace, wgmma_backward_sums_mask},
    {split_half_backward, split_half_backward_workspace, split_half_backward_sums_mask},
};
static_assert(std::size(kBackwardLaunchers) == std::tuple_size_v<BackwardTable>);

// What a forward and a backward call begin with: the sizes, the scale, and the views of query, key and value.
Views views_of_operands(ForwardParams& params, const Tensor& query, const Tensor& key, const Tensor& value,
                        std::optional<double> scale, bool enable_gqa) {
  params.type = check_inputs(query, key, &value, enable_gqa);
  Views views(enable_gqa);
  views.broadcast("query", query, 2);
  views.broadcast("key", key, 2);
  views.broadcast("value", value, 2);
  params.N = views.count();
  params.L = query.size(query.dim() - 2);
  params.S = key.size(key.dim() - 2);
  params.E = query.size(query.dim() - 1);
  params.Ev = value.size(value.dim() - 1);
  params.scale = scale_or_default(scale, params.E);
  views.add(params.query, query);
  views.add(params.key, key);
  views.add(params.value, value);
  return views;
}

// A forward call: what the kernels get, but for the workspace, and which of them runs.
struct ForwardCall {
  ForwardParams params;
  size_t row;  // of kForwardKernels
  int64_t workspace;
  bool preferred;  // told with a reason alone
};

// Checks a call and chooses its kernel, the same for a call that runs and for one that is only explained: with `out` and `lse` null
// nothing is allocated.
ForwardCall forward_call(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
                         const Dropout& dropout, bool is_causal, std::optional<double> scale, bool enable_gqa,
                         int64_t workspace_bytes, const std::string& kernel_name, const OptionalTensor& key_lengths,
                         Tensor* out, Tensor* lse, std::string* reason) {
  ForwardCall call = {};
  ForwardParams& params = call.params;
  Views views = views_of_operands(params, query, key, value, scale, enable_gqa);
  const int32_t device = query.get_device_index();
  params.dropout = dropout;
  params.sequence = check_sequence(is_causal, key_lengths, query, views.batch_sizes());

  const Sizes out_sizes = views.with({params.L, params.Ev}), lse_sizes = views.with({params.L});
  const Sizes out_strides = layout_like(out_sizes, query), lse_strides = contiguous_strides(lse_sizes);
  const ScalarType type = query.scalar_type(), accumulator = accumulator_type(params.type);
  if (out != nullptr) *out = allocate(out_sizes, out_strides, type, device);
  if (lse != nullptr) *lse = allocate(lse_sizes, lse_strides, accumulator, device);

  views.add(params.out, out == nullptr ? nullptr : data_of(*out), out_sizes, out_strides, type);
  views.add(params.lse, lse == nullptr ? nullptr : data_of(*lse), lse_sizes, lse_strides, accumulator, 1);
  params.mask_type = check_mask(attn_mask, query, views.with({params.L, params.S}), is_causal, params.mask, views);
  views.finish(params.batch);
  if (is_causal) params.S = std::min(params.S, params.L);  // no query sees the keys after the last one
  params.workspace_bytes = workspace_bytes;
  if (query.dim() > 3 || enable_gqa) group_heads_of_one_key(params, views.batch_sizes().back());
  const Problem problem = problem_of(params, params.key.group, params.value.group);
  const DeviceInfo card = device_info(device);
  call.row = choose_row(kForwardKernels, kernel_name, problem, card, workspace_bytes, reason);
  call.workspace = kForwardKernels[call.row].workspace(problem, card, workspace_bytes);
  call.preferred = reason != nullptr && kernel_name == "auto" && preferred(problem, card);
  return call;
}

std::tuple<Tensor, Tensor> sdpa_forward(Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask, OptionalTensor seed,
                                        double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
                                        int64_t workspace_bytes, std::string kernel_name, OptionalTensor key_lengths) {
  const char* op = "sdpa_forward";
  check_defined("query", query);
  const int32_t device = query.get_device_index();
  const OperatorScope scope(device);
  Tensor out, lse;
  const Dropout dropout = check_dropout(dropout_p, seed, query);
  ForwardCall call = forward_call(query, key, value, attn_mask, dropout, is_causal, scale, enable_gqa, workspace_bytes,
                                  kernel_name, key_lengths, &out, &lse, nullptr);
  std::optional<Tensor> workspace;
  if (call.workspace > 0) {
    workspace = allocate_bytes(call.workspace, device);
    call.params.workspace = data_of(*workspace);
  }
  check_status(op, kForwardLaunchers[call.row](call.params, current_stream(device)), device);
  return {out, lse};
}

Tensor sdpa_out(Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask, bool is_causal, std::optional<double> scale,
                bool enable_gqa) {
  constexpr int64_t kWorkspaceBytes = 134217728;  // the schema's default
  return std::get<0>(
      sdpa_forward(query, key, value, attn_mask, {}, 0.0, is_causal, scale, enable_gqa, kWorkspaceBytes, "auto", {}));
}

// What sdpa_forward would run for these arguments.
std::tuple<std::string, std::string, int64_t, bool> sdpa_plan(Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask,
                                                              double dropout_p, bool is_causal, std::optional<double> scale,
                                                              bool enable_gqa, int64_t workspace_bytes, std::string kernel_name,
                                                              OptionalTensor key_lengths) {
  check_defined("query", query);
  static constexpr int64_t kAnySeed = 0;  // kernels ask whether there is one, and here none of them runs
  const Dropout dropout = rounded_dropout(dropout_p, &kAnySeed);
  std::string reason;
  const ForwardCall call = forward_call(query, key, value, attn_mask, dropout, is_causal, scale, enable_gqa, workspace_bytes,
                                        kernel_name, key_lengths, nullptr, nullptr, &reason);
  return {kForwardKernels[call.row].name, reason, call.workspace, call.preferred};
}

void clear(const char* op, const Tensor& tensor, cudaStream_t stream, int32_t device) {
  const int64_t bytes = tensor.numel() * element_size(tensor.scalar_type());
  if (bytes > 0) check_status(op, cudaMemsetAsync(data_of(tensor), 0, bytes, stream), device);
}

// A backward call: what the kernels get, but for the workspace, and which of them runs.
struct BackwardCall {
  BackwardParams params;
  size_t row;                                          // of kBackwardKernels
  Tensor grad_query, grad_key, grad_value, grad_mask;  // allocated if the call is to run
};

// As forward_call. reason: null for a call that runs.
BackwardCall backward_call(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
                           const Tensor& value, const OptionalTensor& attn_mask, const Tensor& out, const Tensor& lse,
                           const OptionalTensor& seed, double dropout_p, bool is_causal, std::optional<double> scale,
                           bool enable_gqa, bool mask_grad, bool wide_grads, int64_t workspace_bytes,
                           const std::string& kernel_name, const OptionalTensor& key_lengths, std::string* reason) {
  BackwardCall call = {};
  BackwardParams& params = call.params;
  Views views = views_of_operands(params, query, key, value, scale, enable_gqa);
  const int32_t device = query.get_device_index();
  const ScalarType type = query.scalar_type(), accumulator = accumulator_type(params.type);
  params.dropout = check_dropout(dropout_p, seed, query);
  params.sequence = check_sequence(is_causal, key_lengths, query, views.batch_sizes());

  // The operands have one set of leading dims; only the heads of key and value may be fewer.
  const Sizes out_sizes = views.with({params.L, params.Ev}), lse_sizes = views.with({params.L});
  const auto with_own_tail = [&](const Tensor& tensor) {
    Sizes sizes = views.with({0, 0});
    const Sizes own = sizes_of(tensor);
    std::copy(own.end() - (enable_gqa ? 3 : 2), own.end(), sizes.end() - (enable_gqa ? 3 : 2));
    return sizes;
  };
  const Sizes key_sizes = with_own_tail(key), value_sizes = with_own_tail(value);
  check_shape("query", query, with_own_tail(query), type, query, 2);
  check_shape("key", key, key_sizes, type, query, 2);
  check_shape("value", value, value_sizes, type, query, 2);
  check_shape("grad_out", grad_out, out_sizes, type, query, 2);
  check_shape("out", out, out_sizes, type, query, 2);
  check_shape("lse", lse, lse_sizes, accumulator, query, 1);
  const bool has_grad_lse = grad_lse.has_value() && grad_lse->defined();
  if (has_grad_lse) check_shape("grad_lse", *grad_lse, lse_sizes, accumulator, query, 1);
  const auto group_of = [&](const Sizes& own) {
    return !enable_gqa || own[own.size() - 3] == 0 ? 1 : std::max<int64_t>(views.batch_sizes().back() / own[own.size() - 3], 1);
  };
  params.key_group = group_of(key_sizes);
  params.value_group = group_of(value_sizes);

  const ScalarType grad_type = wide_grads ? accumulator : type;
  params.wide_grads = wide_grads;

  views.add(params.out, out);
  views.add(params.grad_out, grad_out);
  views.add(params.lse, lse, 1);
  if (has_grad_lse) views.add(params.grad_lse, *grad_lse, 1);
  const auto add_result = [&](MatrixView& view, Tensor& grad, const Sizes& sizes, const Tensor& like, ScalarType grad_dtype) {
    const Sizes strides = layout_like(sizes, like);
    if (reason == nullptr) grad = allocate(sizes, strides, grad_dtype, device);
    views.add(view, reason == nullptr ? data_of(grad) : nullptr, sizes, strides, grad_dtype);
  };
  add_result(params.grad_query, call.grad_query, sizes_of(query), query, grad_type);
  add_result(params.grad_key, call.grad_key, key_sizes, key, grad_type);
  add_result(params.grad_value, call.grad_value, value_sizes, value, grad_type);
  params.mask_type = check_mask(attn_mask, query, views.with({params.L, params.S}), is_causal, params.mask, views);

  if (mask_grad) {
    if (params.mask_type == MaskType::kNone || params.mask_type == MaskType::kBool) {
      fail("mask_grad", "False where attn_mask is None or of dtype bool", "True");
    }
    add_result(params.mask_grad, call.grad_mask, sizes_of(*attn_mask), *attn_mask, attn_mask->scalar_type());
  } else if (reason == nullptr) {
    call.grad_mask = allocate({0}, {1}, type, device);
  }
  views.finish(params.batch);
  params.workspace_bytes = workspace_bytes;
  Problem problem = problem_of(params, params.key_group, params.value_group);
  problem.mask_grad = mask_grad;
  problem.grad_out = operand_of(params.batch, params.grad_out, params.L, element_bytes(params.type));
  call.row = choose_row(kBackwardKernels, kernel_name, problem, device_info(device), workspace_bytes, reason);
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sdpa_backward(Tensor grad_out, OptionalTensor grad_lse, Tensor query, Tensor key,
                                                         Tensor value, OptionalTensor attn_mask, Tensor out, Tensor lse,
                                                         OptionalTensor seed, double dropout_p, bool is_causal,
                                                         std::optional<double> scale, bool enable_gqa, bool mask_grad,
                                                         bool wide_grads, int64_t workspace_bytes, std::string kernel_name,
                                                         OptionalTensor key_lengths) {
  const char* op = "sdpa_backward";
  check_defined("query", query);
  const int32_t device = query.get_device_index();
  const OperatorScope scope(device);
  BackwardCall call =
      backward_call(grad_out, grad_lse, query, key, value, attn_mask, out, lse, seed, dropout_p, is_causal, scale, enable_gqa,
                    mask_grad, wide_grads, workspace_bytes, kernel_name, key_lengths, nullptr);
  BackwardParams& params = call.params;
  const BackwardLauncher& kernel = kBackwardLaunchers[call.row];
  const cudaStream_t stream = current_stream(device);
  const Tensor& grad_mask = call.grad_mask;
  if (params.N > 0 && params.L > 0) {
    Tensor workspace = allocate_bytes(kernel.workspace(params), device), mask_sums = grad_mask;
    params.workspace = data_of(workspace);
    if (mask_grad && kernel.sums_mask(params)) {  // in the result itself if that is its dtype
      const Sizes sizes = sizes_of(grad_mask);
      const ScalarType accumulator = accumulator_type(params.type);
      if (grad_mask.scalar_type() != accumulator) mask_sums = allocate(sizes, strides_of(grad_mask), accumulator, device);
      params.mask_sums = data_of(mask_sums);
    }
    check_status(op, kernel.run(params, stream), device);
  } else {  // no query reads the keys
    for (const Tensor& grad : {call.grad_key, call.grad_value, grad_mask}) clear(op, grad, stream, device);
  }
  return {call.grad_query, call.grad_key, call.grad_value, grad_mask};
}

// What sdpa_backward would run for these arguments.
std::tuple<std::string, std::string> sdpa_backward_plan(Tensor grad_out, OptionalTensor grad_lse, Tensor query, Tensor key,
                                                        Tensor value, OptionalTensor attn_mask, Tensor out, Tensor lse,
                                                        OptionalTensor seed, double dropout_p, bool is_causal,
                                                        std::optional<double> scale, bool enable_gqa, bool mask_grad,
                                                        bool wide_grads, int64_t workspace_bytes, std::string kernel_name,
                                                        OptionalTensor key_lengths) {
  check_defined("query", query);
  std::string reason;
  const BackwardCall call =
      backward_call(grad_out, grad_lse, query, key, value, attn_mask, out, lse, seed, dropout_p, is_causal, scale, enable_gqa,
                    mask_grad, wide_grads, workspace_bytes, kernel_name, key_lengths, &reason);
  return {kBackwardKernels[call.row].name, reason};
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CUDA, m) {
  m.impl("sdpa_forward", TORCH_BOX(&attention_ext::sdpa_forward));
  m.impl("_sdpa_out", TORCH_BOX(&attention_ext::sdpa_out));
  m.impl("sdpa_backward", TORCH_BOX(&attention_ext::sdpa_backward));
  m.impl("sdpa_plan", TORCH_BOX(&attention_ext::sdpa_plan));
  m.impl("sdpa_backward_plan", TORCH_BOX(&attention_ext::sdpa_backward_plan));
}
