// Stage 1: scores = scale * query . key^T + mask, -inf where the bool mask or causality hides a key, for one slice.
// In the backward the same product ends in probabilities exp(score - lse) instead.
//
// Tensor Core (or plain) product of a block tile, gemm/mainloop.cuh, then per quad of columns: scale, mask, causal
// select, store. Tiles wholly above the diagonal return at once. Grid: one CTA per block tile of every matrix of the
// slice, tile_of_block. 128 threads (half types) or 256. Shared memory: 81,920 bytes (half types), 67,584 (float),
// 55,296 (double); registers: launch bounds for two CTAs per SM.
#include "../device/math.cuh"
#include "../gemm/mainloop.cuh"
#include "../params.h"

namespace attention_ext {
namespace {

// x[e] += mask, or -inf where a bool mask is False, for columns col .. col + 3 below col_end of the mask's row.
template <class T, class Acc, class Stored>
__device__ __forceinline__ void add_mask(Acc (&x)[4], const MatrixView& mask, int64_t row_offset, int col, int col_end) {
  const Stored* g_mask = static_cast<const Stored*>(mask.data) + row_offset;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (col + e >= col_end) continue;
    const Stored stored = g_mask[(col + e) * mask.col_stride];
    if constexpr (std::is_same_v<Stored, uint8_t>) {
      if (stored == 0) x[e] = negative_infinity(Acc(0));
    } else {
      x[e] += static_cast<Acc>(to_accumulator(stored));
    }
  }
}

template <class Tile, bool kProbabilities>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    qk_scores_kernel(const __grid_constant__ QkScoresParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;
  using Out = std::conditional_t<kProbabilities, T, Acc>;
  extern __shared__ __align__(128) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);

  const TileIndex tile = tile_of_block(blockIdx.x, m_tiles, n_tiles, first_batch);
  const int64_t n = p.slice.batch_begin + tile.batch;
  const int row_begin = static_cast<int>(p.slice.row_begin) + tile.m * Tile::kM;
  const int row_end = static_cast<int>(p.slice.row_begin + p.slice.row_count);
  const int col_begin = static_cast<int>(p.slice.col_begin) + tile.n * Tile::kN;
  const int col_end = static_cast<int>(p.slice.col_begin + p.slice.col_count);
  const bool hidden = p.causal && col_begin > row_begin + Tile::kM - 1;
  if (hidden && !p.write_hidden_tiles) return;

  if constexpr (kProbabilities) {  // the log-sum-exp of each row, visible to all threads from the main loop's barriers on
    const Acc* g_lse = static_cast<const Acc*>(p.lse.data) + batch_offset(p.batch, p.lse, n, tile.batch);
    for (int row = threadIdx.x; row < min(Tile::kM, row_end - row_begin); row += Tile::kThreads) {
      shared.row[row] = g_lse[(row_begin + row) * p.lse.row_stride];
    }
  }
  const int E = hidden ? 0 : static_cast<int>(p.E);
  TileLoader<Tile, typename Tile::A> query(p.batch, p.query, n, tile.batch, row_begin, row_end, 0, E);
  TileLoader<Tile, typename Tile::B> key(p.batch, p.key, n, tile.batch, col_begin, col_end, 0, E);
  multiply_tile<Tile>(shared, query, key, E);

  const Acc scale = static_cast<Acc>(p.scale);
  const int64_t mask_offset = p.mask_type == MaskType::kNone ? 0 : batch_offset(p.batch, p.mask, n, tile.batch);
  const Acc* g_lse =
      kProbabilities ? static_cast<const Acc*>(p.lse.data) + batch_offset(p.batch, p.lse, n, tile.batch) : nullptr;
  Out* g_out = static_cast<Out*>(p.out.data) + batch_offset(p.batch, p.out, n, tile.batch);

  const int out_rows = row_end - row_begin, out_cols = static_cast<int>(p.slice.col_count) - tile.n * Tile::kN;
  g_out += tile.m * Tile::kM * p.out.row_stride + tile.n * Tile::kN * p.out.col_stride;
  const bool diagonal = p.causal && col_begin + Tile::kN - 1 > row_begin;
  if (!kProbabilities && p.mask_type == MaskType::kNone && !diagonal) {  // every key of the tile is visible
    for_each_quad<Tile>(shared, out_rows, out_cols, [&](int row, int col, const Acc(&product)[4]) {
      Acc x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = scale * product[e];
      store_quad(g_out + row * p.out.row_stride, col, out_cols, p.out.col_stride, p.out.vector, x);
    });
    return;
  }
  for_each_quad<Tile>(shared, out_rows, out_cols, [&](int tile_row, int tile_col, const Acc(&product)[4]) {
    const int row = row_begin + tile_row, col = col_begin + tile_col;
    Acc x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = scale * product[e];
    const int64_t mask_row = mask_offset + row * p.mask.row_stride;
    switch (p.mask_type) {
      case MaskType::kNone: break;
      case MaskType::kBool: add_mask<T, Acc, uint8_t>(x, p.mask, mask_row, col, col_end); break;
      case MaskType::kSameAsQuery: add_mask<T, Acc, T>(x, p.mask, mask_row, col, col_end); break;
      case MaskType::kFloat: add_mask<T, Acc, float>(x, p.mask, mask_row, col, col_end); break;
    }
    if (p.causal) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (col + e > row) x[e] = negative_infinity(Acc(0));
      }
    }
    if constexpr (kProbabilities) {
      // A row without a visible key has lse -inf, and probability 0 rather than exp(-inf + inf).
      const Acc lse = shared.row[tile_row];
      const bool dead = lse == negative_infinity(Acc(0));
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = dead ? Acc(0) : exp_difference<T>(x[e], lse);
    }
    store_quad(g_out + tile_row * p.out.row_stride, tile_col, out_cols, p.out.col_stride, p.out.vector, x);
  });
}

template <class T>
cudaError_t launch_typed(const QkScoresParams& params, cudaStream_t stream) {
  using Tile = RowsByRows<T>;
  const Slice& slice = params.slice;
  auto* kernel = params.lse.data == nullptr ? qk_scores_kernel<Tile, false> : qk_scores_kernel<Tile, true>;
  return launch_tiles<Tile>(kernel, params, slice.row_count, slice.col_count, slice.batch_count, stream);
}

}  // namespace

cudaError_t launch_qk_scores(const QkScoresParams& params, cudaStream_t stream) {
  switch (params.type) {
    case DataType::kHalf: return launch_typed<__half>(params, stream);
    case DataType::kBFloat16: return launch_typed<__nv_bfloat16>(params, stream);
    case DataType::kFloat: return launch_typed<float>(params, stream);
    case DataType::kDouble: return launch_typed<double>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attention_ext
