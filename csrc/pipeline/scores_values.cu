// Stage 3: out = weights . values * factor / row_sum for one slice of rows; in the backward also dQ = scale * dS . key.
//
// Tensor Core (or plain) product of a block tile, gemm/mainloop.cuh, then per quad of columns: times factor / row_sum,
// where a row whose sum is 0 (no visible key) gives exactly 0. Causal: k ends at the last key that a row of the tile
// sees. Grid: one CTA per block tile of every matrix of the slice, tile_of_block; causal: longest row tiles first.
// Shared memory: 75,776 bytes (half types), 67,584 (float), 53,760 (double); registers: launch bounds for two CTAs per
// SM.
#include "../gemm/mainloop.cuh"
#include "../params.h"

namespace attention_ext {
namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    scores_values_kernel(const __grid_constant__ ScoresValuesParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;
  extern __shared__ __align__(128) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);

  const TileIndex tile = tile_of_block(blockIdx.x, m_tiles, n_tiles, first_batch);
  const int64_t n = p.slice.batch_begin + tile.batch;
  const int m = p.causal ? m_tiles - 1 - tile.m : tile.m;
  const int row_begin = m * Tile::kM;  // from the beginning of the slice, as weights and row_sum count
  const int row_count = static_cast<int>(p.slice.row_count);
  const int col_begin = tile.n * Tile::kN, col_end = static_cast<int>(p.Ev);
  const int keys = static_cast<int>(p.slice.col_count);
  const int visible = static_cast<int>(p.slice.row_begin) + row_begin + Tile::kM;  // keys 0 .. the tile's last row
  const int k_end = p.causal ? min(keys, visible) : keys;

  // factor / row_sum, and 0 for a row whose sum is 0. Visible to all threads from the main loop's barriers on.
  const Acc factor = static_cast<Acc>(p.factor);
  const Acc* g_row_sum = nullptr;
  if (p.row_sum.data != nullptr) {
    g_row_sum = static_cast<const Acc*>(p.row_sum.data) + batch_offset(p.batch, p.row_sum, n, tile.batch);
  }
  for (int row = threadIdx.x; row < min(Tile::kM, row_count - row_begin); row += Tile::kThreads) {
    const Acc sum = g_row_sum == nullptr ? Acc(1) : g_row_sum[(row_begin + row) * p.row_sum.row_stride];
    shared.row[row] = sum == Acc(0) ? Acc(0) : factor / sum;
  }

  TileLoader<Tile, typename Tile::A> weights(p.batch, p.weights, n, tile.batch, row_begin, row_count, 0, k_end);
  TileLoader<Tile, typename Tile::B> values(p.batch, p.values, n, tile.batch, col_begin, col_end, 0, k_end);
  multiply_tile<Tile>(shared, weights, values, k_end);

  T* g_out = static_cast<T*>(p.out.data) + batch_offset(p.batch, p.out, n, tile.batch) +
             (p.slice.row_begin + row_begin) * p.out.row_stride + col_begin * p.out.col_stride;
  const int cols = col_end - col_begin;
  for_each_quad<Tile>(shared, row_count - row_begin, cols, [&](int row, int col, const Acc(&product)[4]) {
    const Acc row_factor = shared.row[row];
    Acc x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = row_factor == Acc(0) ? Acc(0) : product[e] * row_factor;
    store_quad(g_out + row * p.out.row_stride, col, cols, p.out.col_stride, p.out.vector, x);
  });
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
