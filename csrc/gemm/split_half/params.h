// float32 as two terms in half precision: what a row of them is, and the launcher that makes them.
#pragma once

#include <cuda_runtime_api.h>

#include "core/tensors.h"

namespace attention_ext {

// A row's exponent, or one of the two below, and the magnitude of the sum of what its terms leave out of elements so small that it is no
// mere share of them, in units of 2^exponent: as it is or beside partners of the elements' signs, the larger.
struct SplitHalfRow {
  int32_t exponent;
  float left_out;
};
constexpr int32_t kRowOfZeros = -100000, kRowNotFinite = 100000;  // exponents of such rows

// Rows of float as two half terms each: x = (high + low) * 2^exponent of its row, high and low in (2, rows, pitch).
struct SplitHalfRowsParams {
  MatrixView source;  // (rows, cols), float
  int64_t rows, cols;
  void* terms;            // pitch: cols rounded up to 8
  SplitHalfRow* of_rows;  // (rows,)
};

cudaError_t launch_split_half_rows(const SplitHalfRowsParams& params, cudaStream_t stream);

}  // namespace attention_ext
