// Stage 3: out = weights . values * factor / row_sum for one slice of rows; in the backward also dQ = scale * dS . key.
//
// Tensor Core (or plain) product of a block tile, gemm/mainloop.cuh, then per quad of columns: times factor / row_sum,
// where a row whose sum is 0 (no visible key) gives exactly 0. Causal: k ends at the last key that a row of the tile
// sees.
// Grid: one CTA per block tile of every matrix of the slice (tile_of); causal: longest row tiles first. 128 threads (half types) or 256.
// Shared memory: 72,704 bytes (half types), 57,088 (float), 54,016 (double). Registers: launch bounds of the tile table.
#include "../gemm/mainloop.cuh"
#include "../params.h"

namespace attention_ext {
namespace {

template <class Tile>
struct ValuesWork {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;

  const ScoresValuesParams& p;
  int m_tiles, n_tiles;
  int64_t first_batch;

  struct Place {
    int64_t n, slice_index;
    int row, col;    // of the tile's first element; rows from the beginning of the slice, as weights and row_sum count
    int rows, cols;  // that exist from there on
    int keys;        // that any of the tile's rows sees
  };
  __device__ __forceinline__ Place place() const {
    const TileIndex index = tile_of(blockIdx.x, m_tiles, n_tiles, first_batch);
    Place at;
    at.n = p.slice.batch_begin + index.batch;
    at.slice_index = index.batch;
    at.row = (p.causal ? m_tiles - 1 - index.m : index.m) * Tile::kM;  // causal: longest first
    at.col = index.n * Tile::kN;
    at.rows = static_cast<int>(p.slice.row_count) - at.row;
    at.cols = static_cast<int>(p.Ev) - at.col;
    at.keys = static_cast<int>(p.slice.col_count);
    if (p.causal) at.keys = min(at.keys, static_cast<int>(p.slice.row_begin) + at.row + Tile::kM);
    return at;
  }

  __device__ __forceinline__ int aim(TileLoader<Tile, typename Tile::A>& weights,
                                     TileLoader<Tile, typename Tile::B>& values) const {
    const Place at = place();
    weights.aim(at.n, at.slice_index, at.row, at.row + at.rows, 0, at.keys);
    values.aim(at.n, at.slice_index, at.col, at.col + at.cols, 0, at.keys);
    return steps_of<Tile>(at.keys);
  }

  // factor / row_sum, and 0 for a row whose sum is 0.
  __device__ __forceinline__ RowValues<Acc> fetch_row(int row) const {
    const Place at = place();
    if (p.row_sum.data == nullptr || row >= at.rows) return {1, 0};
    const Acc* g_row_sum = static_cast<const Acc*>(p.row_sum.data) + batch_offset(p.batch, p.row_sum, at.n, at.slice_index);
    return {g_row_sum[(at.row + row) * p.row_sum.row_stride], 0};
  }
  __device__ __forceinline__ RowValues<Acc> row_value(RowValues<Acc> sum) const {
    return {sum.first == Acc(0) ? Acc(0) : static_cast<Acc>(p.factor) / sum.first, 0};
  }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, typename Tile::Shared& shared) const {
    const Place at = place();
    T* g_out = static_cast<T*>(p.out.data) + batch_offset(p.batch, p.out, at.n, at.slice_index) +
               (p.slice.row_begin + at.row) * p.out.row_stride + at.col * p.out.col_stride;
    const auto scaled = [&](int row, const Acc(&sum)[4], Acc(&x)[4]) {
      const Acc row_factor = shared.row[row].first;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = row_factor == Acc(0) ? Acc(0) : sum[e] * row_factor;
    };
    if (p.out.vector && at.rows >= Tile::kM && at.cols >= Tile::kN) {
      product.template for_each_quad<true>(shared, at.rows, at.cols, [&](int row, int col, const Acc(&sum)[4]) {
        Acc x[4];
        scaled(row, sum, x);
        store_whole_quad(g_out + row * p.out.row_stride + col, x);
      });
    } else {
      product.template for_each_quad<false>(shared, at.rows, at.cols, [&](int row, int col, const Acc(&sum)[4]) {
        Acc x[4];
        scaled(row, sum, x);
        store_quad(g_out + row * p.out.row_stride, col, at.cols, p.out.col_stride, p.out.vector, x);
      });
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    scores_values_kernel(const __grid_constant__ ScoresValuesParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  const ValuesWork<Tile> work = {p, m_tiles, n_tiles, first_batch};
  run_tile<Tile>(work, TileLoader<Tile, typename Tile::A>(p.batch, p.weights),
                 TileLoader<Tile, typename Tile::B>(p.batch, p.values));
}

template <class T>
cudaError_t launch_typed(const ScoresValuesParams& params, cudaStream_t stream) {
  using Tile = RowsByCols<T>;
  return launch_tiles<Tile>(scores_values_kernel<Tile>, params, params.slice.row_count, params.Ev, params.slice.batch_count,
                            stream);
}

}  // namespace

cudaError_t launch_scores_values(const ScoresValuesParams& params, cudaStream_t stream) {
  switch (params.type) {
    case DataType::kHalf: return launch_typed<__half>(params, stream);
    case DataType::kBFloat16: return launch_typed<__nv_bfloat16>(params, stream);
    case DataType::kFloat: return launch_typed<float>(params, stream);
    case DataType::kDouble: return launch_typed<double>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attention_ext
