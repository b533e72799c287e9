// What every kernel is given of a tensor: its element type, its batch dims, where its elements lie. Plain structs, no torch.
//
// Sizes (one vocabulary everywhere): L queries, S keys, E head dim of query and key, Ev head dim of value,
// N = leading dims * Hq flattened row-major, the "flat batch index" n.
#pragma once

#include <cstdint>

namespace attention_ext {

// Batch dims left after merging. Real inputs need one to three; eight keeps every struct below within kernel
// parameters.
constexpr int kMaxBatchDims = 8;

// Rows and columns of a matrix: tiles count them in 32 bits, a tile's own beyond the last one too.
constexpr int64_t kMaxRowsAndCols = (int64_t{1} << 31) - 1 - 1024;

enum class DataType : int32_t { kHalf, kBFloat16, kFloat, kDouble };
enum class MaskType : int32_t { kNone, kBool, kSameAsQuery, kFloat };

constexpr int64_t element_bytes(DataType type) { return type == DataType::kDouble ? 8 : type == DataType::kFloat ? 4 : 2; }

// Scores, sums and accumulators: float, or double for double.
constexpr int64_t accumulator_bytes(DataType type) { return type == DataType::kDouble ? 8 : 4; }

// The batch dims, outermost first; the last one is the query head dim (possibly merged with dims before it).
struct BatchDims {
  int64_t size[kMaxBatchDims];
  int32_t count;  // 1 .. kMaxBatchDims
};

// A stack of matrices. Element (n, row, col) lies at
//   data + sum over dims(index(n) * batch_stride) + (n - slice.batch_begin) * slice_stride + row * row_stride + col *
//   col_stride
// where the index along the last batch dim is divided by `group` first (query heads per key head). A tensor of the
// caller uses batch_stride and absolute rows and columns; a workspace slice uses slice_stride and counts rows and
// columns from the slice's own first one. Strides in elements; 0 means broadcast.
struct MatrixView {
  void* data;  // (batch dims..., rows, cols), any strides
  int64_t batch_stride[kMaxBatchDims];
  int64_t slice_stride;
  int64_t row_stride;
  int64_t col_stride;
  int32_t group;  // 1, or Hq / Hk
  bool vector;    // cols adjacent, and every row of every matrix begins on a 16-byte boundary
};

}  // namespace attention_ext
