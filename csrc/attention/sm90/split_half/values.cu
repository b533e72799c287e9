// Stage 2 of float32 attention by half terms (Hopper): out = weights . values / sum of the weights, over one slice of keys after
// another.
//
// Product of block tiles of 128 rows by 128 columns of values, gemm/sm90/mainloop.cuh, three products of terms for each. The
// weights of a segment of 64 keys are relative to 2^reference, and its values to 2^exponent: what a step of k adds is brought to
// the row's own power, 2^top, as it is promoted, and the row to a higher one where that comes. Powers of two are exact, so this is
// the online softmax without its roundings. Between slices of keys the row waits in out and its state in the workspace.
// Grid: persistent CTAs, one an SM. Causal: the longest row tiles of all matrices first, and CTAs in reverse every other round.
// Shared memory: SplitHalfWgmmaTile::Shared. Registers: 232 a consumer thread.
#include "attention/sm90/split_half/row_promotion.cuh"
#include "attention/sm90/split_half/terms_map.h"
#include "attention/visibility/key_range.cuh"
#include "core/arithmetic.h"
#include "device/common/batch.cuh"
#include "gemm/sm90/mainloop.cuh"

namespace attention_ext {
namespace {

template <class Tile>
struct SplitHalfPromotion {
  const SplitHalfSegment* g_segment;  // of the thread's first row and the step after this one
  const int32_t* g_exponent;
  int64_t rows;
  int steps, row_left;  // that exist from the first row on
  RowPromotion row[2];
  SplitHalfSegment next[2];
  int next_exponent;

  __device__ __forceinline__ void load_next() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next[half] = {negative_infinity(0.0f), 0.0f};
      if (steps > 0 && 8 * half < row_left) next[half] = g_segment[8 * half];
    }
    next_exponent = steps > 0 ? *g_exponent : 0;
    g_segment += rows;
    ++g_exponent;
    --steps;
  }
  __device__ __forceinline__ void begin_step(int, float (&product)[Tile::kN / 2]) {
    const float before[2] = {row[0].step(next[0], next_exponent), row[1].step(next[1], next_exponent)};
    if (__any_sync(0xffffffffu, before[0] != 1.0f || before[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < Tile::kN / 2; ++i) product[i] *= before[i / 2 % 2];
    }
    load_next();
  }
  __device__ __forceinline__ void add(float (&product)[Tile::kN / 2], const float (&part)[Tile::kN / 2]) const {
#pragma unroll
    for (int i = 0; i < Tile::kN / 2; ++i) product[i] = fmaf(part[i], row[i / 2 % 2].factor, product[i]);
  }
};

template <class Tile>
struct SplitHalfValuesWork {
  const SplitHalfValuesParams& p;

  struct Place {
    int64_t n, slice_index, value_matrix;
    int row, col;    // of the tile's first element; rows from the beginning of the slice
    int rows, cols;  // that exist from there on
    int seen;        // steps with keys that any row of the tile sees
    int steps;
    bool last;  // none of the tile's rows sees a key after the slice's
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
    at.value_matrix = matrix_of_slice(at.n, p.slice, p.value_group);
    at.row = index.m * Tile::kM;
    at.col = index.n * Tile::kN;
    at.rows = static_cast<int>(p.slice.row_count) - at.row;
    at.cols = static_cast<int>(p.Ev) - at.col;
    const int begin = static_cast<int>(p.slice.col_begin), end = begin + static_cast<int>(p.slice.col_count);
    const int keys = key_range(p.sequence, at.n, p.S).end_of_tile(static_cast<int>(p.slice.row_begin) + at.row, Tile::kM);
    at.seen = (max(min(keys, end) - begin, 0) + Tile::kK - 1) / Tile::kK;
    at.steps = begin == 0 ? max(at.seen, 1) : at.seen;  // rows that see nothing are stored as well
    at.last = keys <= end;
    at.a = {{0, at.row, 0, static_cast<int>(at.slice_index), 0}};
    at.b = {{at.col, 0, 0, static_cast<int>(at.value_matrix), 0}};
    return at;
  }

  struct Fetched {
    int64_t out;  // offset of the matrix
  };
  __device__ __forceinline__ Fetched fetch(const Place& at, int) const {
    return {batch_offset(p.batch, p.out, static_cast<uint32_t>(at.n), 0)};
  }

  __device__ __forceinline__ SplitHalfPromotion<Tile> promotion(const Place& at, int row, const Fetched& fetched,
                                                                float (&product)[Tile::kN / 2]) const {
    SplitHalfPromotion<Tile> promotion;
    const int64_t segments = (p.slice.col_count + kSegment - 1) / kSegment, rows = p.slice.row_count;
    promotion.g_segment = p.segments + at.slice_index * segments * rows + at.row + row;
    promotion.g_exponent = p.value_exponents + at.value_matrix * segments;
    promotion.rows = rows;
    promotion.steps = at.seen;
    promotion.row_left = at.rows - row;
    promotion.load_next();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      promotion.row[half].state = no_keys_yet();
      if (p.slice.col_begin > 0 && row + 8 * half < at.rows) {
        promotion.row[half].state = p.before[at.slice_index * rows + at.row + row + 8 * half];
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kN / 2; ++i) product[i] = 0.0f;
    if (p.slice.col_begin > 0) {
      for_each_pair(at, row, fetched.out, [&](int i, const float* pair, bool first, bool second) {
        if (first) product[i] = pair[0];
        if (second) product[i + 1] = pair[p.out.col_stride];
      });
    }
    return promotion;
  }

  // visit(i, where product[i] belongs, whether it exists, whether product[i + 1] does)
  template <class Visit>
  __device__ __forceinline__ void for_each_pair(const Place& at, int row, int64_t offset, Visit visit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* g_row = static_cast<float*>(p.out.data) + offset +
                     (p.slice.row_begin + at.row + row + 8 * half) * p.out.row_stride + at.col * p.out.col_stride;
      const bool exists = row + 8 * half < at.rows;
#pragma unroll
      for (int i = 2 * half; i < Tile::kN / 2; i += 4) {
        const int col = i / 4 * 8 + threadIdx.x % 4 * 2;
        visit(i, g_row + col * p.out.col_stride, exists && col < at.cols, exists && col + 1 < at.cols);
      }
    }
  }

  __device__ __forceinline__ void store(const Place& at, int row, const Fetched& fetched, const float (&product)[Tile::kN / 2],
                                        uint32_t, const SplitHalfPromotion<Tile>& promotion) const {
    RowResult result[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SplitHalfRowState& state = promotion.row[half].state;
      result[half] = RowResult(state, static_cast<float>(p.factor));
      const int64_t slice_row = at.row + row + 8 * half;
      if (threadIdx.x % 4 != 0 || at.col != 0 || row + 8 * half >= at.rows) continue;
      if (at.last) {
        store_row_result(p, p.lse, at.n, p.slice.row_begin + slice_row, state);
      } else {
        p.after[at.slice_index * p.slice.row_count + slice_row] = state;
      }
    }
    const bool pairs = p.out.vector;
    for_each_pair(at, row, fetched.out, [&](int i, float* g_pair, bool first, bool second) {
      const int half = i / 2 % 2;
      float x[2] = {product[i], product[i + 1]};
      if (at.last) {
#pragma unroll
        for (int e = 0; e < 2; ++e) x[e] = result[half].of(x[e]);
      }
      if (pairs && second) {
        *reinterpret_cast<float2*>(g_pair) = make_float2(x[0], x[1]);
      } else {
        if (first) g_pair[0] = x[0];
        if (second) g_pair[p.out.col_stride] = x[1];
      }
    });
  }
};

}  // namespace

cudaError_t launch_split_half_values(const SplitHalfValuesParams& params, void* value_terms, cudaStream_t stream) {
  using Tile = SplitHalfWgmmaTile<true, kSplitHalfPromoted>;
  const Slice& slice = params.slice;
  WgmmaMaps maps;
  cudaError_t status = make_terms_map(maps.a, params.weights, slice.batch_count, slice.row_count, slice.col_count, Tile::kM);
  if (status == cudaSuccess) {
    status =
        make_terms_map(maps.b, value_terms, matrices_of_slice(slice, params.value_group), slice.col_count, params.Ev, Tile::kK);
  }
  if (status != cudaSuccess) return status;
  const int64_t tiles = slice.batch_count * ceil_div(slice.row_count, Tile::kM) * ceil_div(params.Ev, Tile::kN);
  return launch_wgmma_tiles<SplitHalfValuesWork, Tile>(params, maps, tiles, stream);
}

}  // namespace attention_ext
