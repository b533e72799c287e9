// Batch norm's statistics per feature and batch norm's numbers of each: ((x - center) * factor + shift) * scale.
//
// Training: means and squares of 16 rows each are joined (Chan, Golub, LeVeque 1979), in double: mean = sum n_i mean_i / M,
// var = (sum squares_i + sum n_i (mean_i - mean)^2) / M. Evaluation: the running statistics.
// Grid: one CTA per 32 features; 32 x 8 threads, whose warps each take every eighth part. Shared memory: 2 KB.
#include "core/arithmetic.h"
#include "core/tensors.h"
#include "device/common/types.cuh"
#include "linear/params.h"

namespace attention_ext {
namespace {

constexpr int kColumns = 32, kWarps = 8;

// Element of an array whose dtype is known at run time only.
template <class A>
__device__ __forceinline__ A element(const void* data, DataType type, int64_t index) {
  switch (type) {
    case DataType::kHalf: return to_accumulator(static_cast<const __half*>(data)[index]);
    case DataType::kBFloat16: return to_accumulator(static_cast<const __nv_bfloat16*>(data)[index]);
    case DataType::kFloat: return static_cast<const float*>(data)[index];
    case DataType::kDouble: return static_cast<A>(static_cast<const double*>(data)[index]);
  }
  return A(0);
}

// Sum over the warps of a column; all of them get it.
__device__ __forceinline__ double sum_over_warps(double x, double (&s_sum)[kWarps][kColumns]) {
  __syncthreads();  // the sums before have been read
  s_sum[threadIdx.y][threadIdx.x] = x;
  __syncthreads();  // all warps' sums are there
  double sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += s_sum[warp][threadIdx.x];
  return sum;
}

template <class A>
__global__ void __launch_bounds__(kColumns* kWarps) batch_norm_kernel(const __grid_constant__ BatchNormParams p) {
  __shared__ double s_sum[kWarps][kColumns];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const bool exists = col < p.N;
  A mean = 0, var = 0;
  if (p.statistics != nullptr) {
    const int64_t parts = (p.M + kStatisticsRows - 1) / kStatisticsRows;
    const ColumnStatistics<A>* g_statistics = static_cast<const ColumnStatistics<A>*>(p.statistics) + col;
    const auto rows_of = [&](int64_t part) {
      return static_cast<double>(min(p.M - part * kStatisticsRows, int64_t{kStatisticsRows}));
    };
    double sum = 0, squares = 0;
    if (exists) {
#pragma unroll 4
      for (int64_t part = threadIdx.y; part < parts; part += kWarps) sum += rows_of(part) * g_statistics[part * p.N].mean;
    }
    const double exact_mean = sum_over_warps(sum, s_sum) / static_cast<double>(p.M);
    if (exists) {
#pragma unroll 4
      for (int64_t part = threadIdx.y; part < parts; part += kWarps) {
        const ColumnStatistics<A> of_part = g_statistics[part * p.N];
        const double difference = of_part.mean - exact_mean;
        squares += of_part.squares + rows_of(part) * difference * difference;
      }
    }
    mean = static_cast<A>(exact_mean);
    var = static_cast<A>(sum_over_warps(squares, s_sum) / static_cast<double>(p.M));
  } else if (exists) {
    mean = element<A>(p.running_mean, p.running_mean_type, col * p.running_mean_stride);
    var = element<A>(p.running_var, p.running_var_type, col * p.running_var_stride);
  }
  if (!exists || threadIdx.y != 0) return;
  const A weight = p.weight != nullptr ? element<A>(p.weight, p.weight_type, col * p.weight_stride) : A(1);
  const A bias = p.bias != nullptr ? element<A>(p.bias, p.bias_type, col * p.bias_stride) : A(0);
  static_cast<A*>(p.mean)[col] = static_cast<A*>(p.center)[col] = mean;
  static_cast<A*>(p.var)[col] = var;
  static_cast<A*>(p.factor)[col] = weight / sqrt(var + static_cast<A>(p.eps));
  static_cast<A*>(p.shift)[col] = bias;
  static_cast<A*>(p.scale_of)[col] = element<A>(p.scale, p.scale_type, col * p.scale_stride);
}

template <class A>
cudaError_t launch_typed(const BatchNormParams& params, cudaStream_t stream) {
  batch_norm_kernel<A><<<static_cast<unsigned>(ceil_div(params.N, kColumns)), dim3(kColumns, kWarps), 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_batch_norm(const BatchNormParams& params, cudaStream_t stream) {
  if (params.N == 0) return cudaSuccess;
  return params.type == DataType::kDouble ? launch_typed<double>(params, stream) : launch_typed<float>(params, stream);
}

}  // namespace attention_ext
