// Stage 3 of the pipeline by wgmma (Hopper): out = weights . values * factor / row_sum for one slice of rows; what
// pipeline/scores_values.cu does.
//
// Product of block tiles of 128 rows by 256 or 192 columns of values, gemm/sm90/mainloop.cuh; k ends at the last key that a row of
// the tile sees. A row whose sum is 0 (no visible key) gives exactly 0.
// Grid: persistent CTAs, one an SM. Causal: the longest row tiles of all matrices first, and CTAs in reverse every other round, so
// that each gets about as many keys. Shared memory: WgmmaTile::Shared. Registers: 232.
#include "attention/sm90/pipeline/pipeline.h"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/tensor_map.h"
#include "gemm/sm90/mainloop.cuh"

namespace attention_ext {
namespace {

template <class Tile>
struct WgmmaValuesWork {
  using T = typename Tile::T;

  const ScoresValuesParams& p;

  struct Place {
    int64_t n, slice_index;
    int row, col;    // of the tile's first element; rows from the beginning of the slice
    int rows, cols;  // that exist from there on
    int steps, last_rows;
    TensorPosition a, b;
  };

  __device__ __forceinline__ int m_tiles() const { return static_cast<int>((p.slice.row_count + Tile::kM - 1) / Tile::kM); }
  __device__ __forceinline__ int n_tiles() const { return static_cast<int>((p.Ev + Tile::kN - 1) / Tile::kN); }
  __device__ __forceinline__ int64_t tiles() const { return p.slice.batch_count * m_tiles() * n_tiles(); }

  __device__ __forceinline__ Place aim(int64_t tile) const {
    const TileIndex index = p.sequence.causal
                                ? longest_first(static_cast<unsigned>(tile), m_tiles(), n_tiles(), p.slice.batch_count)
                                : tile_of(static_cast<unsigned>(tile), m_tiles(), n_tiles(), 0);
    Place at;
    at.slice_index = p.slice.batch_count - 1 - index.batch;  // what stage 1 wrote last may still lie in L2
    at.n = p.slice.batch_begin + at.slice_index;
    at.row = index.m * Tile::kM;
    at.col = index.n * Tile::kN;
    at.rows = static_cast<int>(p.slice.row_count) - at.row;
    at.cols = static_cast<int>(p.Ev) - at.col;
    const KeyRange range = key_range(p.sequence, static_cast<uint32_t>(at.n), p.slice.col_count);
    const int keys = range.end_of_tile(static_cast<int>(p.slice.row_begin) + at.row, Tile::kM);
    at.steps = max((keys + Tile::kK - 1) / Tile::kK, 1);  // rows that see nothing are stored as well
    // Values from the batch row's last key on are not to be read, whatever memory holds there: a weight of 0 would not hide NaN.
    at.last_rows = p.sequence.key_lengths == nullptr ? Tile::kK : keys - (at.steps - 1) * Tile::kK;
    at.a = {{0, at.row, static_cast<int>(at.slice_index), 0, 0}};
    at.b.at[0] = at.col;
    at.b.at[1] = 0;
    set_batch(at.b, p.batch, p.values, static_cast<uint32_t>(at.n));
    return at;
  }

  struct Fetched {
    float sums[2];  // of the rows' weights
    int64_t out;    // offset of the matrix
  };
  __device__ __forceinline__ Fetched fetch(const Place& at, int row) const {
    const float* g_sum = static_cast<const float*>(p.row_sum.data) + at.slice_index * p.row_sum.slice_stride;
    Fetched fetched;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = row + 8 * half;
      fetched.sums[half] = of < at.rows ? g_sum[(at.row + of) * p.row_sum.row_stride] : 0.0f;
    }
    fetched.out = batch_offset(p.batch, p.out, static_cast<uint32_t>(at.n), at.slice_index);
    return fetched;
  }

  __device__ __forceinline__ void store(const Place& at, int row, const Fetched& fetched, const float (&product)[Tile::kN / 2],
                                        uint32_t s_strip) const {
    if (p.out.vector && at.rows >= Tile::kM && at.cols >= Tile::kN) {
      store_scaled<true>(at, row, fetched, product, s_strip);
    } else {
      store_scaled<false>(at, row, fetched, product, s_strip);
    }
  }

  // kWhole: all of the tile exists, and rows lie in whole chunks.
  template <bool kWhole>
  __device__ __forceinline__ void store_scaled(const Place& at, int row, const Fetched& fetched,
                                               const float (&product)[Tile::kN / 2], uint32_t s_strip) const {
    const float factor = static_cast<float>(p.factor);
    const float factors[2] = {fetched.sums[0] == 0.0f ? 0.0f : factor / fetched.sums[0],
                              fetched.sums[1] == 0.0f ? 0.0f : factor / fetched.sums[1]};
    const int lane = threadIdx.x % 32, warp_row = row - lane / 4;
    T* g_out = static_cast<T*>(p.out.data) + fetched.out +
               (p.slice.row_begin + at.row + warp_row + lane / 8) * p.out.row_stride + at.col * p.out.col_stride;
#pragma unroll
    for (int strip = 0; strip < Tile::kN / Tile::kStripCols; ++strip) {
      const int first_col = strip * Tile::kStripCols;
      if (!kWhole && first_col >= at.cols) break;
      float x[Tile::kStripCols / 2];
#pragma unroll
      for (int i = 0; i < Tile::kStripCols / 2; ++i) {
        const float row_factor = factors[i / 2 % 2];
        x[i] = row_factor == 0.0f ? 0.0f : product[strip * (Tile::kStripCols / 2) + i] * row_factor;
      }
      for_each_chunk<T, 4>(x, s_strip, [&](int chunk_row, int chunk_col, const T* chunk) {
        const int col = first_col + chunk_col;
        T* g_row = g_out + (chunk_row - lane / 8) * p.out.row_stride;
        if (kWhole) {
          *reinterpret_cast<uint4*>(g_row + col) = *reinterpret_cast<const uint4*>(chunk);
        } else if (warp_row + chunk_row < at.rows && col < at.cols) {
          store_chunk(g_row, col, at.cols, p.out, chunk);
        }
      });
    }
  }
};

template <class Tile>
cudaError_t launch_tile(const ScoresValuesParams& params, cudaStream_t stream) {
  // The slice's weights as a view of one batch dim.
  BatchDims slice = {{params.slice.batch_count}, 1};
  MatrixView weights = params.weights;
  weights.batch_stride[0] = params.slice.batch_count > 1 ? weights.slice_stride : 0;
  WgmmaMaps maps;
  cudaError_t status =
      make_tensor_map(maps.a, params.type, slice, weights, params.slice.row_count, params.slice.col_count, Tile::kM);
  if (status == cudaSuccess) {
    status = make_tensor_map(maps.b, params.type, params.batch, params.values, params.slice.col_count, params.Ev, Tile::kK);
  }
  if (status != cudaSuccess) return status;
  const int64_t tiles = ceil_div(params.slice.row_count, Tile::kM) * ceil_div(params.Ev, Tile::kN) * params.slice.batch_count;
  return launch_wgmma_tiles<WgmmaValuesWork, Tile>(params, maps, tiles, stream);
}

// Tiles of 192 columns where they pay for fewer that do not exist: head dims up to 192, from 257 to 384 and from 513 to 576 (three
// tiles either way).
template <class T>
cudaError_t launch_typed(const ScoresValuesParams& params, cudaStream_t stream) {
  const int64_t wide = ceil_div(params.Ev, 256), narrow = ceil_div(params.Ev, 192);
  return narrow == wide ? launch_tile<WgmmaTile<T, true, 192>>(params, stream)
                        : launch_tile<WgmmaTile<T, true>>(params, stream);
}

}  // namespace

cudaError_t launch_wgmma_values(const ScoresValuesParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
