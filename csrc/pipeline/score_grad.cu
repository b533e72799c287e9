// Backward: dS = P * (keep / (1 - p) * (grad_out . value^T) - delta) for one slice. With dropout the kernel also turns
// P into keep * P, which is what dV is made of; the 1 / (1 - p) is left to the product's epilogue.
//
// Tensor Core (or plain) product of a block tile, gemm/mainloop.cuh, then per quad of columns: read P, draw the
// forward's random words again, store. Tiles wholly above the diagonal return at once. P = 0 gives dS = 0 whatever it
// meets, so a row without a visible key has zero gradients. Grid: one CTA per block tile of every matrix of the slice,
// tile_of_block. 128 threads (half types) or 256. Shared memory: 81,920 bytes (half types), 67,584 (float), 55,296
// (double); registers: launch bounds for two CTAs per SM.
#include "../device/random.cuh"
#include "../gemm/mainloop.cuh"
#include "../params.h"

namespace attention_ext {
namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    score_grad_kernel(const __grid_constant__ ScoreGradParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;
  extern __shared__ __align__(128) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);

  const TileIndex tile = tile_of_block(blockIdx.x, m_tiles, n_tiles, first_batch);
  const int64_t n = p.slice.batch_begin + tile.batch;
  const int row_begin = static_cast<int>(p.slice.row_begin) + tile.m * Tile::kM;
  const int row_end = static_cast<int>(p.slice.row_begin + p.slice.row_count);
  const int col_begin = static_cast<int>(p.slice.col_begin) + tile.n * Tile::kN;
  const int col_end = static_cast<int>(p.slice.col_begin + p.slice.col_count);
  if (p.causal && col_begin > row_begin + Tile::kM - 1) return;

  // delta of each row, visible to all threads from the main loop's barriers on.
  const Acc* g_delta = static_cast<const Acc*>(p.delta) + n * p.L;
  for (int row = threadIdx.x; row < min(Tile::kM, row_end - row_begin); row += Tile::kThreads) {
    shared.row[row] = g_delta[row_begin + row];
  }
  const int Ev = static_cast<int>(p.Ev);
  TileLoader<Tile, typename Tile::A> grad_out(p.batch, p.grad_out, n, tile.batch, row_begin, row_end, 0, Ev);
  TileLoader<Tile, typename Tile::B> value(p.batch, p.value, n, tile.batch, col_begin, col_end, 0, Ev);
  multiply_tile<Tile>(shared, grad_out, value, Ev);

  const bool dropping = p.dropout.seed != nullptr;
  const int64_t seed = dropping ? *p.dropout.seed : 0;
  const Acc keep_scale = dropping ? static_cast<Acc>(p.dropout.keep_scale) : Acc(1);
  T* g_probabilities = static_cast<T*>(p.probabilities.data) + batch_offset(p.batch, p.probabilities, n, tile.batch);
  T* g_score_grad = static_cast<T*>(p.score_grad.data) + batch_offset(p.batch, p.score_grad, n, tile.batch);

  for_each_quad<Tile>(shared, row_end - row_begin, col_end - col_begin,
                      [&](int tile_row, int tile_col, const Acc(&product)[4]) {
                        const int row = row_begin + tile_row, col = col_begin + tile_col;
                        const int slice_row = tile.m * Tile::kM + tile_row, slice_col = tile.n * Tile::kN + tile_col;
                        const int cols = static_cast<int>(p.slice.col_count);
                        T* g_row = g_probabilities + slice_row * p.probabilities.row_stride;
                        Acc probability[4], grad[4];
                        load_quad<T>(probability, g_row, slice_col, cols, p.probabilities.col_stride, p.probabilities.vector);
#pragma unroll
                        for (int e = 0; e < 4; ++e) grad[e] = keep_scale * product[e];
                        if (dropping) drop_quad(grad, p.dropout, seed, n, row, col);
                        const Acc delta = shared.row[tile_row];
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                          grad[e] = probability[e] == Acc(0) ? Acc(0) : probability[e] * (grad[e] - delta);
                        store_quad(g_score_grad + slice_row * p.score_grad.row_stride, slice_col, cols, p.score_grad.col_stride,
                                   p.score_grad.vector, grad);
                        if (dropping) {
                          drop_quad(probability, p.dropout, seed, n, row, col);
                          store_quad(g_row, slice_col, cols, p.probabilities.col_stride, p.probabilities.vector, probability);
                        }
                      });
}

template <class T>
cudaError_t launch_typed(const ScoreGradParams& params, cudaStream_t stream) {
  using Tile = RowsByRows<T>;
  const Slice& slice = params.slice;
  return launch_tiles<Tile>(score_grad_kernel<Tile>, params, slice.row_count, slice.col_count, slice.batch_count, stream);
}

}  // namespace

cudaError_t launch_score_grad(const ScoreGradParams& params, cudaStream_t stream) {
  switch (params.type) {
    case DataType::kHalf: return launch_typed<__half>(params, stream);
    case DataType::kBFloat16: return launch_typed<__nv_bfloat16>(params, stream);
    case DataType::kFloat: return launch_typed<float>(params, stream);
    case DataType::kDouble: return launch_typed<double>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attention_ext
