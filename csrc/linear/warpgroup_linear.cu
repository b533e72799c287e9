// The linear layer by warpgroups (Hopper): out = input . weight^T + bias in float, with statistics of out's columns.
//
// Products of block tiles, gemm/warpgroup_mainloop.cuh. float operands come as two half terms each (split_rows.cu), tiles of 128 x 128,
// and the partial sums of every step of 64 in k are added to float registers, as Tensor Cores truncate what they add. Half types
// come as they are, tiles of 128 x 256. Epilogue: exponents of row and column, bias, mean and squares of each column over the
// warp's 16 rows.
//
// What the terms leave out of an element is 2^-39 of its row's largest. It shows only where a row of the product is tiny beside its
// operands (columns scaled one way in input and the other way in weight); the epilogue finds tiles with such rows, and tiles of rows
// that are not finite, and marks them: tiled_linear.cu makes those anew.
// Grid: one CTA an SM, which stays; 384 threads. Shared memory: the tiles' Shared. Registers: 232 a consumer thread.
#include "../device/math.cuh"
#include "../gemm/warpgroup_mainloop.cuh"
#include "../sm90/tensor_map.h"
#include "linear_params.h"
#include "terms.cuh"

namespace attention_ext {
namespace {

template <class Tile>
struct WarpgroupLinearWork {
  using T = typename Tile::T;
  static constexpr bool kTerms = Tile::kTerms == 2;
  using Bias = std::conditional_t<kTerms, float, T>;

  const TermsLinearParams& p;

  struct Place {
    int row, col;    // of the tile's first element
    int rows, cols;  // that exist from there on
    int steps;
    TensorPosition a, b;
  };

  __device__ __forceinline__ int m_tiles() const { return static_cast<int>((p.rows + Tile::kM - 1) / Tile::kM); }
  __device__ __forceinline__ int n_tiles() const { return static_cast<int>((p.cols + Tile::kN - 1) / Tile::kN); }
  __device__ __forceinline__ int64_t tiles() const { return static_cast<int64_t>(m_tiles()) * n_tiles(); }

  __device__ __forceinline__ Place aim(int64_t tile) const {
    const TileIndex index = tile_of(static_cast<unsigned>(tile), m_tiles(), n_tiles(), 0);
    Place at;
    at.row = index.m * Tile::kM;
    at.col = index.n * Tile::kN;
    at.rows = static_cast<int>(p.rows) - at.row;
    at.cols = static_cast<int>(p.cols) - at.col;
    at.steps = static_cast<int>((p.K + Tile::kK - 1) / Tile::kK);
    at.a = {{0, at.row, 0, 0, 0}};
    at.b = {{0, at.col, 0, 0, 0}};
    return at;
  }

  // The row's exponent.
  __device__ __forceinline__ int fetch(const Place& at, int row) const {
    return kTerms && row < at.rows ? p.input_exponents[at.row + row] : kRowOfZeros;
  }

  __device__ __forceinline__ void store(const Place& at, int row, int first_exponent, int second_exponent,
                                        const float (&product)[Tile::kN / 2], uint32_t) const {
    const int lane = threadIdx.x % 32, warp_rows = min(max(at.rows - (row - lane / 4), 0), kStatisticsRows);
    const bool exists[2] = {row < at.rows, row + 8 < at.rows};
    const int exponents[2] = {first_exponent, second_exponent};
    const bool pairs = p.pitch % 2 == 0;
    float* g_out = p.out + (at.row + row) * p.pitch + at.col;
    ColumnStatistics<float>* g_statistics =
        static_cast<ColumnStatistics<float>*>(p.statistics) + (at.row + row - lane / 4) / kStatisticsRows * p.pitch + at.col;
    float largest[2] = {0.0f, 0.0f};
    bool any_column = false, suspect = first_exponent == kRowNotFinite || second_exponent == kRowNotFinite;
#pragma unroll
    for (int group = 0; group < Tile::kN / 8; ++group) {
      const int col = group * 8 + lane % 4 * 2;
      float x[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool in = col + e < at.cols;
        const int exponent = kTerms && in ? p.weight_exponents[at.col + col + e] : kRowOfZeros;
        const float bias = p.bias != nullptr && in
                               ? to_accumulator(static_cast<const Bias*>(p.bias)[(at.col + col + e) * p.bias_stride])
                               : 0.0f;
        if constexpr (kTerms) {
          any_column = any_column || exponent != kRowOfZeros;
          suspect = suspect || exponent == kRowNotFinite;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float sum = product[group * 4 + half * 2 + e];
          if constexpr (kTerms) {
            largest[half] = maximum(largest[half], fabsf(sum));
            x[half][e] = times_power_of_two(sum, exponents[half] + exponent) + bias;
          } else {
            x[half][e] = sum + bias;
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* g_pair = g_out + half * 8 * p.pitch + col;
        if (!exists[half] || col >= at.cols) continue;
        if (pairs && col + 1 < at.cols) {
          *reinterpret_cast<float2*>(g_pair) = make_float2(x[half][0], x[half][1]);
        } else {
          g_pair[0] = x[half][0];
          if (col + 1 < at.cols) g_pair[1] = x[half][1];
        }
      }
      if (p.statistics != nullptr && warp_rows > 0) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // Sums count from the first row's value: the mean of equal values is then just that.
          float shift = __shfl_sync(0xffffffffu, x[0][e], lane % 4);
          if (!isfinite(shift)) shift = 0.0f;
          const float sum = sum_of_column((exists[0] ? x[0][e] - shift : 0.0f) + (exists[1] ? x[1][e] - shift : 0.0f));
          const float mean = shift + sum / static_cast<float>(warp_rows);
          const float low = exists[0] ? x[0][e] - mean : 0.0f, high = exists[1] ? x[1][e] - mean : 0.0f;
          const float squares = sum_of_column(low * low + high * high);
          if (lane < 4 && col + e < at.cols) g_statistics[col + e] = {mean, squares};
        }
      }
    }
    if constexpr (kTerms) {
      const float least = least_right_sum(p.K);
      any_column = __any_sync(0xffffffffu, any_column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = maximum(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
        largest[half] = maximum(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
        suspect = suspect || (any_column && exponents[half] != kRowOfZeros && !(largest[half] >= least));
      }
      if (__any_sync(0xffffffffu, suspect) && lane == 0) {
        p.suspect[at.row / Tile::kM * p.suspect_pitch + at.col / Tile::kN] = 1;
      }
    }
  }

  // Over the eight lanes that hold a column's rows.
  static __device__ __forceinline__ float sum_of_column(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    warpgroup_linear_kernel(const __grid_constant__ TermsLinearParams p, const __grid_constant__ ProductMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // other cards never launch it
  run_warpgroup_tiles<Tile>(WarpgroupLinearWork<Tile>{p}, maps);
#endif
}

template <class Tile>
cudaError_t launch_tile(const TermsLinearParams& params, cudaStream_t stream) {
  static_assert(Tile::kTerms == 1 || (Tile::kM == kLinearTile && Tile::kN == kLinearTile), "tiles are marked one by one");
  const DataType type = Tile::kTerms == 2 ? DataType::kHalf : params.type;
  const BatchDims terms = {{Tile::kTerms}, 1};
  ProductMaps maps;
  cudaError_t status = make_tensor_map(maps.a, type, terms, params.input, params.rows, params.K, Tile::kM);
  if (status == cudaSuccess) status = make_tensor_map(maps.b, type, terms, params.weight, params.cols, params.K, Tile::kN);
  if (status != cudaSuccess) return status;
  const int64_t tiles = ceil_div(params.rows, Tile::kM) * ceil_div(params.cols, Tile::kN);
  return launch_warpgroup_tiles<Tile>(warpgroup_linear_kernel<Tile>, params, maps, tiles, stream);
}

}  // namespace

cudaError_t launch_warpgroup_linear(const TermsLinearParams& params, cudaStream_t stream) {
  switch (params.type) {
    case DataType::kHalf: return launch_tile<WarpgroupTile<__half, false>>(params, stream);
    case DataType::kBFloat16: return launch_tile<WarpgroupTile<__nv_bfloat16, false>>(params, stream);
    case DataType::kFloat: return launch_tile<SplitWarpgroupTile>(params, stream);
    case DataType::kDouble: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace attention_ext
