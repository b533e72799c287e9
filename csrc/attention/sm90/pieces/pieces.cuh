// What the pieces of split keys leave in the workspace (plan/key_pieces.h), and the kernel that combines it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "attention/params.h"
#include "plan/key_pieces.h"

namespace attention_ext {

// Of `groups` groups of heads from first_group on. Row r of a group is query r / G of head r % G.
struct KeyPieces {
  float* out;          // (groups, count, L * G, pitch): sums of weights times values, relative to the reference
  float2* statistics;  // (groups, count, L * G): the reference, and the sum of the weights
  int count;           // of pieces of the keys
  int blocks;          // of keys of a piece
  int pitch;           // of out, a multiple of 8
  uint32_t first_group;
};

// What a thread leaves of a row: with col 0 its statistics; of O pairs of columns, 8 apart, from first_column + col on: pair(i), or
// zeros where the row sees no key.
template <int kPairs, class Pair>
__device__ __forceinline__ void leave_row(const KeyPieces& pieces, int64_t row, float reference, float sum, int first_column,
                                          int col, const Pair& pair) {
  if (first_column == 0 && col == 0) pieces.statistics[row] = make_float2(reference, sum);
  const bool any = sum != 0.0f;
  float* g_row = pieces.out + row * pieces.pitch + first_column + col;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float* r_pair = pair(i);
    if (first_column + 8 * i < pieces.pitch) {
      *reinterpret_cast<float2*>(g_row + 8 * i) = make_float2(any ? r_pair[0] : 0.0f, any ? r_pair[1] : 0.0f);
    }
  }
}

// out and log-sum-exp of `groups` groups. unit: of the references, in scores; the scale where they are products.
cudaError_t combine_pieces(const ForwardParams& params, const KeyPieces& pieces, int64_t groups, float unit,
                           cudaStream_t stream);

// launch(pieces, groups), and what combines them, for as many groups at a time as the workspace holds the pieces of.
template <class Launch>
cudaError_t launch_in_pieces(const ForwardParams& params, const PiecesWorkspace& plan, float unit, cudaStream_t stream,
                             const Launch& launch) {
  auto* out = static_cast<float*>(params.workspace);
  KeyPieces pieces = {out,
                      reinterpret_cast<float2*>(out + plan.groups * plan.rows * plan.pitch),
                      static_cast<int>(plan.split.pieces),
                      plan.split.blocks,
                      static_cast<int>(plan.pitch),
                      0};
  const int64_t all = params.N / params.key.group;
  for (int64_t first = 0; first < all; first += plan.groups) {
    const int64_t groups = std::min(plan.groups, all - first);
    pieces.first_group = static_cast<uint32_t>(first);
    cudaError_t status = launch(pieces, groups);
    if (status != cudaSuccess) return status;
    status = combine_pieces(params, pieces, groups, unit, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace attention_ext
