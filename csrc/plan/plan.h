// Which kernel runs a problem, and why. Pure host code: no torch, no CUDA, so that every decision is tested without a
// GPU.
//
// Both libraries compile this file: _C for attention_ext.explain(), _cuda for the choice inside sdpa_forward.
#pragma once

#include <cstdint>
#include <string>

namespace attention_ext {

enum class Kernel { kPipeline, kSm90Fused512, kSm90Fused1024, kSm90Pipeline };

enum class MaskKind { kNone, kBool, kFloat };

// One call of scaled dot-product attention on a CUDA device, as far as the choice of a kernel depends on it.
struct Problem {
  int64_t B, Hq, Hk;     // batch (product of the leading dims), query heads, key heads
  int64_t L, S;          // queries, keys
  int64_t E, Ev;         // head dims of query/key and of value
  int64_t element_size;  // bytes of the dtype: 2, 4 or 8
  MaskKind mask;
  bool is_causal;
  bool dropout;
  int64_t capability;       // of the device, 10 * major + minor: 90 for an H100
  std::string not_for_tma;  // why query, key or value does not lie as the kernels for Hopper read it, a clause; empty: all do
};

struct Plan {
  Kernel kernel;
  std::string reason;       // a clause: "<kernel>, because <reason>"
  int64_t workspace_bytes;  // taken from torch's allocator during the call, freed after it
  bool preferred;           // measured faster than PyTorch's own operator on this kind of card
};

const char* kernel_name(Kernel kernel);

// The kernel of that name, or false.
bool kernel_by_name(const std::string& name, Kernel& kernel);

// Throws nothing. Every problem has a plan.
Plan make_plan(const Problem& problem, int64_t workspace_cap);

}  // namespace attention_ext
