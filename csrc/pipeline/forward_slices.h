// How the forward is cut into slices of (N, L) rows, and the workspace that a slice takes. Pure host code, shared with
// the plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "slices.h"

namespace attention_ext {

struct ForwardSlices {
  int64_t batches, rows;  // of a slice: whole matrices if one fits (rows = L), else some rows of one matrix
  int64_t pitch;          // of the scores, in accumulators
  int64_t row_sum_at;     // bytes
  int64_t bytes;
};

// N matrices of (L, S) scores of `accumulator` bytes each; at least one row, whatever the cap.
inline ForwardSlices forward_slices(int64_t N, int64_t L, int64_t S, int64_t accumulator, int64_t workspace_cap) {
  ForwardSlices slices = {};
  slices.pitch = slice_pitch(S);
  const int64_t row_bytes = (slices.pitch + 1) * accumulator;
  const int64_t rows_in_cap = std::max<int64_t>(workspace_cap - kWorkspaceAlignment, 0) / row_bytes;
  if (rows_in_cap >= L) {
    slices.batches = even_piece(N, rows_in_cap / std::max<int64_t>(L, 1), 1);
    slices.rows = L;
  } else {
    slices.batches = 1;
    slices.rows = even_piece(L, rows_in_cap, kSliceTile);
  }
  slices.row_sum_at = round_up(slices.batches * slices.rows * slices.pitch * accumulator, kWorkspaceAlignment);
  slices.bytes = slices.row_sum_at + slices.batches * slices.rows * accumulator;
  return slices;
}

}  // namespace attention_ext
