// The backward of the row kernels for Hopper: two kernels that share nothing but the log-sum-exp and delta. The row kernel makes
// dQ, the column kernel dK and dV; each multiplies the scores again, and has its sums in registers, in one order.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace attention_ext {

// A call, and what was made of its rows before.
struct RowsBackwardParams : BackwardParams {
  const float* delta;  // (N, L)
  const float* norm;   // (N, L), of rows with a large log-sum-exp: factors of their probabilities
  float unit;          // scale * log2 e: of exponents
  float scale_factor;  // scale
  float keep_factor;   // of what dropout keeps
  bool differences;    // whether scores are subtracted from before they are exponents: the scale is none to multiply these by
};

cudaError_t rows_backward_64(const RowsBackwardParams& params, cudaStream_t stream);
cudaError_t rows_backward_128(const RowsBackwardParams& params, cudaStream_t stream);
cudaError_t rows_backward_192(const RowsBackwardParams& params, cudaStream_t stream);
cudaError_t rows_backward_256(const RowsBackwardParams& params, cudaStream_t stream);

// As pipeline_backward and its company. Of a problem that the kernel's row of the table (plan/backward.cpp) does not refuse.
int64_t rows_backward_workspace(const BackwardParams& params);
bool rows_backward_sums_mask(const BackwardParams& params);
cudaError_t rows_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
