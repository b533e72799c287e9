// Terms in the workspace as tensor maps see them, and the numbers of a slice's matrices.
#pragma once

#include "core/arithmetic.h"
#include "core/slice.h"
#include "core/tensor_map.h"

namespace attention_ext {

// Of k that Tensor Cores sum before float registers do: at 64, one-signed inputs would lose twice PyTorch's error.
constexpr int kSplitHalfPromoted = 32;

// The slice's number of the matrix that serves flat number n, of those that `group` flat numbers share.
#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr int64_t matrix_of_slice(int64_t n, const Slice& slice, int64_t group) {
  return n / group - slice.batch_begin / group;
}
inline int64_t matrices_of_slice(const Slice& slice, int64_t group) {
  return matrix_of_slice(slice.batch_begin + slice.batch_count - 1, slice, group) + 1;
}

// (2, matrices, rows, cols rounded up to 8): the terms are the innermost batch dim of the map.
inline cudaError_t make_terms_map(CUtensorMap& map, void* terms, int64_t matrices, int64_t rows, int64_t cols, int box_rows) {
  const BatchDims dims = {{matrices, 2}, 2};
  MatrixView view = {};
  view.data = terms;
  view.row_stride = slice_pitch(cols);
  view.batch_stride[0] = rows * view.row_stride;
  view.batch_stride[1] = matrices * view.batch_stride[0];
  view.col_stride = view.group = 1;
  return make_tensor_map(map, DataType::kHalf, dims, view, rows, cols, box_rows);
}

}  // namespace attention_ext
