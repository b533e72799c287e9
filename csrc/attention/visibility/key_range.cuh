// Which keys a query sees, and which keys or queries a tile has to do with. Every kernel asks here.
#pragma once

#include "attention/visibility/sequence.h"

namespace attention_ext {

// The keys that the queries of one matrix see, counted as the problem counts queries and keys, not from a slice's or tile's first.
// A query sees keys [0, end_of_row(row)), and no later query sees fewer, so a tile of rows is known by its first and last row.
struct KeyRange {
  bool causal;
  int keys;  // that there are

  __device__ __forceinline__ int end_of_row(int row) const { return causal ? min(row + 1, keys) : keys; }
  // Of the keys that any of rows [row, row + rows) sees.
  __device__ __forceinline__ int end_of_tile(int row, int rows) const { return end_of_row(row + rows - 1); }
  // The first query that sees the key.
  __device__ __forceinline__ int first_row(int key) const { return causal ? key : 0; }
};

__device__ __forceinline__ KeyRange key_range(const Sequence& sequence, int64_t keys) {
  return {sequence.causal, static_cast<int>(keys)};
}

}  // namespace attention_ext
