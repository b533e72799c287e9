// split_half, float32 as the sum of two half terms: rows with exponents of their own (linear layers), or blocks of 64 rows that
// share one (attention), so that one set of terms is either operand of any product.
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
constexpr int32_t kTileOfFloats = 100001;  // of a tile of scores: floats, in the place of terms that would not do

// Rows of float: x = (high + low) * 2^exponent of its row, high and low in (2, rows, pitch).
struct SplitHalfRowsParams {
  MatrixView source;  // (rows, cols), float
  int64_t rows, cols;
  void* terms;            // pitch: cols rounded up to 8
  SplitHalfRow* of_rows;  // (rows,)
};

cudaError_t launch_split_half_rows(const SplitHalfRowsParams& params, cudaStream_t stream);

constexpr int kSplitHalfBlock = 64;  // rows that share an exponent: a warpgroup's, half a tile's keys, a step of k

// Of all rows of a matrix, in the elements' own units: magnitudes as their bits, which order as they do.
struct SplitHalfFacts {
  uint32_t norm;      // the largest norm of a row
  uint32_t left_out;  // the largest norm of what the terms leave out of a row's small elements, whose low term is subnormal
  uint32_t exact;     // not 0: two terms will not do, whatever they are multiplied by
};

// Matrices of float, x = (high + low) * 2^exponent of its block.
struct SplitHalfBlocksParams {
  BatchDims batch;
  MatrixView source;  // matrices of (all rows, cols)
  int64_t first;      // flat number of the first matrix
  int64_t group;      // of flat numbers that share a matrix
  int64_t matrices, row_begin, rows, cols;
  void* terms;                 // (2, matrices, rows, pitch), pitch: cols rounded up to 8
  int32_t* exponents;          // (matrices, rows / 64 rounded up); kRowOfZeros
  SplitHalfFacts* facts;       // of each flat number, begun with zeros; that of a matrix's first is kept
  const int32_t* row_lengths;  // rows of matrix n from row_lengths[n / heads] on count as zeros; null: none do
  int64_t heads;
  bool rows_weighted;  // a row that is tiny within its block is not exact: a weight may single it out
};

// All of up to four at once: as many CTAs as there are blocks.
cudaError_t launch_split_half_blocks(const SplitHalfBlocksParams* params, int count, cudaStream_t stream);

}  // namespace attention_ext
