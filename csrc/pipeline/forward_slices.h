// How the forward is cut into slices of (N, L) rows, and the workspace that a slice takes. Pure host code, shared with
// the plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "slices.h"

namespace attention_ext {

// Of stage 1's exponentials: keys of a segment, bytes of its statistics; params.h says the same to the kernels.
constexpr int64_t kSegmentKeys = 64, kSegmentBytes = 16;

// Workspace of a slice, in this order: for float and double scores (batches, rows, pitch), overwritten in place by weights; for half
// types weights (batches, rows, pitch), then the statistics of their segments (batches, rows, segments), 16 bytes each. Then the
// row sums (batches, rows).
struct ForwardSlices {
  int64_t batches, rows;              // of a slice: whole matrices if one fits (rows = L), else some rows of one matrix
  int64_t pitch;                      // of scores or weights, in elements
  int64_t segments;                   // of a row; 0 for float and double
  int64_t statistics_at, row_sum_at;  // bytes
  int64_t bytes;
};

// N matrices of (L, S) scores for tensors of `element` bytes; at least one row, whatever the cap.
inline ForwardSlices forward_slices(int64_t N, int64_t L, int64_t S, int64_t element, int64_t workspace_cap) {
  const int64_t statistic = element == 8 ? 8 : 4;
  ForwardSlices slices = {};
  slices.pitch = slice_pitch(S);
  slices.segments = element == 2 ? (slices.pitch + kSegmentKeys - 1) / kSegmentKeys : 0;
  const int64_t row_bytes = slices.pitch * element + slices.segments * kSegmentBytes + statistic;
  const int64_t rows_in_cap = std::max<int64_t>(workspace_cap - 4 * kWorkspaceAlignment, 0) / row_bytes;
  if (rows_in_cap >= L) {
    slices.batches = even_piece(N, rows_in_cap / std::max<int64_t>(L, 1), 1, 1);
    slices.rows = L;
  } else {
    slices.batches = 1;
    slices.rows = even_piece(L, rows_in_cap, 1, kSliceTile);
  }
  const int64_t rows = slices.batches * slices.rows;
  slices.statistics_at = round_up(rows * slices.pitch * element, kWorkspaceAlignment);
  slices.row_sum_at = slices.statistics_at + round_up(rows * slices.segments * kSegmentBytes, kWorkspaceAlignment);
  slices.bytes = slices.row_sum_at + rows * statistic;
  return slices;
}

}  // namespace attention_ext
