// The linear layer on every card and in every dtype: out = input . weight^T + bias in the accumulator type; and the statistics of
// out's columns by a kernel of their own.
//
// Product of a block tile on Tensor Cores (half types) or CUDA cores, gemm/mainloop.cuh. After a split_half product both kernels do
// only the tiles that it has marked: the other CTAs return at once.
// Grid: one CTA per block tile; statistics: one of 128 threads, a column each, per 128 x 128. Shared memory: 74,752 bytes (half
// types), 62,464 (float), 56,320 (double).
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "core/tensors.h"
#include "gemm/mainloop.cuh"
#include "linear/params.h"

namespace attention_ext {
namespace {

struct TiledLinearParams : LinearParams {
  BatchDims batch;  // one matrix
};

template <class Tile>
struct TiledLinearWork {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;

  const TiledLinearParams& p;
  int row, col;  // of the tile's first element

  __device__ __forceinline__ int aim(TileLoader<Tile, typename Tile::A>& input,
                                     TileLoader<Tile, typename Tile::B>& weight) const {
    input.aim(0, 0, row, static_cast<int>(p.M), 0, static_cast<int>(p.K));
    weight.aim(0, 0, col, static_cast<int>(p.N), 0, static_cast<int>(p.K));
    return steps_of<Tile>(static_cast<int>(p.K));
  }
  __device__ __forceinline__ RowValues<Acc> fetch_row(int) const { return {}; }
  __device__ __forceinline__ RowValues<Acc> row_value(RowValues<Acc> values) const { return values; }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, typename Tile::Shared& shared) const {
    const int rows = static_cast<int>(p.M) - row, cols = static_cast<int>(p.N) - col;
    const T* g_bias = static_cast<const T*>(p.bias) + col * p.bias_stride;
    Acc* g_out = static_cast<Acc*>(p.out) + row * p.N + col;
    product.template for_each_quad<false>(shared, rows, cols, [&](int quad_row, int quad_col, const Acc(&sum)[4]) {
      Acc x[4] = {sum[0], sum[1], sum[2], sum[3]};
      if (p.bias != nullptr) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (quad_col + e < cols) x[e] += to_accumulator(g_bias[(quad_col + e) * p.bias_stride]);
        }
      }
      store_quad<Acc>(g_out + quad_row * p.N, quad_col, cols, 1, p.N % 4 == 0, x);
    });
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    tiled_linear_kernel(const __grid_constant__ TiledLinearParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  const TileIndex index = tile_of(blockIdx.x, m_tiles, n_tiles, first_batch);
  if (p.suspect != nullptr && p.suspect[static_cast<int64_t>(index.m) * n_tiles + index.n] == 0) return;
  const TiledLinearWork<Tile> work = {p, index.m * Tile::kM, index.n * Tile::kN};
  run_tile<Tile>(work, TileLoader<Tile, typename Tile::A>(p.batch, p.input),
                 TileLoader<Tile, typename Tile::B>(p.batch, p.weight));
}

template <class A>
__global__ void __launch_bounds__(kLinearTile) column_statistics_kernel(const __grid_constant__ LinearParams p, int n_tiles) {
  if (p.suspect != nullptr && p.suspect[blockIdx.x] == 0) return;
  const int64_t col = blockIdx.x % n_tiles * kLinearTile + threadIdx.x,
                first = static_cast<int64_t>(blockIdx.x / n_tiles) * kLinearTile;
  if (col >= p.N) return;
  const A* g_column = static_cast<const A*>(p.out) + col;
  ColumnStatistics<A>* g_statistics = static_cast<ColumnStatistics<A>*>(p.statistics) + col;
#pragma unroll 1
  for (int64_t row = first; row < min(first + kLinearTile, p.M); row += kStatisticsRows) {
    const int rows = static_cast<int>(min(static_cast<int64_t>(kStatisticsRows), p.M - row));
    // Sums count from the first row's value: the mean of equal values is then just that.
    A x[kStatisticsRows], shift = g_column[row * p.N], sum = 0, squares = 0;
    if (!isfinite(shift)) shift = 0;
#pragma unroll
    for (int i = 0; i < kStatisticsRows; ++i) {
      x[i] = i < rows ? g_column[(row + i) * p.N] : A(0);
      if (i < rows) sum += x[i] - shift;
    }
    const A mean = shift + sum / static_cast<A>(rows);
#pragma unroll
    for (int i = 0; i < kStatisticsRows; ++i) squares += i < rows ? (x[i] - mean) * (x[i] - mean) : A(0);
    g_statistics[row / kStatisticsRows * p.N] = {mean, squares};
  }
}

template <class A>
cudaError_t launch_statistics(const LinearParams& params, cudaStream_t stream) {
  const int64_t n_tiles = ceil_div(params.N, kLinearTile), tiles = ceil_div(params.M, kLinearTile) * n_tiles;
  if (tiles == 0) return cudaSuccess;
  if (tiles > kMaxCtas) return cudaErrorInvalidConfiguration;
  column_statistics_kernel<A><<<static_cast<unsigned>(tiles), kLinearTile, 0, stream>>>(params, static_cast<int>(n_tiles));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_tiled_linear(const LinearParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) {
    using Tile = RowsByRows<decltype(element)>;
    if (params.suspect != nullptr && (Tile::kM != kLinearTile || Tile::kN != kLinearTile)) return cudaErrorInvalidValue;
    const TiledLinearParams tiled = {params, {{1}, 1}};
    return launch_tiles<Tile>(tiled_linear_kernel<Tile>, tiled, params.M, params.N, 1, stream);
  });
}

cudaError_t launch_column_statistics(const LinearParams& params, cudaStream_t stream) {
  return params.type == DataType::kDouble ? launch_statistics<double>(params, stream)
                                          : launch_statistics<float>(params, stream);
}

}  // namespace attention_ext
