// sdpa_forward and sdpa_backward on CUDA, for torch's stable ABI. A body: check, allocate, fill, launch.

#include <algorithm>
#include <numeric>
#include <tuple>

#include "attention/pipeline/params.h"
#include "attention/sm90/fused/fused.h"
#include "binding/checks.h"
#include "binding/choice.h"

namespace attention_ext {
namespace {

Dropout check_dropout(const char* op, double p, const OptionalTensor& seed, int32_t device) {
  if (!(p >= 0.0 && p <= 1.0)) fail(op, "dropout_p", "a number from 0 to 1", std::to_string(p));
  if (p == 0.0) return {};
  if (!seed.has_value() || !seed->defined()) fail(op, "seed", "a tensor when dropout_p is not 0", "None");
  check_tensor(op, "seed", *seed, 0, device);
  check_type(op, "seed", *seed, ScalarType::Long);
  if (seed->numel() != 1) fail(op, "seed", "one element", "shape " + text(sizes_of(*seed)));
  return {static_cast<const int64_t*>(data_of(*seed)), static_cast<uint64_t>(p * 4294967296.0),
          p == 1.0 ? 0.0 : 1.0 / (1.0 - p)};
}

// A forward call: what the kernels get, but for the workspace, and which of them runs.
struct ForwardCall {
  ForwardParams params;
  Plan plan;
};

// Checks a call and chooses its kernel, the same for a call that runs and for one that is only explained: with `out` and `lse` null
// nothing is allocated.
ForwardCall forward_call(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                         const OptionalTensor& attn_mask, const Dropout& dropout, bool is_causal, std::optional<double> scale,
                         bool enable_gqa, int64_t workspace_bytes, const std::string& kernel_name,
                         const OptionalTensor& key_lengths, Tensor* out, Tensor* lse) {
  ForwardCall call = {};
  ForwardParams& params = call.params;
  params.type = check_inputs(op, query, key, &value);
  const int32_t device = query.get_device_index();
  Views views(op, enable_gqa);
  views.broadcast("query", query, 2);
  views.broadcast("key", key, 2);
  views.broadcast("value", value, 2);
  params.N = views.count();
  params.L = query.size(query.dim() - 2);
  params.S = key.size(key.dim() - 2);
  params.E = query.size(query.dim() - 1);
  params.Ev = value.size(value.dim() - 1);
  params.scale = scale_or_default(scale, params.E);
  params.dropout = dropout;
  params.sequence = check_sequence(op, is_causal, key_lengths, query, views.batch_sizes());

  const Sizes out_sizes = views.with({params.L, params.Ev}), lse_sizes = views.with({params.L});
  const Sizes out_strides = layout_like(out_sizes, query), lse_strides = contiguous_strides(lse_sizes);
  const ScalarType type = query.scalar_type(), accumulator = accumulator_type(params.type);
  if (out != nullptr) *out = allocate(out_sizes, out_strides, type, device);
  if (lse != nullptr) *lse = allocate(lse_sizes, lse_strides, accumulator, device);

  views.add(params.query, query);
  views.add(params.key, key);
  views.add(params.value, value);
  views.add(params.out, out == nullptr ? nullptr : data_of(*out), out_sizes, out_strides, type);
  views.add(params.lse, lse == nullptr ? nullptr : data_of(*lse), lse_sizes, lse_strides, accumulator, 1);
  params.mask_type = check_mask(op, attn_mask, query, views.with({params.L, params.S}), is_causal, params.mask, views);
  views.finish(params.batch);
  if (is_causal) params.S = std::min(params.S, params.L);  // no query sees the keys after the last one
  params.workspace_bytes = workspace_bytes;
  call.plan = choose_kernel(op, kernel_name, params, not_for_tma(params, query, key, value), device);
  params.wgmma_products = call.plan.kernel == Kernel::kSm90Pipeline;
  const bool sliced = call.plan.kernel == Kernel::kPipeline || call.plan.kernel == Kernel::kSm90Pipeline;
  call.plan.workspace_bytes = sliced ? pipeline_forward_workspace(params) : 0;
  return call;
}

std::tuple<Tensor, Tensor> sdpa_forward(Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask, OptionalTensor seed,
                                        double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
                                        bool /*allow_tf32*/, int64_t workspace_bytes, std::string kernel_name,
                                        OptionalTensor key_lengths) {
  const char* op = "sdpa_forward";
  if (!query.defined()) fail(op, "query", "a tensor", "None");
  const int32_t device = query.get_device_index();
  const OperatorScope scope(device);
  Tensor out, lse;
  const Dropout dropout = check_dropout(op, dropout_p, seed, device);
  auto [params, plan] = forward_call(op, query, key, value, attn_mask, dropout, is_causal, scale, enable_gqa, workspace_bytes,
                                     kernel_name, key_lengths, &out, &lse);
  switch (plan.kernel) {
    case Kernel::kSm90Fused512: check_status(op, fused_forward_512(params, current_stream(device)), device); return {out, lse};
    case Kernel::kSm90Fused1024:
      check_status(op, fused_forward_1024(params, current_stream(device)), device);
      return {out, lse};
    case Kernel::kPipeline:
    case Kernel::kSm90Pipeline: {
      Tensor workspace = allocate_bytes(plan.workspace_bytes, device);
      params.workspace = data_of(workspace);
      check_status(op, pipeline_forward(params, current_stream(device)), device);
      return {out, lse};
    }
  }
  throw std::runtime_error("attention_ext: the plan named a kernel that sdpa_forward does not have");
}

// What sdpa_forward would run for these arguments.
std::tuple<std::string, std::string, int64_t, bool> sdpa_plan(Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask,
                                                              double dropout_p, bool is_causal, std::optional<double> scale,
                                                              bool enable_gqa, int64_t workspace_bytes, std::string kernel_name,
                                                              OptionalTensor key_lengths) {
  const char* op = "sdpa_plan";
  if (!query.defined()) fail(op, "query", "a tensor", "None");
  static constexpr int64_t kAnySeed = 0;  // kernels ask whether there is one, and here none of them runs
  const Dropout dropout = {dropout_p > 0.0 ? &kAnySeed : nullptr, 0, 1.0};
  const Plan plan = forward_call(op, query, key, value, attn_mask, dropout, is_causal, scale, enable_gqa, workspace_bytes,
                                 kernel_name, key_lengths, nullptr, nullptr)
                        .plan;
  return {attention_ext::kernel_name(plan.kernel), plan.reason, plan.workspace_bytes, plan.preferred};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sdpa_backward(Tensor grad_out, OptionalTensor grad_lse, Tensor query, Tensor key,
                                                         Tensor value, OptionalTensor attn_mask, Tensor out, Tensor lse,
                                                         OptionalTensor seed, double dropout_p, bool is_causal,
                                                         std::optional<double> scale, bool enable_gqa, bool /*allow_tf32*/,
                                                         bool /*deterministic: always*/, bool mask_grad, bool wide_grads,
                                                         int64_t workspace_bytes, std::string kernel_name,
                                                         OptionalTensor key_lengths) {
  const char* op = "sdpa_backward";
  if (kernel_name != "auto" && kernel_name != "pipeline")
    fail(op, "kernel_name", "\"auto\" or \"pipeline\"", "\"" + kernel_name + "\"");
  BackwardParams params = {};
  params.type = check_inputs(op, query, key, &value);
  const int32_t device = query.get_device_index();
  const OperatorScope scope(device);
  const ScalarType type = query.scalar_type(), accumulator = accumulator_type(params.type);
  Views views(op, enable_gqa);
  views.broadcast("query", query, 2);
  params.N = views.count();
  params.L = query.size(query.dim() - 2);
  params.S = key.size(key.dim() - 2);
  params.E = query.size(query.dim() - 1);
  params.Ev = value.size(value.dim() - 1);
  params.scale = scale_or_default(scale, params.E);
  params.dropout = check_dropout(op, dropout_p, seed, device);
  params.sequence = check_sequence(op, is_causal, key_lengths, query, views.batch_sizes());

  // The leading dims are the query's, without broadcasting; only the heads of key and value may be fewer.
  const Sizes out_sizes = views.with({params.L, params.Ev}), lse_sizes = views.with({params.L});
  Sizes key_sizes = views.batch_sizes(), value_sizes = key_sizes;
  if (enable_gqa) {
    views.broadcast("key", key, 2);
    views.broadcast("value", value, 2);
    key_sizes.back() = key.size(key.dim() - 3);
    value_sizes.back() = value.size(value.dim() - 3);
  }
  const auto group_of = [&](const Sizes& own) {
    return own.empty() || own.back() == 0 ? 1 : std::max<int64_t>(views.batch_sizes().back() / own.back(), 1);
  };
  params.key_group = group_of(key_sizes);
  params.value_group = group_of(value_sizes);
  params.group = std::lcm(params.key_group, params.value_group);
  key_sizes.insert(key_sizes.end(), {params.S, params.E});
  value_sizes.insert(value_sizes.end(), {params.S, params.Ev});
  check_sizes(op, "key", key, key_sizes);
  check_sizes(op, "value", value, value_sizes);
  const bool has_grad_lse = grad_lse.has_value() && grad_lse->defined();
  check_tensor(op, "grad_out", grad_out, 2, device);
  check_tensor(op, "out", out, 2, device);
  check_tensor(op, "lse", lse, 1, device);
  if (has_grad_lse) check_tensor(op, "grad_lse", *grad_lse, 1, device);
  check_sizes(op, "grad_out", grad_out, out_sizes);
  check_sizes(op, "out", out, out_sizes);
  check_sizes(op, "lse", lse, lse_sizes);
  if (has_grad_lse) check_sizes(op, "grad_lse", *grad_lse, lse_sizes);
  check_type(op, "grad_out", grad_out, type);
  check_type(op, "out", out, type);
  check_type(op, "lse", lse, accumulator);
  if (has_grad_lse) check_type(op, "grad_lse", *grad_lse, accumulator);

  const ScalarType grad_type = wide_grads ? accumulator : type;
  params.wide_grads = wide_grads;
  Tensor grad_query = allocate(sizes_of(query), layout_like(sizes_of(query), query), grad_type, device);
  Tensor grad_key = allocate(key_sizes, layout_like(key_sizes, key), grad_type, device);
  Tensor grad_value = allocate(value_sizes, layout_like(value_sizes, value), grad_type, device);
  const int64_t row_bytes = params.N * params.L * accumulator_bytes(params.type);
  Tensor row_values = allocate_bytes(2 * row_bytes, device);  // delta and norm

  views.add(params.query, query);
  views.add(params.key, key);
  views.add(params.value, value);
  views.add(params.out, out);
  views.add(params.grad_out, grad_out);
  views.add(params.lse, lse, 1);
  if (has_grad_lse) views.add(params.grad_lse, *grad_lse, 1);
  views.add(params.grad_query, grad_query);
  views.add(params.grad_key, grad_key);
  views.add(params.grad_value, grad_value);
  params.mask_type = check_mask(op, attn_mask, query, views.with({params.L, params.S}), is_causal, params.mask, views);

  // The mask's gradient is summed in the accumulator type, in the result itself if that is its dtype.
  const cudaStream_t stream = current_stream(device);
  Tensor grad_mask, mask_sums;
  if (mask_grad) {
    if (params.mask_type == MaskType::kNone || params.mask_type == MaskType::kBool) {
      fail(op, "mask_grad", "False where attn_mask is None or of dtype bool", "True");
    }
    const Sizes sizes = sizes_of(*attn_mask), strides = layout_like(sizes, *attn_mask);
    grad_mask = allocate(sizes, strides, attn_mask->scalar_type(), device);
    mask_sums = attn_mask->scalar_type() == accumulator ? grad_mask : allocate(sizes, strides, accumulator, device);
    params.mask_rows_kept = sizes[sizes.size() - 2] != 1;
    params.mask_cols_kept = sizes[sizes.size() - 1] != 1;
    views.add(params.mask_grad, mask_sums);
    const int64_t bytes = mask_sums.numel() * accumulator_bytes(params.type);
    if (bytes > 0) check_status(op, cudaMemsetAsync(data_of(mask_sums), 0, bytes, stream), device);
  } else {
    grad_mask = allocate({0}, {1}, type, device);
  }
  views.finish(params.batch);
  params.grad_key_bytes = grad_key.numel() * element_size(grad_type);
  params.grad_value_bytes = grad_value.numel() * element_size(grad_type);
  params.delta = data_of(row_values);
  params.norm = static_cast<char*>(params.delta) + row_bytes;
  // delta and norm count towards the cap, of which slices may have a quarter in any case, and a 64th is left for what torch's allocator
  // may add to a large block.
  const int64_t cap = std::max<int64_t>(workspace_bytes, 0);
  params.workspace_bytes = std::max(cap - 2 * row_bytes - cap / 64, cap / 4);
  Tensor workspace = allocate_bytes(pipeline_backward_workspace(params), device);
  params.workspace = data_of(workspace);

  check_status(op, pipeline_backward(params, stream), device);
  if (mask_grad && grad_mask.scalar_type() != accumulator) {
    const DataType mask_type = data_type(op, "attn_mask", grad_mask);
    check_status(op, launch_convert(data_of(mask_sums), data_of(grad_mask), grad_mask.numel(), params.type, mask_type, stream),
                 device);
  }
  return {grad_query, grad_key, grad_value, grad_mask};
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CUDA, m) {
  m.impl("sdpa_forward", TORCH_BOX(&attention_ext::sdpa_forward));
  m.impl("sdpa_backward", TORCH_BOX(&attention_ext::sdpa_backward));
  m.impl("sdpa_plan", TORCH_BOX(&attention_ext::sdpa_plan));
}
