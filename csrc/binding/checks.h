// Checks that the attention operators share, and the sentences they fail with.
#pragma once

#include <cmath>

#include "binding/tensors.h"
#include "core/device_info.h"
#include "core/tensors.h"

#ifndef ATTENTION_EXT_BUILT_FOR
#define ATTENTION_EXT_BUILT_FOR "unknown architectures"
#endif

namespace attention_ext {

using OptionalTensor = std::optional<Tensor>;

// Turns a launcher's status into one sentence.
inline void check_status(const char* op, cudaError_t status, int32_t device) {
  if (status == cudaSuccess) return;
  if (status == cudaErrorMemoryAllocation) out_of_memory(0, device);  // a kernel's own needs, such as local memory
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    const int64_t capability = device_info(device).capability;
    throw std::runtime_error(std::string(op) + ": cuda:" + std::to_string(device) + " has compute capability " +
                             std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
                             ", and this build of attention_ext has kernels for " + ATTENTION_EXT_BUILT_FOR +
                             "; build it for this card with TORCH_CUDA_ARCH_LIST");
  }
  throw std::runtime_error(std::string(op) + ": CUDA error: " + cudaGetErrorString(status));
}

inline double scale_or_default(const std::optional<double>& scale, int64_t E) {
  return scale.has_value() ? *scale : E == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(E));
}

// query, key and value: (..., Hq, L, E), (..., Hk, S, E), (..., Hk, S, Ev), of one dtype and device.
inline DataType check_inputs(const char* op, const Tensor& query, const Tensor& key, const Tensor* value) {
  if (!query.defined()) fail(op, "query", "a tensor", "None");
  const int32_t device = query.get_device_index();
  check_tensor(op, "query", query, 2, device);
  check_tensor(op, "key", key, 2, device);
  const DataType type = data_type(op, "query", query);
  check_type(op, "key", key, query.scalar_type());
  if (key.size(key.dim() - 1) != query.size(query.dim() - 1)) {
    fail(op, "key", "head dim " + std::to_string(query.size(query.dim() - 1)) + " as the query has",
         std::to_string(key.size(key.dim() - 1)));
  }
  if (value == nullptr) return type;
  check_tensor(op, "value", *value, 2, device);
  check_type(op, "value", *value, query.scalar_type());
  if (value->size(value->dim() - 2) != key.size(key.dim() - 2)) {
    fail(op, "value", std::to_string(key.size(key.dim() - 2)) + " rows as the key has",
         std::to_string(value->size(value->dim() - 2)));
  }
  return type;
}

// A mask that broadcasts to `sizes`, bool or added. Returns its type and adds its view.
inline MaskType check_mask(const char* op, const OptionalTensor& mask, const Tensor& query, const Sizes& sizes, bool is_causal,
                           MatrixView& view, Views& views) {
  if (!mask.has_value() || !mask->defined()) return MaskType::kNone;
  check_tensor(op, "attn_mask", *mask, 2, query.get_device_index());
  if (is_causal) fail(op, "attn_mask", "None with is_causal", "a mask");
  const Sizes own = sizes_of(*mask);
  bool fits = own.size() <= sizes.size();
  for (size_t i = 1; fits && i <= own.size(); ++i) {
    fits = own[own.size() - i] == 1 || own[own.size() - i] == sizes[sizes.size() - i];
  }
  if (!fits) fail(op, "attn_mask", "a shape that broadcasts to " + text(sizes), text(own));
  views.add(view, *mask);
  const ScalarType type = mask->scalar_type();
  if (type == ScalarType::Bool) return MaskType::kBool;
  if (type == query.scalar_type()) return MaskType::kSameAsQuery;
  if (type == ScalarType::Float) return MaskType::kFloat;
  fail(op, "attn_mask", "dtype bool, float32 or " + text(query.scalar_type()), text(type));
}

}  // namespace attention_ext
