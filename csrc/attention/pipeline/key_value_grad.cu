// Backward: out = factor * sum over the query heads of a key head of left^T . right. dV from keep * P and grad_out, dK
// from dS and query, for one slice of keys.
//
// 1. Product of a block tile on Tensor Cores or CUDA cores, gemm/mainloop.cuh, whose k runs over query rows. Where key heads make
//    enough tiles, it runs over the slice's rows of one query head after another and the sum stays in registers. Else a CTA takes a
//    part: some rows of one query head; the fewer the key heads, the more CTAs share the work of each.
// 2. sum_parts_kernel adds the parts of a key head up. Either way the sum goes on from what slices before left (p.sums), and the
//    order of its terms is fixed.
// k begins at the first row tile that sees a key of the tile.
// Grid: one CTA per block tile of every key head of the slice (tile_of), or of every part. 128 threads (half types) or 256.
// Shared memory: 70,656 bytes (half types), 51,712 (float and double). Registers: launch bounds of the tile table.
#include "attention/pipeline/carry.cuh"
#include "attention/pipeline/params.h"
#include "attention/visibility/key_range.cuh"
#include "core/dispatch.h"
#include "gemm/mainloop.cuh"

namespace attention_ext {
namespace {

constexpr int kSumThreads = 256;

// Of a row of sums.
__device__ __forceinline__ int64_t pitch_of(const KeyValueGradParams& p) { return (p.width + 3) / 4 * 4; }

template <class Tile>
struct KeyValueGradWork {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;

  const KeyValueGradParams& p;
  int m_tiles, n_tiles;
  int64_t first_batch;

  struct Place {
    int64_t n, slice_index;  // of the tile's first query head
    int64_t part;            // in (batch_count, row_parts)
    int key, col;            // of the tile's first element; keys from the beginning of the slice, as left counts
    int keys, cols;          // that exist from there on
    int row_begin, row_end;  // of the product's k, which counts query rows from the beginning of the slice
  };
  // Row tiles above row_begin were not written, since they see no key of this tile.
  static_assert(Tile::kM == Tile::kN, "the first row tile that sees a key is found by rounding down");
  __device__ __forceinline__ Place place() const {
    const TileIndex index = tile_of(blockIdx.x, m_tiles, n_tiles, first_batch);
    Place at;
    const int rows = static_cast<int>(p.slice.row_count);
    int part_begin = 0, part_end = rows;
    if (p.row_parts > 0) {
      int64_t number;
      divide(index.batch, p.row_parts, at.slice_index, number);
      const int part_rows = (rows + static_cast<int>(p.row_parts) - 1) / static_cast<int>(p.row_parts);
      const int whole_tiles = (part_rows + Tile::kM - 1) / Tile::kM * Tile::kM;
      part_begin = static_cast<int>(min(number * whole_tiles, p.slice.row_count));
      part_end = min(part_begin + whole_tiles, rows);
    } else {
      at.slice_index = index.batch * heads();
    }
    at.n = p.slice.batch_begin + at.slice_index;
    at.part = index.batch;
    at.key = index.m * Tile::kM;
    at.col = index.n * Tile::kN;
    at.keys = static_cast<int>(p.slice.col_count) - at.key;
    at.cols = static_cast<int>(p.width) - at.col;
    const KeyRange range = key_range(p.sequence, at.n, p.slice.col_begin + p.slice.col_count);
    const int first_row = range.first_row(static_cast<int>(p.slice.col_begin) + at.key) / Tile::kM * Tile::kM;
    const int64_t slice_row = first_row - p.slice.row_begin;
    at.row_begin = static_cast<int>(min(max(slice_row, static_cast<int64_t>(part_begin)), static_cast<int64_t>(part_end)));
    at.row_end = part_end;
    return at;
  }
  // Query heads that a CTA sums over.
  __device__ __forceinline__ int heads() const {
    return p.row_parts > 0 ? 1 : static_cast<int>(min(p.group, p.slice.batch_count));
  }

  __device__ __forceinline__ int aim(TileLoader<Tile, typename Tile::A>& left,
                                     TileLoader<Tile, typename Tile::B>& right) const {
    const Place at = place();
    const int before = static_cast<int>(p.slice.row_begin);
    left.aim(at.n, at.slice_index, at.key, at.key + at.keys, at.row_begin, at.row_end);
    right.aim(at.n, at.slice_index, at.col, at.col + at.cols, before + at.row_begin, before + at.row_end);
    return steps_of<Tile>(at.row_end - at.row_begin) * heads();
  }

  __device__ __forceinline__ RowValues<Acc> fetch_row(int) const { return {}; }
  __device__ __forceinline__ RowValues<Acc> row_value(RowValues<Acc> values) const { return values; }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, typename Tile::Shared& shared) const {
    const Place at = place();
    const Acc factor = static_cast<Acc>(p.factor);
    const int64_t pitch = pitch_of(p);
    if (p.row_parts > 0) {
      Acc* g_part = static_cast<Acc*>(p.parts) + (at.part * p.slice.col_count + at.key) * pitch;
      product.template for_each_quad<false>(shared, at.keys, at.cols, [&](int row, int col, const Acc(&sum)[4]) {
        store_whole_quad<Acc>(g_part + row * pitch + at.col + col, sum);
      });
      return;
    }
    const bool first = at.n % p.group == 0 && p.slice.row_begin == 0;
    const bool last = (at.n + heads()) % p.group == 0 && p.slice.row_begin + p.slice.row_count == p.L;
    const int64_t tile_offset = batch_offset(p.batch, p.out, at.n, at.slice_index) +
                                (p.slice.col_begin + at.key) * p.out.row_stride + at.col * p.out.col_stride;
    product.template for_each_quad<false>(shared, at.keys, at.cols, [&](int row, int col, const Acc(&sum)[4]) {
      Acc x[4] = {sum[0], sum[1], sum[2], sum[3]};
      Acc* g_sums = static_cast<Acc*>(p.sums) + (at.key + row) * pitch + at.col + col;
      if (p.sums != nullptr && !carry_quad(g_sums, first, last, x)) return;
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

// A thread sums a quad of columns of a key: of one key head if the slice holds whole groups (head_span is one), else of all its
// key heads in turn.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ KeyValueGradParams p, int64_t head_span, int64_t first_quad) {
  using Acc = Accumulator<T>;
  const int64_t pitch = pitch_of(p), quads = pitch / 4, part_size = p.slice.col_count * pitch;
  int64_t row, quad, span, key;
  divide(first_quad + static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x, quads, row, quad);
  divide(row, p.slice.col_count, span, key);
  int64_t slice_index = span * head_span;
  const int64_t end = slice_index + head_span;
  if (end > p.slice.batch_count) return;
  const bool first_rows = p.slice.row_begin == 0, last_rows = p.slice.row_begin + p.slice.row_count == p.L;
  const int64_t place = key * pitch + quad * 4;
  const Acc* g_part = static_cast<const Acc*>(p.parts) + slice_index * p.row_parts * part_size + place;
  Acc* g_sums = static_cast<Acc*>(p.sums) + place;
  while (slice_index < end) {
    const int64_t n = p.slice.batch_begin + slice_index, before = n % p.group;
    const int64_t heads = min(p.group - before, end - slice_index);
    Acc total[4] = {};
#pragma unroll 4
    for (int64_t part = 0; part < heads * p.row_parts; ++part) {
      const Quad<Acc> terms = *reinterpret_cast<const Quad<Acc>*>(g_part);
#pragma unroll
      for (int e = 0; e < 4; ++e) total[e] += terms.value[e];
      g_part += part_size;
    }
    slice_index += heads;
    if (p.sums != nullptr && !carry_quad(g_sums, before == 0 && first_rows, before + heads == p.group && last_rows, total))
      continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e] *= static_cast<Acc>(p.factor);
    const int64_t offset =
        batch_offset(p.batch, p.out, n, 0) + (p.slice.col_begin + key) * p.out.row_stride + quad * 4 * p.out.col_stride;
    const int cols = static_cast<int>(p.width - quad * 4);
    store_quad<T>(p.out.data, offset, p.wide_out, 0, cols, p.out.col_stride, p.out.vector, total);
  }
}

}  // namespace

cudaError_t launch_key_value_grad(const KeyValueGradParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) {
    using T = decltype(element);
    using Tile = ColsByCols<T>;
    const Slice& slice = params.slice;
    const int64_t group = params.group, heads = std::min(group, slice.batch_count);
    const int64_t products = params.row_parts > 0 ? slice.batch_count * params.row_parts : slice.batch_count / heads;
    const cudaError_t status =
        launch_tiles<Tile>(key_value_grad_kernel<Tile>, params, slice.col_count, params.width, products, stream);
    if (status != cudaSuccess || params.row_parts == 0) return status;
    const int64_t span = slice.batch_count % group == 0 ? group : slice.batch_count;
    const int64_t quads = slice.batch_count / span * slice.col_count * ceil_div(params.width, 4);
    return launch_rows(sum_parts_kernel<T>, kSumThreads, quads, kSumThreads, stream, params, span);
  });
}

}  // namespace attention_ext
