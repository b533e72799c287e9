// How an operand lies in memory, as far as kernels differ in what they take. Plain C++.
#pragma once

#include <cstdint>

#include "core/tensors.h"

namespace attention_ext {

constexpr int64_t kLineBytes = 128;  // of L2; a box of TMA has rows of as many

struct Operand {
  bool columns_adjacent = true;
  bool rows_apart = true;              // one row, or rows a positive stride apart
  bool heads_apart = true;             // not one matrix for all heads
  bool strides_in_range = true;        // none negative, none of 2^40 bytes or more
  int64_t matrices = 1;                // that lie apart
  int64_t row_alignment = kLineBytes;  // bytes: the largest power of two, up to a line, on which every row begins
};

// Of a view with `rows` rows of elements of so many bytes.
inline Operand operand_of(const BatchDims& batch, const MatrixView& view, int64_t rows, int64_t element) {
  const int64_t most = (int64_t{1} << 40) / element;
  const auto in_range = [&](int64_t stride) { return 0 <= stride && stride < most; };
  Operand operand;
  operand.columns_adjacent = view.col_stride == 1;
  operand.rows_apart = rows <= 1 || view.row_stride > 0;
  operand.heads_apart = view.batch_stride[batch.count - 1] > 0;
  operand.strides_in_range = rows <= 1 || in_range(view.row_stride);
  uint64_t places = reinterpret_cast<uintptr_t>(view.data) | static_cast<uint64_t>(view.row_stride * element) | kLineBytes;
  for (int dim = 0; dim < batch.count; ++dim) {
    if (view.batch_stride[dim] != 0) operand.matrices *= batch.size[dim] / (dim + 1 == batch.count ? view.group : 1);
    places |= static_cast<uint64_t>(view.batch_stride[dim] * element);
    operand.strides_in_range = operand.strides_in_range && in_range(view.batch_stride[dim]);
  }
  operand.row_alignment = static_cast<int64_t>(places & (~places + 1));
  return operand;
}

// Whether a view's matrices of so many rows and columns lie one after another, without a gap.
inline bool is_dense(const BatchDims& batch, const MatrixView& view, int64_t rows, int64_t cols) {
  bool dense = (cols <= 1 || view.col_stride == 1) && (rows <= 1 || view.row_stride == cols);
  int64_t matrices = 1;
  for (int dim = batch.count - 1; dim >= 0; --dim) {
    dense = dense && (batch.size[dim] <= 1 || view.batch_stride[dim] == matrices * rows * cols);
    matrices *= batch.size[dim];
  }
  return dense;
}

// Why TMA does not read an operand's matrices, a clause that begins after its name; null: it does. The one place of this rule.
inline const char* not_for_tma(const Operand& operand) {
  if (!operand.columns_adjacent) return "'s columns are not adjacent in memory";
  if (operand.row_alignment < 16) return "'s rows do not all begin on 16-byte boundaries";
  if (!operand.rows_apart) return "'s rows are broadcast or run backwards";
  if (!operand.strides_in_range) return "'s strides are negative or 2^40 bytes and more";
  return nullptr;
}

constexpr int64_t kTensorMapBatchDims = 3;  // a tensor map has five dims, two of them the matrix's

}  // namespace attention_ext
