// What crosses from host code into the kernels of the linear layer, batch norm and softmax. Conventions: core/tensors.h.
//
// Sizes: M rows of the input, N features, K width. Accumulator type: float, or double for double.
#pragma once

#include <cuda_runtime_api.h>

#include "core/tensors.h"
#include "gemm/split_half/params.h"

namespace attention_ext {

constexpr int kStatisticsRows = 16;  // rows that one partial statistic of a column covers: those of a warp's part of a wgmma
constexpr int kLinearTile = 128;     // rows and columns of what is marked as suspect, the block tile of both float products

// Mean of some rows of a column, and the sum of squared differences from it.
template <class A>
struct ColumnStatistics {
  A mean, squares;
};

// out = input . weight^T + bias, and statistics of out's columns.
struct LinearParams {
  int64_t M, N, K;
  MatrixView input;   // (M, K), `type`
  MatrixView weight;  // (N, K), `type`
  const void* bias;   // (N,), `type`; null: absent
  int64_t bias_stride;
  void* out;         // (M, N) dense, accumulator type
  void* statistics;  // (ceil(M / kStatisticsRows), N) of ColumnStatistics, accumulator type; null: not wanted
  DataType type;
  // float, after a split_half product: only tiles that it has marked here. Null: all tiles.
  const int32_t* suspect;  // (ceil(M / kLinearTile), ceil(N / kLinearTile))
};

// Some rows and features of the layer, on Tensor Cores: float operands by split_half, half types as they are (wgmma only). Pointers
// begin at the part's first row or column.
struct LinearPartParams {
  int64_t rows, cols, K;
  MatrixView input, weight;                      // (rows, K), (cols, K) in half types; split_half: (2, rows, K), (2, cols, K)
  const SplitHalfRow *input_rows, *weight_rows;  // (rows,), (cols,); split_half only
  const void* bias;                              // (cols,), `type`; null: absent
  int64_t bias_stride;
  float* out;        // (rows, cols), rows `pitch` apart
  void* statistics;  // rows of ColumnStatistics<float>, `pitch` apart; null: not wanted
  int64_t pitch;     // the layer's N
  int32_t* suspect;  // of this part's first tile, rows of tiles `suspect_pitch` apart; split_half only
  int64_t suspect_pitch;
  DataType type;
};

// Statistics of the columns from their parts, or the running ones; and what batch norm and scale make of a value x of column n:
// ((x - center[n]) * factor[n] + shift[n]) * scale_of[n]. The scale comes last: infinite, it makes infinities and not NaN.
struct BatchNormParams {
  int64_t M, N;
  const void* statistics;                  // as LinearParams::statistics; null: the running statistics
  const void *running_mean, *running_var;  // (N,), as all below up to scale in `parameter_type` of their own
  const void *weight, *bias;               // (N,); null: 1 and 0
  const void* scale;                       // (N,) or one element
  int64_t running_mean_stride, running_var_stride, weight_stride, bias_stride, scale_stride;  // scale_stride 0: one element
  DataType running_mean_type, running_var_type, weight_type, bias_type, scale_type;
  double eps;
  void *mean, *var;                          // (N,), accumulator type; var is biased
  void *center, *factor, *shift, *scale_of;  // (N,), accumulator type
  DataType type;                             // of the layer
};

struct NormSoftmaxParams {
  int64_t M, N;
  const void* linear;                           // (M, N) dense, accumulator type
  const void *center, *factor, *shift, *scale;  // (N,), accumulator type
  void* out;                                    // (M, N) dense, `type`
  DataType type;
};

cudaError_t launch_wgmma_linear(const LinearPartParams& params, cudaStream_t stream);       // Hopper; no double
cudaError_t launch_split_half_linear(const LinearPartParams& params, cudaStream_t stream);  // float; no statistics
cudaError_t launch_tiled_linear(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_column_statistics(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_batch_norm(const BatchNormParams& params, cudaStream_t stream);
cudaError_t launch_norm_softmax(const NormSoftmaxParams& params, cudaStream_t stream);

// The rows of kLinearKernels (plan/kernels.h), in their order: sm80/tiled_linear.cu; for float sm80/split_half_linear.cu; on Hopper
// sm90/wgmma_linear.cu, float by split_half.
enum class LinearKernel { kTiled, kSplitHalf, kWgmma };

// Host driver of the linear layer with its statistics.
int64_t linear_workspace(const LinearParams& params, LinearKernel kernel);
cudaError_t linear(const LinearParams& params, LinearKernel kernel, void* workspace, cudaStream_t stream);

}  // namespace attention_ext
