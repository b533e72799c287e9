// The float linear layer on Tensor Cores of every card: out = input . weight^T + bias by three products of half terms (split_rows.cu).
//
// Product of a block tile by wmma, gemm/mainloop.cuh, that runs over three pairs of matrices: low . high, high . low, high . high. The
// sum of each step of 64 in k is added to float registers, as Tensor Cores truncate what they add. Epilogue: exponents of row and
// column, bias. Tiles with a row that is not finite, or with four adjacent results that are tiny beside their operands, are marked
// (warpgroup_linear.cu says why): tiled_linear.cu makes those anew.
// Grid: one CTA per block tile (tile_of), 256 threads, one CTA an SM. Shared memory: 74,752 bytes.
#include "../gemm/mainloop.cuh"
#include "linear_params.h"
#include "terms.cuh"

namespace attention_ext {
namespace {

using Tile = SplitTile;

struct SplitLinearParams : TermsLinearParams {
  BatchDims terms;             // (2, 2), of which three: (0, 0), (0, 1), (1, 0)
  MatrixView inputs, weights;  // low, high, high; high, low, high
};

struct SplitLinearWork {
  const SplitLinearParams& p;
  int row, col;  // of the tile's first element

  __device__ __forceinline__ int aim(TileLoader<Tile, Tile::A>& input, TileLoader<Tile, Tile::B>& weight) const {
    input.aim(0, 0, row, static_cast<int>(p.rows), 0, static_cast<int>(p.K));
    weight.aim(0, 0, col, static_cast<int>(p.cols), 0, static_cast<int>(p.K));
    return 3 * steps_of<Tile>(static_cast<int>(p.K));
  }
  // The row's exponent.
  __device__ __forceinline__ RowValues<float> fetch_row(int tile_row) const {
    return {__int_as_float(row + tile_row < p.rows ? p.input_exponents[row + tile_row] : kRowOfZeros), 0.0f};
  }
  __device__ __forceinline__ RowValues<float> row_value(RowValues<float> values) const { return values; }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, Tile::Shared& shared) const {
    const int rows = static_cast<int>(p.rows) - row, cols = static_cast<int>(p.cols) - col;
    const float* g_bias = static_cast<const float*>(p.bias) + col * p.bias_stride;
    float* g_out = p.out + row * p.pitch + col;
    const float least = least_right_sum(p.K);
    bool suspect = false;
    product.for_each_quad<false>(shared, rows, cols, [&](int quad_row, int quad_col, const float (&sum)[4]) {
      const int row_exponent = __float_as_int(shared.row[quad_row].first);
      bool any_column = false;
      float x[4], largest = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool in = quad_col + e < cols;
        const int exponent = in ? p.weight_exponents[col + quad_col + e] : kRowOfZeros;
        any_column = any_column || exponent != kRowOfZeros;
        suspect = suspect || exponent == kRowNotFinite;
        largest = fmaxf(largest, fabsf(sum[e]));
        x[e] = times_power_of_two(sum[e], row_exponent + exponent);
        if (p.bias != nullptr && in) x[e] += g_bias[(quad_col + e) * p.bias_stride];
      }
      suspect = suspect || row_exponent == kRowNotFinite || (any_column && row_exponent != kRowOfZeros && !(largest >= least));
      store_quad<float>(g_out + quad_row * p.pitch, quad_col, cols, 1, p.pitch % 4 == 0, x);
    });
    if (suspect) p.suspect[row / Tile::kM * p.suspect_pitch + col / Tile::kN] = 1;
  }
};

__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    split_linear_kernel(const __grid_constant__ SplitLinearParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  const TileIndex index = tile_of(blockIdx.x, m_tiles, n_tiles, first_batch);
  const SplitLinearWork work = {p, index.m * Tile::kM, index.n * Tile::kN};
  run_tile<Tile, true>(work, TileLoader<Tile, Tile::A>(p.terms, p.inputs), TileLoader<Tile, Tile::B>(p.terms, p.weights));
}

}  // namespace

cudaError_t launch_split_linear(const TermsLinearParams& params, cudaStream_t stream) {
  static_assert(Tile::kM == kLinearTile && Tile::kN == kLinearTile, "tiles are marked one by one");
  SplitLinearParams split = {{params}, {{2, 2}, 2}, params.input, params.weight};
  const int64_t to_low = params.input.batch_stride[0];
  split.inputs.data = static_cast<__half*>(params.input.data) + to_low;
  split.inputs.batch_stride[0] = split.inputs.batch_stride[1] = -to_low;
  split.weights.batch_stride[0] = 0;
  split.weights.batch_stride[1] = params.weight.batch_stride[0];
  return launch_tiles<Tile>(split_linear_kernel, split, params.rows, params.cols, 1, stream);
}

}  // namespace attention_ext
