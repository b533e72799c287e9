// Batch dims of several operands, broadcast against each other and merged to as few as possible. Pure host code, no
// torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/small_vector.h"
#include "core/tensors.h"

namespace attention_ext {

using Sizes = SmallVector<int64_t, 8>;  // or strides
constexpr size_t kUsualOperands = 12;   // of a backward

// One operand's own batch dims, outermost first, aligned at the innermost; it may have fewer dims than the problem.
struct BatchOperand {
  Sizes size;        // per dim 1 (broadcast) or the problem's size; the last one may be a divisor of it with enable_gqa
  Sizes stride;      // elements
  MatrixView* view;  // gets batch_stride and group
};

// Fills `batch` and the views. Dims of size 1 vanish; a dim merges into the one inside it where every operand steps
// through the two as through one. The order of dims, and with it the flat batch index, stays. False: more than
// kMaxBatchDims remain.
inline bool merge_batch_dims(const Sizes& sizes, bool enable_gqa, const std::vector<BatchOperand>& operands, BatchDims& batch) {
  using Strides = SmallVector<int64_t, kUsualOperands>;
  struct MergedDim {
    int64_t size;
    bool holds_last;  // the problem's last dim is part of it, so operands' groups apply
    Strides stride;   // per operand
  };
  const auto stride_of = [&](const BatchOperand& operand, size_t dim) -> int64_t {
    const size_t missing = sizes.size() - operand.size.size();
    return dim < missing || operand.size[dim - missing] == 1 ? 0 : operand.stride[dim - missing];
  };
  // Query heads per head of an operand; one that has a single head reads it whatever the group.
  const auto group_of = [&](const BatchOperand& operand) -> int64_t {
    const bool grouped = enable_gqa && !operand.size.empty() && operand.size.back() > 1;
    return grouped ? std::max<int64_t>(sizes.back() / operand.size.back(), 1) : 1;
  };

  std::vector<MergedDim> merged;  // innermost first
  merged.reserve(kMaxBatchDims);
  for (size_t dim = sizes.size(); dim-- > 0;) {
    if (sizes[dim] == 1) continue;
    Strides stride(operands.size());
    for (size_t i = 0; i < operands.size(); ++i) stride[i] = stride_of(operands[i], dim);
    bool merges = !merged.empty();
    for (size_t i = 0; merges && i < operands.size(); ++i) {
      const MergedDim& inner = merged.back();
      const int64_t steps = inner.size / (inner.holds_last ? group_of(operands[i]) : 1);
      merges = stride[i] == steps * inner.stride[i];
    }
    if (merges) {
      merged.back().size *= sizes[dim];
    } else {
      merged.push_back({sizes[dim], dim + 1 == sizes.size(), stride});
    }
  }
  if (merged.size() > static_cast<size_t>(kMaxBatchDims)) return false;

  batch = {};
  batch.count = merged.empty() ? 1 : static_cast<int32_t>(merged.size());
  batch.size[0] = 1;
  for (size_t i = 0; i < operands.size(); ++i) {
    MatrixView& view = *operands[i].view;
    view.group = merged.empty() || !merged.front().holds_last ? 1 : static_cast<int32_t>(group_of(operands[i]));
    view.batch_stride[0] = 0;
    for (size_t dim = 0; dim < merged.size(); ++dim) {
      const MergedDim& from = merged[merged.size() - 1 - dim];
      batch.size[dim] = from.size;
      view.batch_stride[dim] = from.stride[i];
    }
  }
  return true;
}

}  // namespace attention_ext
