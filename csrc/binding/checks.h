// Checks that the attention operators share, and the sentences they fail with.
#pragma once

#include <cmath>

#include "attention/params.h"
#include "binding/tensors.h"

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
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    throw std::runtime_error(std::string(op) + ": cuda:" + std::to_string(device) + " has compute capability " +
                             std::to_string(major) + "." + std::to_string(minor) +
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

// What bounds the keys of matrices (batch..., heads): causality, and a length for each batch row, of which there are as many as the dims
// before the heads make in row-major order.
inline Sequence check_sequence(const char* op, bool is_causal, const OptionalTensor& key_lengths, const Tensor& query,
                               const Sizes& batch) {
  Sequence sequence = {is_causal, nullptr, batch.empty() ? 1 : batch.back()};
  if (!key_lengths.has_value() || !key_lengths->defined()) return sequence;
  int64_t batch_rows = 1;
  for (size_t dim = 0; dim + 1 < batch.size(); ++dim) batch_rows *= batch[dim];
  check_tensor(op, "key_lengths", *key_lengths, 1, query.get_device_index());
  check_type(op, "key_lengths", *key_lengths, ScalarType::Int);
  check_sizes(op, "key_lengths", *key_lengths, {batch_rows});
  if (batch_rows > 1 && key_lengths->stride(0) != 1) {
    fail(op, "key_lengths", "a contiguous tensor", "stride " + std::to_string(key_lengths->stride(0)));
  }
  sequence.key_lengths = static_cast<const int32_t*>(data_of(*key_lengths));
  return sequence;
}

}  // namespace attention_ext
