// Backward: out = factor * sum over the query heads of a key head of left^T . right. dV from keep * P and grad_out, dK
// from dS and query, for one slice of keys.
//
// Tensor Core (or plain) product of a block tile, gemm/mainloop.cuh, whose k runs over all query rows of one query head
// after another: the sum over the heads of a group stays in registers, in a fixed order. Causal: k begins at the first
// row tile that sees a key of the tile. Grid: one CTA per block tile of every key head of the slice, tile_of_block. 128
// threads (half types) or 256. Shared memory: 69,632 bytes (half types), 67,584 (float), 50,688 (double); registers:
// launch bounds for two CTAs per SM.
#include "../gemm/mainloop.cuh"
#include "../params.h"

namespace attention_ext {
namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    key_value_grad_kernel(const __grid_constant__ KeyValueGradParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;
  extern __shared__ __align__(128) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);

  const TileIndex tile = tile_of_block(blockIdx.x, m_tiles, n_tiles, first_batch);
  const int64_t slice_index = tile.batch * p.group;  // of the key head's first query head
  const int64_t n = p.slice.batch_begin + slice_index;
  const int key_begin = tile.m * Tile::kM;  // from the beginning of the slice, as left counts
  const int key_count = static_cast<int>(p.slice.col_count);
  const int col_begin = tile.n * Tile::kN, col_end = static_cast<int>(p.width);
  const int rows = static_cast<int>(p.slice.row_count);
  // Row tiles above this one were not written: every key of this tile is hidden from them. Row tiles and key tiles have
  // the same size, and a row tile that holds the tile's first key was written.
  static_assert(Tile::kM == Tile::kN, "the row tile of a key's diagonal is found by rounding down");
  const int first_key = static_cast<int>(p.slice.col_begin) + key_begin;
  const int k_begin = p.causal ? first_key / Tile::kM * Tile::kM : 0;

  TileLoader<Tile, typename Tile::A> left(p.batch, p.left, n, slice_index, key_begin, key_count, k_begin, rows);
  TileLoader<Tile, typename Tile::B> right(p.batch, p.right, n, slice_index, col_begin, col_end, k_begin, rows);
  multiply_tile<Tile, true>(shared, left, right, rows - k_begin, static_cast<int>(p.group));

  const Acc factor = static_cast<Acc>(p.factor);
  T* g_out = static_cast<T*>(p.out.data) + batch_offset(p.batch, p.out, n, slice_index);
  for_each_quad<Tile>(shared, key_count - key_begin, col_end - col_begin,
                      [&](int tile_row, int tile_col, const Acc(&product)[4]) {
                        Acc x[4];
#pragma unroll
                        for (int e = 0; e < 4; ++e) x[e] = factor * product[e];
                        T* g_row = g_out + static_cast<int64_t>(first_key + tile_row) * p.out.row_stride;
                        store_quad(g_row, col_begin + tile_col, col_end, p.out.col_stride, p.out.vector, x);
                      });
}

template <class T>
cudaError_t launch_typed(const KeyValueGradParams& params, cudaStream_t stream) {
  using Tile = ColsByCols<T>;
  const Slice& slice = params.slice;
  return launch_tiles<Tile>(key_value_grad_kernel<Tile>, params, slice.col_count, params.width,
                            slice.batch_count / params.group, stream);
}

}  // namespace

cudaError_t launch_key_value_grad(const KeyValueGradParams& params, cudaStream_t stream) {
  switch (params.type) {
    case DataType::kHalf: return launch_typed<__half>(params, stream);
    case DataType::kBFloat16: return launch_typed<__nv_bfloat16>(params, stream);
    case DataType::kFloat: return launch_typed<float>(params, stream);
    case DataType::kDouble: return launch_typed<double>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace attention_ext
