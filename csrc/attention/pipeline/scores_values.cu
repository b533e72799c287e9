// Stage 3: out = weights . values * factor / row_sum for one slice of rows; in the backward also dQ = scale * dS . key.
//
// Product of a block tile on Tensor Cores or CUDA cores, gemm/mainloop.cuh, then per quad of columns: times factor / row_sum,
// where a row whose sum is 0 (no visible key) gives exactly 0. k ends at the last key that a row of the tile
// sees.
// Over many keys (p.carry) the sum is made in parts of kPartKeys, a launch each, and carried from one to the next in float.
// Grid: one CTA per block tile of every matrix of the slice (tile_of); causal: longest row tiles first. 128 threads (half types) or
// 256.
// Shared memory: 72,704 bytes (half types), 57,088 (float), 54,016 (double). Registers: launch bounds of the tile table.
#include "attention/pipeline/carry.cuh"
#include "attention/pipeline/params.h"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "gemm/mainloop.cuh"

namespace attention_ext {
namespace {

// The keys of one launch.
struct KeyPart {
  int begin, end;
};
struct ValuesParams : ScoresValuesParams {
  KeyPart part;
};

template <class Tile>
struct ValuesWork {
  using T = typename Tile::T;
  using Acc = typename Tile::Acc;

  const ScoresValuesParams& p;
  const KeyPart& part;
  int m_tiles, n_tiles;
  int64_t first_batch;

  struct Place {
    int64_t n, slice_index;
    int row, col;    // of the tile's first element; rows from the beginning of the slice, as weights and row_sum count
    int rows, cols;  // that exist from there on
    int keys;        // that any of the tile's rows sees, up to the end of this part
  };
  __device__ __forceinline__ Place place() const {
    const TileIndex index = tile_of(blockIdx.x, m_tiles, n_tiles, first_batch);
    Place at;
    at.n = p.slice.batch_begin + index.batch;
    at.slice_index = index.batch;
    at.row = (p.sequence.causal ? m_tiles - 1 - index.m : index.m) * Tile::kM;  // causal: longest first
    at.col = index.n * Tile::kN;
    at.rows = static_cast<int>(p.slice.row_count) - at.row;
    at.cols = static_cast<int>(p.Ev) - at.col;
    at.keys = key_range(p.sequence, at.n, part.end).end_of_tile(static_cast<int>(p.slice.row_begin) + at.row, Tile::kM);
    return at;
  }

  __device__ __forceinline__ int aim(TileLoader<Tile, typename Tile::A>& weights,
                                     TileLoader<Tile, typename Tile::B>& values) const {
    const Place at = place();
    weights.aim(at.n, at.slice_index, at.row, at.row + at.rows, part.begin, at.keys);
    values.aim(at.n, at.slice_index, at.col, at.col + at.cols, part.begin, at.keys);
    return steps_of<Tile>(at.keys - part.begin);
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

  // Adds what the parts before this one left to a quad; true if this part is the last one, else leaves it to the next.
  __device__ __forceinline__ bool carry(const Place& at, int row, int col, Acc (&total)[4]) const {
    const int64_t pitch = (p.Ev + 3) / 4 * 4;
    Acc* g_carry = static_cast<Acc*>(p.carry) + (at.slice_index * p.slice.row_count + at.row + row) * pitch + at.col + col;
    return carry_quad(g_carry, part.begin == 0, part.end == p.slice.col_count, total);
  }

  __device__ __forceinline__ void store(const Multiply<Tile>& product, typename Tile::Shared& shared) const {
    const Place at = place();
    const int64_t tile_offset = batch_offset(p.batch, p.out, at.n, at.slice_index) +
                                (p.slice.row_begin + at.row) * p.out.row_stride + at.col * p.out.col_stride;
    const auto scaled = [&](int row, const Acc(&sum)[4], Acc(&x)[4]) {
      const Acc row_factor = shared.row[row].first;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = row_factor == Acc(0) ? Acc(0) : sum[e] * row_factor;
    };
    const bool in_parts = sizeof(T) == 2 && p.carry != nullptr;  // one path fewer to compile for float and double
    if (p.out.vector && at.rows >= Tile::kM && at.cols >= Tile::kN && !in_parts && !p.wide_out) {
      T* g_out = static_cast<T*>(p.out.data) + tile_offset;
      product.template for_each_quad<true>(shared, at.rows, at.cols, [&](int row, int col, const Acc(&sum)[4]) {
        Acc x[4];
        scaled(row, sum, x);
        store_whole_quad(g_out + row * p.out.row_stride + col, x);
      });
    } else {
      product.template for_each_quad<false>(shared, at.rows, at.cols, [&](int row, int col, const Acc(&sum)[4]) {
        Acc total[4] = {sum[0], sum[1], sum[2], sum[3]}, x[4];
        if (in_parts && !carry(at, row, col, total)) return;
        scaled(row, total, x);
        store_quad<T>(p.out.data, tile_offset + row * p.out.row_stride, p.wide_out, col, at.cols, p.out.col_stride,
                      p.out.vector, x);
      });
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    scores_values_kernel(const __grid_constant__ ValuesParams p, int m_tiles, int n_tiles, int64_t first_batch) {
  const ValuesWork<Tile> work = {p, p.part, m_tiles, n_tiles, first_batch};
  run_tile<Tile>(work, TileLoader<Tile, typename Tile::A>(p.batch, p.weights),
                 TileLoader<Tile, typename Tile::B>(p.batch, p.values));
}

template <class T>
cudaError_t launch_typed(const ScoresValuesParams& params, cudaStream_t stream) {
  using Tile = RowsByCols<T>;
  const int64_t keys = params.slice.col_count, length = params.carry != nullptr ? kPartKeys : std::max<int64_t>(keys, 1);
  cudaError_t status = cudaSuccess;
  for (int64_t begin = 0; status == cudaSuccess && (begin == 0 || begin < keys); begin += length) {
    const ValuesParams part = {params, {static_cast<int>(begin), static_cast<int>(std::min(begin + length, keys))}};
    status = launch_tiles<Tile>(scores_values_kernel<Tile>, part, params.slice.row_count, params.Ev, params.slice.batch_count,
                                stream);
  }
  return status;
}

}  // namespace

cudaError_t launch_scores_values(const ScoresValuesParams& params, cudaStream_t stream) {
  return dispatch_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
