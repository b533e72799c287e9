// The linear layer by wgmma (Hopper): out = input . weight^T + bias in float, with statistics of out's columns.
//
// Products of block tiles, gemm/sm90/mainloop.cuh. float operands come as two half terms each (split_half), in tiles of 128 x 128,
// and the partial sums of every step of 64 in k are added to float registers, as Tensor Cores truncate what they add. Half types
// come as they are, in tiles of 128 x 256. Epilogue: exponents of row and column, bias, mean and squares of each column over the
// warp's 16 rows.
//
// What the half terms leave out of an element is 2^-39 of its row's largest. It shows only where a row or a column of the product
// is tiny relative to its operands (columns scaled up in input and down in weight, an outlier that meets zeros):
// gemm/split_half/epilogue.cuh. The epilogue finds such rows of a tile and such columns of a warp's 16 rows, and rows that are not
// finite, and marks the tile: tiled_linear.cu makes it anew.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: the tiles' Shared. Registers: 232 a consumer thread.
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/tensor_map.h"
#include "core/tensors.h"
#include "device/common/math.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/split_half/epilogue.cuh"
#include "gemm/split_half/params.h"
#include "linear/params.h"

namespace attention_ext {
namespace {

template <class Tile>
struct WgmmaLinearWork {
  using T = typename Tile::T;
  static constexpr bool kTerms = Tile::kTerms == 2;
  using Bias = std::conditional_t<kTerms, float, T>;

  const LinearPartParams& p;

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

  // The thread's two rows.
  struct Fetched {
    SplitHalfRow first, second;
  };
  __device__ __forceinline__ Fetched fetch(const Place& at, int row) const {
    return {terms_of_row(at, row), terms_of_row(at, row + 8)};
  }
  __device__ __forceinline__ SplitHalfRow terms_of_row(const Place& at, int row) const {
    return kTerms && row < at.rows ? p.input_rows[at.row + row] : SplitHalfRow{kRowOfZeros, 0.0f};
  }

  __device__ __forceinline__ PlainPromotion promotion(const Place&, int, const Fetched&, float (&product)[Tile::kN / 2]) const {
    return PlainPromotion(product);
  }

  __device__ __forceinline__ void store(const Place& at, int row, const Fetched& fetched, const float (&product)[Tile::kN / 2],
                                        uint32_t, PlainPromotion = {}) const {
    const int lane = threadIdx.x % 32, warp_rows = min(max(at.rows - (row - lane / 4), 0), kStatisticsRows);
    const SplitHalfRow first_row = fetched.first, second_row = fetched.second;
    const bool exists[2] = {row < at.rows, row + 8 < at.rows};
    const int exponents[2] = {first_row.exponent, second_row.exponent};
    const bool pairs = p.pitch % 2 == 0;
    float* g_out = p.out + (at.row + row) * p.pitch + at.col;
    ColumnStatistics<float>* g_statistics =
        static_cast<ColumnStatistics<float>*>(p.statistics) + (at.row + row - lane / 4) / kStatisticsRows * p.pitch + at.col;
    // Of the tile's columns and of the warp's rows that are not zeros: the largest exponent, the most left out, how many there are.
    int column_exponent = kRowOfZeros, columns = 0, row_exponent = max(exponents[0], exponents[1]);
    int terms_rows = (exponents[0] != kRowOfZeros) + (exponents[1] != kRowOfZeros);
    float left_out_of_columns = 0.0f, left_out_of_rows = maximum(first_row.left_out, second_row.left_out);
    if constexpr (kTerms) {
#pragma unroll 4
      for (int group = 0; group < Tile::kN / 8; ++group) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const SplitHalfRow column = terms_of_column(at, group * 8 + lane % 4 * 2 + e);
          column_exponent = max(column_exponent, column.exponent);
          columns += column.exponent != kRowOfZeros;
          left_out_of_columns = maximum(left_out_of_columns, column.left_out);
        }
      }
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {  // 1 and 2: lanes of other columns; 4, 8, 16: of other rows
        int& exponent = lanes < 4 ? column_exponent : row_exponent;
        int& count = lanes < 4 ? columns : terms_rows;
        float& left_out = lanes < 4 ? left_out_of_columns : left_out_of_rows;
        exponent = max(exponent, __shfl_xor_sync(0xffffffffu, exponent, lanes));
        count += __shfl_xor_sync(0xffffffffu, count, lanes);
        left_out = maximum(left_out, __shfl_xor_sync(0xffffffffu, left_out, lanes));
      }
    }
    const LeastAccurateSum least_of_column(p.K, terms_rows, columns);
    float largest[2] = {0.0f, 0.0f};
    bool suspect = column_exponent == kRowNotFinite || row_exponent == kRowNotFinite;
#pragma unroll
    for (int group = 0; group < Tile::kN / 8; ++group) {
      const int col = group * 8 + lane % 4 * 2;
      float x[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool in = col + e < at.cols;
        const SplitHalfRow column = terms_of_column(at, col + e);
        const int exponent = column.exponent;
        const float bias = p.bias != nullptr && in
                               ? to_accumulator(static_cast<const Bias*>(p.bias)[(at.col + col + e) * p.bias_stride])
                               : 0.0f;
        float largest_of_column = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float sum = product[group * 4 + half * 2 + e];
          if constexpr (kTerms) {
            largest[half] = maximum(largest[half], fabsf(sum) * relative_to_largest(exponent, column_exponent));
            largest_of_column = maximum(largest_of_column, fabsf(sum) * relative_to_largest(exponents[half], row_exponent));
            x[half][e] = times_power_of_two(sum, exponents[half] + exponent) + bias;
          } else {
            x[half][e] = sum + bias;
          }
        }
        if constexpr (kTerms) {
          largest_of_column = largest_over_rows(largest_of_column);
          suspect = suspect || (exponent != kRowOfZeros && terms_rows > 0 &&
                                !(largest_of_column >= least_of_column(column.left_out + left_out_of_rows)));
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
      const LeastAccurateSum least_of_row(p.K, columns, terms_rows);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = maximum(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
        largest[half] = maximum(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
        const float left_out = (half == 0 ? first_row : second_row).left_out + left_out_of_columns;
        suspect = suspect || (columns > 0 && exponents[half] != kRowOfZeros && !(largest[half] >= least_of_row(left_out)));
      }
      if (__any_sync(0xffffffffu, suspect) && lane == 0) {
        p.suspect[at.row / Tile::kM * p.suspect_pitch + at.col / Tile::kN] = 1;
      }
    }
  }

  // Of a column of the tile; as a row of zeros where there is none.
  __device__ __forceinline__ SplitHalfRow terms_of_column(const Place& at, int col) const {
    return kTerms && col < at.cols ? p.weight_rows[at.col + col] : SplitHalfRow{kRowOfZeros, 0.0f};
  }

  // Over the eight lanes that hold a column's rows.
  static __device__ __forceinline__ float largest_over_rows(float x) {
    x = maximum(x, __shfl_xor_sync(0xffffffffu, x, 4));
    x = maximum(x, __shfl_xor_sync(0xffffffffu, x, 8));
    return maximum(x, __shfl_xor_sync(0xffffffffu, x, 16));
  }
  static __device__ __forceinline__ float sum_of_column(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
  }
};

template <class Tile>
cudaError_t launch_tile(const LinearPartParams& params, cudaStream_t stream) {
  static_assert(Tile::kTerms == 1 || (Tile::kM == kLinearTile && Tile::kN == kLinearTile), "tiles are marked one by one");
  const DataType type = Tile::kTerms == 2 ? DataType::kHalf : params.type;
  const BatchDims terms = {{Tile::kTerms}, 1};
  WgmmaMaps maps;
  cudaError_t status = make_tensor_map(maps.a, type, terms, params.input, params.rows, params.K, Tile::kM);
  if (status == cudaSuccess) status = make_tensor_map(maps.b, type, terms, params.weight, params.cols, params.K, Tile::kN);
  if (status != cudaSuccess) return status;
  const int64_t tiles = ceil_div(params.rows, Tile::kM) * ceil_div(params.cols, Tile::kN);
  return launch_wgmma_tiles<WgmmaLinearWork, Tile>(params, maps, tiles, stream);
}

}  // namespace

cudaError_t launch_wgmma_linear(const LinearPartParams& params, cudaStream_t stream) {
  return dispatch_among<__half, __nv_bfloat16, float>(params.type, [&](auto element) {
    using T = decltype(element);
    return launch_tile<std::conditional_t<std::is_same_v<T, float>, SplitHalfWgmmaTile<false, 64>, WgmmaTile<T, false>>>(
        params, stream);
  });
}

}  // namespace attention_ext
