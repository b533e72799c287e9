// Backward: out = factor * sum over the query heads of a key head of left^T . right. dV from keep * P and grad_out, dK
// from dS and query, for one slice of keys.
//
// Product of a block tile on Tensor Cores or CUDA cores, gemm/mainloop.cuh, whose k runs over the slice's query rows of one query
// head after another: the sum over the heads of a group stays in registers, in a fixed order. Slices of rows carry it from one to
// the next (p.carry). k begins at the first row tile that sees a key of the tile.
// Grid: one CTA per block tile of every key head of the slice (tile_of). 128 threads (half types) or 256.
// Shared memory: 70,656 bytes (half types), 51,712 (float and double). Registers: launch bounds of the tile table.
#include "attention/pipeline/carry.cuh"
#include "attention/pipeline/params.h"
#include "attention/visibility/key_range.cuh"
#include "core/dispatch.h"
#include "gemm/mainloop.cuh"

namespace attention_ext {
namespace {

template <class Tile>
struct KeyValueGradWork {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;

  const KeyValueGradParams& p;
  int m_tiles, n_tiles;
  int64_t first_batch;

  struct Place {
    int64_t n, slice_index;  // of the key head's first query head
    int key, col;            // of the tile's first element; keys from the beginning of the slice, as left counts
    int keys, cols;          // that exist from there on
    int row_begin;           // of the product's k, which counts query rows from the beginning of the slice
  };
  // Row tiles above row_begin were not written, since they see no key of this tile.
  static_assert(Tile::kM == Tile::kN, "the first row tile that sees a key is found by rounding down");
  __device__ __forceinline__ Place place() const {
    const TileIndex index = tile_of(blockIdx.x, m_tiles, n_tiles, first_batch);
    Place at;
    at.slice_index = index.batch * p.group;
    at.n = p.slice.batch_begin + at.slice_index;
    at.key = index.m * Tile::kM;
    at.col = index.n * Tile::kN;
    at.keys = static_cast<int>(p.slice.col_count) - at.key;
    at.cols = static_cast<int>(p.width) - at.col;
    const KeyRange range = key_range(p.sequence, at.n, p.slice.col_begin + p.slice.col_count);
    const int first_row = range.first_row(static_cast<int>(p.slice.col_begin) + at.key) / Tile::kM * Tile::kM;
    const int64_t slice_row = first_row - p.slice.row_begin;
    at.row_begin = static_cast<int>(min(max(slice_row, int64_t{0}), p.slice.row_count));
    return at;
  }

  __device__ __forceinline__ int aim(TileLoader<Tile, typename Tile::A>& left,
                                     TileLoader<Tile, typename Tile::B>& right) const {
    const Place at = place();
    const int rows = static_cast<int>(p.slice.row_count), before = static_cast<int>(p.slice.row_begin);
    left.aim(at.n, at.slice_index, at.key, at.key + at.keys, at.row_begin, rows);
    right.aim(at.n, at.slice_index, at.col, at.col + at.cols, before + at.row_begin, before + rows);
    return steps_of<Tile>(rows - at.row_begin) * static_cast<int>(p.group);
  }

  __device__ __forceinline__ RowValues<Acc> fetch_row(int) const { return {}; }
  __device__ __forceinline__ RowValues<Acc> row_value(RowValues<Acc> values) const { return values; }

  __device__ __forceinline__ bool carry(const Place& at, int row, int col, Acc (&total)[4]) const {
    const int64_t pitch = (p.width + 3) / 4 * 4;
    Acc* g_carry =
        static_cast<Acc*>(p.carry) + (at.slice_index / p.group * p.slice.col_count + at.key + row) * pitch + at.col + col;
    return carry_quad(g_carry, p.slice.row_begin == 0, p.slice.row_begin + p.slice.row_count == p.L, total);
  }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, typename Tile::Shared& shared) const {
    const Place at = place();
    const Acc factor = static_cast<Acc>(p.factor);
    const int64_t tile_offset = batch_offset(p.batch, p.out, at.n, at.slice_index) +
                                (p.slice.col_begin + at.key) * p.out.row_stride + at.col * p.out.col_stride;
    product.template for_each_quad<false>(shared, at.keys, at.cols, [&](int row, int col, const Acc(&sum)[4]) {
      Acc x[4] = {sum[0], sum[1], sum[2], sum[3]};
      if (p.carry != nullptr && !carry(at, row, col, x)) return;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= factor;
      store_quad<T>(p.out.data, tile_offset + row * p.out.row_stride, p.wide_out, col, at.cols, p.out.col_stride, p.out.vector,
                    x);
    });
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    key_value_grad_kernel(const __grid_constant__ KeyValueGradParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  const KeyValueGradWork<Tile> work = {p, m_tiles, n_tiles, first_batch};
  run_tile<Tile, true>(work, TileLoader<Tile, typename Tile::A>(p.batch, p.left),
                       TileLoader<Tile, typename Tile::B>(p.batch, p.right));
}

}  // namespace

cudaError_t launch_key_value_grad(const KeyValueGradParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) {
    using Tile = ColsByCols<decltype(element)>;
    return launch_tiles<Tile>(key_value_grad_kernel<Tile>, params, params.slice.col_count, params.width,
                              params.slice.batch_count / params.group, stream);
  });
}

}  // namespace attention_ext
