// Checks that the attention operators share, and the sentences they fail with.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/params.h"
#include "binding/tensors.h"
#include "core/device_info.h"

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
inline DataType check_inputs(const Tensor& query, const Tensor& key, const Tensor* value, bool enable_gqa) {
  const int64_t min_rank = enable_gqa ? 3 : 2;
  check_operand("query", query, query, min_rank, "query's");
  check_operand("key", key, query, min_rank, "query's");
  if (value != nullptr) check_operand("value", *value, query, min_rank, "query's");
  const int64_t E = query.size(query.dim() - 1), S = key.size(key.dim() - 2);
  if (key.size(key.dim() - 1) != E) {
    fail("key", "the query's head dim E = " + std::to_string(E) + " as its last size", shape_of(key));
  }
  if (value != nullptr && value->size(value->dim() - 2) != S) {
    fail("value", "the key's length S = " + std::to_string(S) + " as its second to last size", shape_of(*value));
  }
  return data_type("query", query);
}

// A mask that broadcasts to `sizes`, bool or added. Returns its type and adds its view.
inline MaskType check_mask(const OptionalTensor& mask, const Tensor& query, const Sizes& sizes, bool is_causal,
                           MatrixView& view, Views& views) {
  if (!mask.has_value() || !mask->defined()) return MaskType::kNone;
  if (is_causal) fail("attn_mask", "None together with is_causal=True", "a mask of " + shape_of(*mask));
  const ScalarType type = mask->scalar_type();
  if (type != ScalarType::Bool && type != ScalarType::Float && type != query.scalar_type()) {
    fail("attn_mask", "dtype bool, float32 or the query's " + text(query.scalar_type()), text(type));
  }
  if (!same_device(*mask, query)) fail("attn_mask", "the query's device " + device_of(query), device_of(*mask));
  const Sizes own = sizes_of(*mask);
  bool fits = own.size() >= 2 && own.size() <= sizes.size();
  for (size_t i = 1; fits && i <= own.size(); ++i) {
    fits = own[own.size() - i] == 1 || own[own.size() - i] == sizes[sizes.size() - i];
  }
  if (!fits) fail("attn_mask", "a shape of rank 2 or more that broadcasts to " + text(sizes), shape_of(*mask));
  views.add(view, *mask);
  return type == ScalarType::Bool ? MaskType::kBool : type == query.scalar_type() ? MaskType::kSameAsQuery : MaskType::kFloat;
}

// Dropout with p rounded to a multiple of 2^-16, of which there is none below 2^-17. Only p = 1 drops everything: what comes close
// to it is rounded to 1 - 2^-16, so that the result's mean is right for every other p.
inline Dropout rounded_dropout(double p, const int64_t* seed) {
  constexpr double kSteps = 65536.0;
  const double dropped = p == 1.0 ? kSteps : std::min(std::floor(p * kSteps + 0.5), kSteps - 1.0);
  if (!(dropped > 0.0)) return {};
  return {seed, static_cast<uint32_t>(dropped * kSteps - 1.0), p == 1.0 ? 0.0 : kSteps / (kSteps - dropped)};
}

// The seed of dropout on the query's device, wherever there is one.
inline Dropout check_dropout(double p, const OptionalTensor& seed, const Tensor& query) {
  if (!(p >= 0.0 && p <= 1.0)) fail("dropout_p", "a probability in [0, 1]", text(p));
  const bool given = seed.has_value() && seed->defined();
  if (p > 0.0 && !given) fail("seed", "a 1-element int64 tensor for dropout_p = " + text(p), "None");
  if (given && (seed->scalar_type() != ScalarType::Long || seed->numel() != 1 || !same_device(*seed, query))) {
    fail("seed", "a 1-element int64 tensor on " + device_of(query),
         shape_of(*seed) + ", " + text(seed->scalar_type()) + " on " + device_of(*seed));
  }
  return rounded_dropout(p, given ? static_cast<const int64_t*>(data_of(*seed)) : nullptr);
}

// What bounds the keys of matrices (batch..., heads): causality, and a length for each batch row, of which there are as many as the
// dims before the heads make in row-major order.
inline Sequence check_sequence(bool is_causal, const OptionalTensor& key_lengths, const Tensor& query, const Sizes& batch) {
  Sequence sequence = {is_causal, nullptr, batch.empty() ? 1 : batch.back()};
  if (!key_lengths.has_value() || !key_lengths->defined()) return sequence;
  int64_t batch_rows = 1;
  for (size_t dim = 0; dim + 1 < batch.size(); ++dim) batch_rows *= batch[dim];
  check_shape("key_lengths", *key_lengths, {batch_rows}, ScalarType::Int, query, 0);
  if (batch_rows > 1 && key_lengths->stride(0) != 1) {
    fail("key_lengths", "a contiguous tensor", "stride " + std::to_string(key_lengths->stride(0)));
  }
  sequence.key_lengths = static_cast<const int32_t*>(data_of(*key_lengths));
  return sequence;
}

}  // namespace attention_ext
