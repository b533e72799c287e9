// Backward: dS = P * (keep / (1 - p) * (grad_out . value^T) - delta) for one slice. With dropout the kernel also turns
// P into keep * P, which is what dV is made of; the 1 / (1 - p) is left to the product's epilogue.
//
// Product of a block tile on Tensor Cores or CUDA cores, gemm/mainloop.cuh, then per quad of columns: read P, draw the
// forward's random words again, store. Tiles that no row sees return at once. P = 0 gives dS = 0 whatever it
// meets, so a row without a visible key has zero gradients.
// Grid: one CTA per block tile of every matrix of the slice (tile_of). 128 threads (half types) or 256.
// Shared memory: 74,752 bytes (half types), 62,464 (float), 56,320 (double). Registers: launch bounds of the tile table.
#include "attention/pipeline/params.h"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_place.cuh"
#include "core/dispatch.h"
#include "gemm/mainloop.cuh"

namespace attention_ext {
namespace {

template <class Tile>
struct ScoreGradWork {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;

  const ScoreGradParams& p;
  int m_tiles, n_tiles;
  int64_t first_batch;

  __device__ __forceinline__ ScorePlace place() const {
    return score_place<Tile>(p.slice, p.sequence, tile_of(blockIdx.x, m_tiles, n_tiles, first_batch));
  }

  __device__ __forceinline__ int aim(TileLoader<Tile, typename Tile::A>& grad_out,
                                     TileLoader<Tile, typename Tile::B>& value) const {
    const ScorePlace at = place();
    const int Ev = at.hidden ? 0 : static_cast<int>(p.Ev);
    grad_out.aim(at.n, at.slice_index, at.row, at.row + at.rows, 0, Ev);
    value.aim(at.n, at.slice_index, at.col, at.col + at.cols, 0, Ev);
    return steps_of<Tile>(Ev);
  }

  // delta of the row.
  __device__ __forceinline__ RowValues<Acc> fetch_row(int row) const {
    const ScorePlace at = place();
    return {row < at.rows && !p.only_weight_grad ? (static_cast<const Acc*>(p.delta) + at.n * p.L)[at.row + row] : Acc(0), 0};
  }
  __device__ __forceinline__ RowValues<Acc> row_value(RowValues<Acc> delta) const { return delta; }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, typename Tile::Shared& shared) const {
    const ScorePlace at = place();
    if (at.hidden) return;
    const bool dropping = p.dropout.seed != nullptr;
    const int64_t seed = dropping ? *p.dropout.seed : 0;
    const Acc keep_scale = dropping ? static_cast<Acc>(p.dropout.keep_scale) : Acc(1);
    T* g_probabilities = static_cast<T*>(p.probabilities.data) + batch_offset(p.batch, p.probabilities, at.n, at.slice_index) +
                         at.slice_row * p.probabilities.row_stride + at.slice_col * p.probabilities.col_stride;
    T* g_score_grad = static_cast<T*>(p.score_grad.data) + batch_offset(p.batch, p.score_grad, at.n, at.slice_index) +
                      at.slice_row * p.score_grad.row_stride + at.slice_col * p.score_grad.col_stride;

    product.template for_each_quad<false>(shared, at.rows, at.cols, [&](int row, int col, const Acc(&dot)[4]) {
      T* g_row = g_probabilities + row * p.probabilities.row_stride;
      Acc probability[4], grad[4];
      load_quad<T>(probability, g_row, col, at.cols, p.probabilities.col_stride, p.probabilities.vector);
#pragma unroll
      for (int e = 0; e < 4; ++e) grad[e] = keep_scale * dot[e];
      if (dropping) drop_quad(grad, p.dropout, seed, at.n, at.row + row, at.col + col);
      if (p.only_weight_grad) {
        store_quad(g_score_grad + row * p.score_grad.row_stride, col, at.cols, p.score_grad.col_stride, p.score_grad.vector,
                   grad);
        return;
      }
      const Acc delta = shared.row[row].first;
#pragma unroll
      for (int e = 0; e < 4; ++e) grad[e] = probability[e] == Acc(0) ? Acc(0) : probability[e] * (grad[e] - delta);
      store_quad(g_score_grad + row * p.score_grad.row_stride, col, at.cols, p.score_grad.col_stride, p.score_grad.vector,
                 grad);
      if (dropping) {
        drop_quad(probability, p.dropout, seed, at.n, at.row + row, at.col + col);
        store_quad(g_row, col, at.cols, p.probabilities.col_stride, p.probabilities.vector, probability);
      }
    });
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    score_grad_kernel(const __grid_constant__ ScoreGradParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  const ScoreGradWork<Tile> work = {p, m_tiles, n_tiles, first_batch};
  run_tile<Tile>(work, TileLoader<Tile, typename Tile::A>(p.batch, p.grad_out),
                 TileLoader<Tile, typename Tile::B>(p.batch, p.value));
}

}  // namespace

cudaError_t launch_score_grad(const ScoreGradParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) {
    using Tile = RowsByRows<decltype(element)>;
    const Slice& slice = params.slice;
    return launch_tiles<Tile>(score_grad_kernel<Tile>, params, slice.row_count, slice.col_count, slice.batch_count, stream);
  });
}

}  // namespace attention_ext
