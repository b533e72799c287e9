// The float linear layer on Tensor Cores of every card: out = input . weight^T + bias by split_half, three products of half terms.
//
// Product of a block tile by wmma, gemm/mainloop.cuh, that runs over three pairs of matrices: low . high, high . low, high . high.
// The sum of each step of 64 in k is added to float registers, as Tensor Cores truncate what they add. Epilogue: exponents of row
// and column, bias. Tiles with a row that is not finite, or with a row or a column that is tiny relative to its operands, are
// marked (sm90/wgmma_linear.cu says why): tiled_linear.cu makes those anew.
// Grid: one CTA per block tile (tile_of), 256 threads, one CTA an SM. Shared memory: 76,928 bytes.
#include "core/tensors.h"
#include "gemm/mainloop.cuh"
#include "gemm/split_half/epilogue.cuh"
#include "gemm/split_half/params.h"
#include "linear/params.h"

namespace attention_ext {
namespace {

using Tile = SplitHalfTile;

struct SplitLinearParams : LinearPartParams {
  BatchDims terms;             // (2, 2), of which three: (0, 0), (0, 1), (1, 0)
  MatrixView inputs, weights;  // low, high, high; high, low, high
};

// Of a row or column of a tile: its exponent, and the largest of its sums, whose bits compare as they do.
struct Largest {
  int exponent, sum;
  __device__ __forceinline__ void join(float x) { atomicMax(&sum, __float_as_int(x)); }
};

struct SplitHalfLinearWork {
  const SplitLinearParams& p;
  int row, col;  // of the tile's first element

  __device__ __forceinline__ int aim(TileLoader<Tile, Tile::A>& input, TileLoader<Tile, Tile::B>& weight) const {
    input.aim(0, 0, row, static_cast<int>(p.rows), 0, static_cast<int>(p.K));
    weight.aim(0, 0, col, static_cast<int>(p.cols), 0, static_cast<int>(p.K));
    return 3 * steps_of<Tile>(static_cast<int>(p.K));
  }
  // The row's exponent and what its terms leave out.
  __device__ __forceinline__ RowValues<float> fetch_row(int tile_row) const {
    const SplitHalfRow of_row = row + tile_row < p.rows ? p.input_rows[row + tile_row] : SplitHalfRow{kRowOfZeros, 0.0f};
    return {__int_as_float(of_row.exponent), of_row.left_out};
  }
  __device__ __forceinline__ RowValues<float> row_value(RowValues<float> values) const { return values; }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, Tile::Shared& shared) const {
    __shared__ Largest s_row[Tile::kM], s_col[Tile::kN];      // of each row and column of the tile
    __shared__ int s_exponent[2], s_count[2], s_left_out[2];  // of rows, of columns that are not zeros: the largest, how many
    const int rows = static_cast<int>(p.rows) - row, cols = static_cast<int>(p.cols) - col;
    if (threadIdx.x < 2) {
      s_exponent[threadIdx.x] = kRowOfZeros;
      s_count[threadIdx.x] = s_left_out[threadIdx.x] = 0;
    }
    __syncthreads();  // the counts are clear
    static_assert(Tile::kThreads == Tile::kM + Tile::kN, "a thread for every row and every column");
    const bool is_row = threadIdx.x < Tile::kM;
    const int mine = is_row ? threadIdx.x : threadIdx.x - Tile::kM;
    const SplitHalfRow own = is_row        ? SplitHalfRow{__float_as_int(shared.row[mine].first), shared.row[mine].second}
                             : mine < cols ? p.weight_rows[col + mine]
                                           : SplitHalfRow{kRowOfZeros, 0.0f};
    const int exponent = own.exponent;
    (is_row ? s_row : s_col)[mine] = {exponent, 0};
    atomicMax(&s_exponent[is_row ? 0 : 1], exponent);
    atomicMax(&s_left_out[is_row ? 0 : 1], __float_as_int(own.left_out));
    if (exponent != kRowOfZeros) atomicAdd(&s_count[is_row ? 0 : 1], 1);
    __syncthreads();  // exponents and counts are there
    const int row_exponent = s_exponent[0], column_exponent = s_exponent[1];

    const float* g_bias = static_cast<const float*>(p.bias) + col * p.bias_stride;
    float* g_out = p.out + row * p.pitch + col;
    product.for_each_quad<false>(shared, rows, cols, [&](int quad_row, int quad_col, const float (&sum)[4]) {
      const int of_row = s_row[quad_row].exponent;
      float x[4], largest = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool in = quad_col + e < cols;
        const int of_col = s_col[quad_col + e].exponent;
        largest = fmaxf(largest, fabsf(sum[e]) * relative_to_largest(of_col, column_exponent));
        s_col[quad_col + e].join(fabsf(sum[e]) * relative_to_largest(of_row, row_exponent));
        x[e] = times_power_of_two(sum[e], of_row + of_col);
        if (p.bias != nullptr && in) x[e] += g_bias[(quad_col + e) * p.bias_stride];
      }
      s_row[quad_row].join(largest);
      store_quad<float>(g_out + quad_row * p.pitch, quad_col, cols, 1, p.pitch % 4 == 0, x);
    });
    __syncthreads();  // all sums have joined
    const int count = s_count[is_row ? 1 : 0], others = s_count[is_row ? 0 : 1];
    const float largest = __int_as_float((is_row ? s_row : s_col)[mine].sum);
    const float left_out = own.left_out + __int_as_float(s_left_out[is_row ? 1 : 0]);
    const bool tiny = exponent != kRowOfZeros && count > 0 && !(largest >= LeastAccurateSum(p.K, count, others)(left_out));
    if (tiny || exponent == kRowNotFinite) p.suspect[row / Tile::kM * p.suspect_pitch + col / Tile::kN] = 1;
  }
};

__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    split_half_linear_kernel(const __grid_constant__ SplitLinearParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  const TileIndex index = tile_of(blockIdx.x, m_tiles, n_tiles, first_batch);
  const SplitHalfLinearWork work = {p, index.m * Tile::kM, index.n * Tile::kN};
  run_tile<Tile, true>(work, TileLoader<Tile, Tile::A>(p.terms, p.inputs), TileLoader<Tile, Tile::B>(p.terms, p.weights));
}

}  // namespace

cudaError_t launch_split_half_linear(const LinearPartParams& params, cudaStream_t stream) {
  static_assert(Tile::kM == kLinearTile && Tile::kN == kLinearTile, "tiles are marked one by one");
  SplitLinearParams split = {params, {{2, 2}, 2}, params.input, params.weight};
  const int64_t to_low = params.input.batch_stride[0];
  split.inputs.data = static_cast<__half*>(params.input.data) + to_low;
  split.inputs.batch_stride[0] = split.inputs.batch_stride[1] = -to_low;
  split.weights.batch_stride[0] = 0;
  split.weights.batch_stride[1] = params.weight.batch_stride[0];
  return launch_tiles<Tile>(split_half_linear_kernel, split, params.rows, params.cols, 1, stream);
}

}  // namespace attention_ext
