// sdpa_forward and sdpa_backward on CUDA, for torch's stable ABI. A body: check, allocate, fill, launch.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "../plan.h"
#include "../sm90/tensor_map.h"
#include "checks.h"

namespace attention_ext {
namespace {

using torch::stable::accelerator::DeviceGuard;

bool takes(Kernel kernel, const ForwardParams& params) {
  switch (kernel) {
    case Kernel::kPipeline: return true;
    case Kernel::kSm90_512: return fused_forward_512_takes(params);
    case Kernel::kSm90_1024: return fused_forward_1024_takes(params);
    case Kernel::kSm90Pipeline: return product_pipeline_takes(params);
  }
  return false;
}

// The kernel to run: the one that was asked for by name, or the plan's choice.
Kernel choose_kernel(const char* op, const std::string& name, const ForwardParams& params, bool tma_operands, int32_t device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  Kernel kernel;
  if (kernel_by_name(name, kernel)) {
    const bool hopper = ATTENTION_EXT_HAS_SM90A && 10 * major + minor == 90;
    if (kernel != Kernel::kPipeline && !(hopper && takes(kernel, params))) {
      fail(op, "kernel_name", "a kernel that takes this problem on this card and is in this build", "\"" + name + "\"");
    }
    return kernel;
  }
  if (name != "auto")
    fail(op, "kernel_name", "\"auto\" or one of the kernels \"pipeline\", \"sm90_512\", \"sm90_1024\" and \"sm90_pipeline\"",
         "\"" + name + "\"");
  const int64_t heads = params.batch.size[params.batch.count - 1];
  Problem problem = {params.N / std::max<int64_t>(heads, 1),
                     heads,
                     heads / params.key.group,
                     params.L,
                     params.S,
                     params.E,
                     params.Ev,
                     element_bytes(params.type),
                     MaskKind::kNone,
                     params.causal,
                     params.dropout.seed != nullptr,
                     10 * major + minor,
                     tma_operands};
  problem.mask = params.mask_type == MaskType::kNone   ? MaskKind::kNone
                 : params.mask_type == MaskType::kBool ? MaskKind::kBool
                                                       : MaskKind::kFloat;
  kernel = make_plan(problem, params.workspace_bytes).kernel;
  return takes(kernel, params) ? kernel : Kernel::kPipeline;  // sizes past 32 bits
}

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

std::tuple<Tensor, Tensor> sdpa_forward(Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask, OptionalTensor seed,
                                        double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa,
                                        bool /*allow_tf32*/, int64_t workspace_bytes, std::string kernel_name) {
  const char* op = "sdpa_forward";
  ForwardParams params = {};
  params.type = check_inputs(op, query, key, &value);
  const int32_t device = query.get_device_index();
  const DeviceGuard guard(device);
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
  params.dropout = check_dropout(op, dropout_p, seed, device);
  params.causal = is_causal;

  const Sizes out_sizes = views.with({params.L, params.Ev}), lse_sizes = views.with({params.L});
  Tensor out = allocate(out_sizes, layout_like(out_sizes, query), query.scalar_type(), device);
  Tensor lse = allocate(lse_sizes, contiguous_strides(lse_sizes), accumulator_type(params.type), device);

  views.add(params.query, query);
  views.add(params.key, key);
  views.add(params.value, value);
  views.add(params.out, out);
  views.add(params.lse, lse, 1);
  params.mask_type = check_mask(op, attn_mask, query, views.with({params.L, params.S}), is_causal, params.mask, views);
  views.finish(params.batch);
  if (is_causal) params.S = std::min(params.S, params.L);  // no query sees the keys behind
  params.workspace_bytes = workspace_bytes;
  const int group = params.key.group;
  const bool groups = group == params.value.group && group <= 64 && (group == 1 || query.stride(query.dim() - 3) > 0);
  const bool tma_operands = groups && std::max({query.dim(), key.dim(), value.dim()}) <= (group > 1 ? 4 : 5) &&
                            tensor_map_takes(params.batch, params.query, params.L) &&
                            tensor_map_takes(params.batch, params.key, params.S) &&
                            tensor_map_takes(params.batch, params.value, params.S);
  const Kernel kernel = choose_kernel(op, kernel_name, params, tma_operands, device);
  switch (kernel) {
    case Kernel::kSm90_512: check_status(op, fused_forward_512(params, current_stream(device)), device); return {out, lse};
    case Kernel::kSm90_1024: check_status(op, fused_forward_1024(params, current_stream(device)), device); return {out, lse};
    case Kernel::kPipeline:
    case Kernel::kSm90Pipeline: {
      params.warpgroup_products = kernel == Kernel::kSm90Pipeline;
      Tensor workspace = allocate_bytes(pipeline_forward_workspace(params), device);
      params.workspace = data_of(workspace);
      check_status(op, pipeline_forward(params, current_stream(device)), device);
      return {out, lse};
    }
  }
  throw std::runtime_error("attention_ext: the plan named a kernel that sdpa_forward does not have");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sdpa_backward(Tensor grad_out, OptionalTensor grad_lse, Tensor query, Tensor key,
                                                         Tensor value, OptionalTensor attn_mask, Tensor out, Tensor lse,
                                                         OptionalTensor seed, double dropout_p, bool is_causal,
                                                         std::optional<double> scale, bool enable_gqa, bool /*allow_tf32*/,
                                                         bool /*deterministic: always*/, bool mask_grad,
                                                         int64_t workspace_bytes, std::string kernel_name) {
  const char* op = "sdpa_backward";
  if (kernel_name != "auto" && kernel_name != "pipeline")
    fail(op, "kernel_name", "\"auto\" or \"pipeline\"", "\"" + kernel_name + "\"");
  BackwardParams params = {};
  params.type = check_inputs(op, query, key, &value);
  const int32_t device = query.get_device_index();
  const DeviceGuard guard(device);
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
  params.causal = is_causal;

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

  Tensor grad_query = allocate(sizes_of(query), layout_like(sizes_of(query), query), type, device);
  Tensor grad_key = allocate(key_sizes, layout_like(key_sizes, key), type, device);
  Tensor grad_value = allocate(value_sizes, layout_like(value_sizes, value), type, device);
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
  params.grad_key_bytes = grad_key.numel() * element_bytes(params.type);
  params.grad_value_bytes = grad_value.numel() * element_bytes(params.type);
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
}
