// split_half, float32 as the sum of two half terms: what there is of a row, and the launcher that makes it.
#pragma once

#include <cuda_runtime_api.h>

#include "core/tensors.h"

namespace attention_ext {

struct SplitHalfRow {
  int32_t exponent;  // or one of the two below
  // In units of 2^exponent, over the row's small elements, whose low term is subnormal: the sum of what the two terms leave out, or
  // of that with the elements' signs, the larger magnitude. An element's partner in a product may have either sign.
  float left_out;
};
constexpr int32_t kRowOfZeros = -100000, kRowNotFinite = 100000;  // exponents of such rows

// Rows of float: x = (high + low) * 2^exponent of its row, high and low in (2, rows, pitch).
struct SplitHalfRowsParams {
  MatrixView source;  // (rows, cols), float
  int64_t rows, cols;
  void* terms;            // pitch: cols rounded up to 8
  SplitHalfRow* of_rows;  // (rows,)
};

cudaError_t launch_split_half_rows(const SplitHalfRowsParams& params, cudaStream_t stream);

}  // namespace attention_ext
