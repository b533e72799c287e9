// The backward of the row kernels for Hopper: kernels that share nothing but the log-sum-exp and delta. The row kernel makes dQ,
// the column kernel dK and dV, the mask kernel the gradient of a mask; each multiplies the scores again, and has its sums in
// registers, in one order.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"
#include "attention/sm90/pipeline/row_values.h"
#include "attention/sm90/rows/marks.h"
#include "core/arithmetic.h"

namespace attention_ext {

// The parts of a tile's walk over its queries (plan/sm90_column_parts.h), as the column kernel sees them.
struct ColumnCut {
  uint32_t heads = 1, blocks = 1;  // parts of a group's query heads; of a head's blocks
  uint32_t heads_of_part = 1;      // query heads; of the last part maybe fewer
  uint32_t first = 0;              // key head of the launch
};

// The keys that no query sees, from `first` on. A launch clears every shares-th piece of their gradients, from piece `share` on.
struct UnseenKeys {
  int32_t first = 0;
  uint32_t share = 0, shares = 0;  // shares 0: none
};
constexpr int kUnseenPiece = 64, kUnseenWarps = 2;  // keys of a piece; warps of a CTA

// A call, and what was made of its rows before.
struct RowsBackwardParams : BackwardParams {
  QueryRecord* records;       // (N, records_of_head)
  int32_t records_of_head;    // so that the last block or tile of either kernel is whole
  float unit;                 // scale * log2 e: of exponents
  float scale_factor;         // scale
  float keep_factor;          // of what dropout keeps
  bool general, differences;  // there is a mask or dropout; scores are subtracted from before they are exponents
  int64_t mask_splits;        // CTAs that share a tile of the mask's gradient
  float* mask_parts;          // what each of them leaves; null: its one CTA writes it (mask_tiles.h)
  ColumnCut cut;              // of a launch of the column kernel
  int64_t column_heads;       // key heads of such a launch, where tiles are cut
  int64_t seen_keys;          // of a matrix, by any query; parts have these
  float* column_parts;        // what its parts leave: (key heads, parts, seen_keys, pitch); null: nothing is cut
  UnseenKeys unseen;          // of a launch
};

// Pieces of a matrix that `unseen` has.
__host__ __device__ constexpr uint32_t unseen_pieces(const RowsBackwardParams& p) {
  return static_cast<uint32_t>(ceil_div(p.S - p.unseen.first, kUnseenPiece));
}

// Adds what the parts of so many key heads' tiles have left, from cut.first on, to dK and dV.
cudaError_t launch_column_sums(const RowsBackwardParams& params, int64_t key_heads, cudaStream_t stream);
// Writes what the mask shows at `data`, for cells of 32 or 64 keys.
cudaError_t launch_marks(const BackwardParams& params, int marked_keys, uint8_t* data, RowsMarks& marks, cudaStream_t stream);

// marks: of the mask; without data of a call that has none, or whose blocks are all multiplied.
cudaError_t rows_backward_64(const RowsBackwardParams& params, const RowsMarks& marks, cudaStream_t stream);
cudaError_t rows_backward_128(const RowsBackwardParams& params, const RowsMarks& marks, cudaStream_t stream);
cudaError_t rows_backward_192(const RowsBackwardParams& params, const RowsMarks& marks, cudaStream_t stream);
cudaError_t rows_backward_256(const RowsBackwardParams& params, const RowsMarks& marks, cudaStream_t stream);

// As pipeline_backward and its company. Of a problem that the kernel's row of the table (plan/backward.cpp) does not refuse.
int64_t rows_backward_workspace(const BackwardParams& params);
bool rows_backward_sums_mask(const BackwardParams& params);
cudaError_t rows_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
