// Which kernel serves a call of sdpa_forward on CUDA, and why: the facts of the call for plan.h, and the answer.
#pragma once

#include <algorithm>
#include <string>

#include "attention/sm90/fused/fused.h"
#include "attention/sm90/pipeline/products.h"
#include "binding/tensors.h"
#include "core/tensor_map.h"
#include "plan/plan.h"

namespace attention_ext {

inline bool takes(Kernel kernel, const ForwardParams& params) {
  switch (kernel) {
    case Kernel::kPipeline: return true;
    case Kernel::kSm90Fused512: return fused_forward_512_takes(params);
    case Kernel::kSm90Fused1024: return fused_forward_1024_takes(params);
    case Kernel::kSm90Pipeline: return wgmma_pipeline_takes(params);
  }
  return false;
}

// Why one of the operands does not lie as TMA reads it for the kernels for Hopper, a clause; empty: all do.
inline std::string not_for_tma(const ForwardParams& params, const Tensor& query, const Tensor& key, const Tensor& value) {
  const int group = params.key.group;
  if (group != params.value.group) return "key and value have different head counts";
  if (group > 64) return "more than 64 query heads share a key head";
  if (group > 1 && query.stride(query.dim() - 3) <= 0) return "query's heads, of which several share a key head, are broadcast";
  const struct {
    const char* name;
    const Tensor& tensor;
    const MatrixView& view;
    int64_t rows;
  } operands[] = {
      {"query", query, params.query, params.L}, {"key", key, params.key, params.S}, {"value", value, params.value, params.S}};
  for (const auto& operand : operands) {
    const std::string name = operand.name;
    const int64_t most = group > 1 ? 4 : 5;
    if (operand.tensor.dim() > most) return name + " has more than " + std::to_string(most) + " dims";
    if (!operand.view.vector) {
      return operand.view.col_stride != 1 ? name + "'s columns are not adjacent in memory"
                                          : name + "'s rows do not all begin on 16-byte boundaries";
    }
    if (!tensor_map_takes(params.batch, operand.view, operand.rows)) {
      return name + "'s strides are broadcast along rows, too large or keep too many leading dims apart";
    }
  }
  return "";
}

// The kernel to run, and why: the one that was asked for by name, or the plan's choice.
inline Plan choose_kernel(const std::string& name, const ForwardParams& params, const std::string& not_for_tma,
                          int32_t device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  Kernel kernel;
  if (kernel_by_name(name, kernel)) {
    const bool hopper = ATTENTION_EXT_HAS_SM90A && 10 * major + minor == 90;
    if (kernel != Kernel::kPipeline && !(hopper && takes(kernel, params))) {
      fail("kernel_name", "a kernel that takes this problem on this card and is in this build", "\"" + name + "\"");
    }
    return {kernel, "kernel_name asked for it", 0, false};
  }
  if (name != "auto")
    fail("kernel_name", "\"auto\" or one of the kernels \"pipeline\", \"sm90_512\", \"sm90_1024\" and \"sm90_pipeline\"",
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
                     not_for_tma};
  problem.mask = params.mask_type == MaskType::kNone   ? MaskKind::kNone
                 : params.mask_type == MaskType::kBool ? MaskKind::kBool
                                                       : MaskKind::kFloat;
  Plan plan = make_plan(problem, params.workspace_bytes);
  if (!takes(plan.kernel, params)) {
    plan = {Kernel::kPipeline, std::string(kernel_name(plan.kernel)) + " counts tiles in 32 bits, and here are more", 0, false};
  }
  return plan;
}

}  // namespace attention_ext
