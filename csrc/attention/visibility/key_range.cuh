// Which keys a query sees, and which keys or queries a tile has to do with. Every kernel asks here.
#pragma once

#include <climits>

#include "attention/visibility/sequence.h"
#include "device/common/batch.cuh"

namespace attention_ext {

// The keys that the queries of one matrix see, counted as the problem counts queries and keys, not from a slice's or tile's first.
// A query sees keys [0, end_of_row(row)), and no later query sees fewer, so a tile of rows is known by its first and last row.
struct KeyRange {
  bool causal;
  int keys;  // that there are

  __device__ __forceinline__ int end_of_row(int row) const { return causal ? min(row + 1, keys) : keys; }
  // Of the keys that any of rows [row, row + rows) sees.
  __device__ __forceinline__ int end_of_tile(int row, int rows) const { return end_of_row(row + rows - 1); }
  // The first query that sees the key; INT_MAX where none does.
  __device__ __forceinline__ int first_row(int key) const { return key >= keys ? INT_MAX : causal ? key : 0; }
};

// Of matrix n, and of its keys [0, keys).
template <class Index>  // int64_t, or uint32_t where N is known to fit
__device__ __forceinline__ KeyRange key_range(const Sequence& sequence, Index n, int64_t keys) {
  KeyRange range = {sequence.causal, static_cast<int>(keys)};
  if (sequence.key_lengths != nullptr) {
    Index batch_row, head;
    divide(n, sequence.heads, batch_row, head);
    range.keys = max(min(range.keys, sequence.key_lengths[batch_row]), 0);
  }
  return range;
}

}  // namespace attention_ext
