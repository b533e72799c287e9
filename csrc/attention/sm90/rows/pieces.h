// What the pieces of split keys leave in the workspace (plan/sm90_rows.h), and the kernel that combines it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/params.h"

namespace attention_ext {

// Of `groups` groups of heads from first_group on. Row r of a group is query r / G of head r % G.
struct RowsPieces {
  float* out;          // (groups, count, L * G, pitch): sums of weights times values, relative to the reference
  float2* statistics;  // (groups, count, L * G): the reference, and the sum of the weights; where that is 0, out has no row
  int count;           // of pieces of the keys
  int blocks;          // of keys of a piece
  int pitch;           // of out, a multiple of 8
  uint32_t first_group;
};

// out and log-sum-exp of `groups` groups. unit: of the references, in scores; the scale where they are products.
cudaError_t rows_combine(const ForwardParams& params, const RowsPieces& pieces, int64_t groups, float unit,
                         cudaStream_t stream);

}  // namespace attention_ext
