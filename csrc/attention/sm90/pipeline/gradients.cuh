// Backward by wgmma (Hopper), second part: dQ = scale * dS . K, dK = scale * dS^T . Q and dV = P^T . dO / (1 - p). What a CTA does
// with one tile.
//
// Three products, one list of tiles: 128 rows or keys by 256 or 192 columns. dK and dV read dS and P as they lie, row after row;
// wgmma transposes them. Their k runs over the rows of one query head of a key head after the other, from the first row tile that
// sees a key of the tile; dQ's over the keys that a row of the tile sees. Every sum has one CTA and one order: no atomics.
// A sum that spans slices goes on in float from what earlier ones left (GradientOf::sums). A tile that nothing is added to is
// written as well.
#pragma once

#include "attention/sm90/pipeline/backward.h"
#include "attention/visibility/gradient_tiles.cuh"
#include "core/tensor_map.h"
#include "gemm/sm90/steps.cuh"

namespace attention_ext {

struct GradientsMaps {
  // Boxes of 64 rows by 64 columns; score_grad_rows: of 128 rows.
  CUtensorMap probabilities, score_grad, score_grad_rows, query, key, grad_out;
};

template <class Tile>
struct Gradients {
  using T = typename Tile::T;

  const GradientsParams& p;
  const GradientTiles<Tile>& list;

  using Place = typename GradientTiles<Tile>::Place;

  __device__ __forceinline__ unsigned heads() const { return list.heads(); }
  // Of a list of the slice's matrices from `batch_begin` on.
  __device__ __forceinline__ Place place(unsigned tile, int64_t batch_begin) const {
    return list.place(tile, p.slice, p.sequence, p.slice.col_begin + p.slice.col_count, batch_begin);
  }

  // The operands of a tile of at least one step. a, b: where positions are kept, in registers or in shared memory.
  __device__ __forceinline__ void load(StepLoader<Tile>& loader, const GradientsMaps& maps, const Place& at, TensorPosition& a,
                                       TensorPosition& b) const {
    const unsigned matrix = (at.n - static_cast<unsigned>(p.slice.batch_begin)) % forget(static_cast<unsigned>(p.places));
    if (at.of == kGradQuery) {
      a = {{0, at.m, static_cast<int>(matrix), 0, 0}};
      b = {{at.col, static_cast<int>(p.slice.col_begin), 0, 0, 0}};
      set_batch(b, p.batch, p.key, at.n);
      loader.template load<false, true>(maps.score_grad_rows, a, maps.key, b, at.steps);
      return;
    }
    const bool is_value = at.of == kGradValue;
    const CUtensorMap& map_a = is_value ? maps.probabilities : maps.score_grad;
    const CUtensorMap& map_b = is_value ? maps.grad_out : maps.query;
#pragma unroll 1
    for (unsigned head = 0; head < heads(); ++head) {
      a = {{at.m, at.k_begin, static_cast<int>(matrix + head), 0, 0}};
      b = {{at.col, static_cast<int>(p.slice.row_begin) + at.k_begin, 0, 0, 0}};
      set_batch(b, p.batch, is_value ? p.grad_out : p.query, at.n + head);
      loader.template load<true, true>(map_a, a, map_b, b, at.steps);
    }
  }

  __device__ __forceinline__ void multiply(StepMultiplier<Tile>& multiplier, const Place& at,
                                           float (&product)[Tile::kN / 2]) const {
    if (at.steps == 0) {
      multiplier.let_follow();
#pragma unroll
      for (int i = 0; i < Tile::kN / 2; ++i) product[i] = 0.0f;
    } else if (at.of == kGradQuery) {
      multiplier.template multiply<false, true>(product, at.steps, at.last_rows);
    } else {
      multiplier.template multiply<true, true>(product, at.steps * static_cast<int>(heads()));
    }
  }

  __device__ __forceinline__ void write(const Place& at, int row, float (&product)[Tile::kN / 2], uint32_t s_strip) const {
    if (p.of[at.of].sums == nullptr || carry(at, row, product)) store(at, row, product, s_strip);
  }

 private:
  // Adds what earlier slices left; false where there are later ones, to which it leaves the sum. Slices with more keys, more rows
  // or more query heads are later. In causal calls a tile may have its last keys, or first rows, in a slice that is not at the end.
  __device__ __forceinline__ bool carry(const Place& at, int row, float (&product)[Tile::kN / 2]) const {
    const GradientOf& gradient = p.of[at.of];
    const int row_begin = static_cast<int>(p.slice.row_begin), col_begin = static_cast<int>(p.slice.col_begin);
    const int64_t row_end = p.slice.row_begin + p.slice.row_count, col_end = p.slice.col_begin + p.slice.col_count;
    bool first, last;
    if (at.of == kGradQuery) {
      first = col_begin == 0;
      last = col_end == p.S || (p.sequence.causal && row_begin + at.m < col_end);
    } else {
      first = at.n % p.group == 0 && (row_begin == 0 || (p.sequence.causal && col_begin + at.m >= row_begin));
      last = (at.n + heads()) % p.group == 0 && row_end == p.L;
    }
    float* g_sums = gradient.sums + (at.m + row) * gradient.pitch + at.col + threadIdx.x % 4 * 2;
    const auto for_each_pair = [&](auto visit) {
#pragma unroll
      for (int i = 0; i < Tile::kN / 2; i += 2) {
        const int down = i / 2 % 2 * 8, along = i / 4 * 8;
        if (row + down < at.ms && along < at.cols) {  // widths are multiples of 8
          visit(*reinterpret_cast<float2*>(g_sums + down * gradient.pitch + along), product[i], product[i + 1]);
        }
      }
    };
    if (!first) {
      for_each_pair([](const float2& before, float& x, float& y) {
        x += before.x;
        y += before.y;
      });
    }
    if (!last) for_each_pair([](float2& after, float x, float y) { after = {x, y}; });
    return last;
  }

  __device__ __forceinline__ void store(const Place& at, int row, const float (&product)[Tile::kN / 2],
                                        uint32_t s_strip) const {
    const GradientOf& gradient = p.of[at.of];
    const MatrixView& out = gradient.out;
    const float factor = static_cast<float>(gradient.factor);
    const int64_t first_m = at.m + (at.of == kGradQuery ? p.slice.row_begin : p.slice.col_begin);
    const int64_t offset = batch_offset(p.batch, out, at.n, at.slice_index) + at.col * out.col_stride;
    if (p.wide_out) {
#pragma unroll
      for (int i = 0; i < Tile::kN / 2; ++i) {
        const int m = row + i / 2 % 2 * 8, col = i / 4 * 8 + i % 2 + static_cast<int>(threadIdx.x % 4 * 2);
        float* g_row = static_cast<float*>(out.data) + offset + (first_m + m) * out.row_stride;
        if (m < at.ms && col < at.cols) g_row[col * out.col_stride] = product[i] * factor;
      }
      return;
    }
    const int lane = static_cast<int>(forget(threadIdx.x)) % 32, warp_row = row - lane / 4;
    const bool whole = out.vector && at.ms >= Tile::kM && at.cols >= Tile::kN;
    T* g_out = static_cast<T*>(out.data) + offset + (first_m + warp_row + lane / 8) * out.row_stride;
#pragma unroll
    for (int strip = 0; strip < Tile::kN / Tile::kStripCols; ++strip) {
      const int first_col = strip * Tile::kStripCols;
      if (first_col >= at.cols) break;
      float x[Tile::kStripCols / 2];
#pragma unroll
      for (int i = 0; i < Tile::kStripCols / 2; ++i) x[i] = product[strip * (Tile::kStripCols / 2) + i] * factor;
      for_each_chunk<T, 4>(
          x, s_strip,
          [&](int chunk_row, int chunk_col, const T* chunk) {
            const int col = first_col + chunk_col;
            T* g_row = g_out + (chunk_row - lane / 8) * out.row_stride;
            if (whole) {
              *reinterpret_cast<uint4*>(g_row + col) = *reinterpret_cast<const uint4*>(chunk);
            } else if (warp_row + chunk_row < at.ms && col < at.cols) {
              store_chunk(g_row, col, at.cols, out, chunk);
            }
          },
          lane);
    }
  }
};

template <class Tile>
cudaError_t make_gradients_maps(GradientsMaps& maps, const GradientsParams& params) {
  const Slice& slice = params.slice;
  const int64_t rows = slice.row_begin + slice.row_count, keys = slice.col_begin + slice.col_count;
  const int64_t E = params.of[kGradKey].width, Ev = params.of[kGradValue].width;
  const BatchDims matrices = {{params.places}, 1};
  const auto scores = [&](CUtensorMap& to, MatrixView view, int box) {  // the slice's, as a view of one batch dim
    view.batch_stride[0] = params.places > 1 ? view.slice_stride : 0;
    return make_tensor_map(to, params.type, matrices, view, slice.row_count, slice.col_count, box);
  };
  const auto operand = [&](CUtensorMap& to, const MatrixView& view, int64_t lines, int64_t width) {
    return make_tensor_map(to, params.type, params.batch, view, lines, width, Tile::kK);
  };
  cudaError_t status = scores(maps.probabilities, params.probabilities, Tile::kK);
  if (status == cudaSuccess) status = scores(maps.score_grad, params.score_grad, Tile::kK);
  if (status == cudaSuccess) status = scores(maps.score_grad_rows, params.score_grad, Tile::kM);
  if (status == cudaSuccess) status = operand(maps.query, params.query, rows, E);
  if (status == cudaSuccess) status = operand(maps.key, params.key, keys, E);
  if (status == cudaSuccess) status = operand(maps.grad_out, params.grad_out, rows, Ev);
  return status;
}

}  // namespace attention_ext
