// Backward by wgmma (Hopper), second part: dQ = scale * dS . K, dK = scale * dS^T . Q and dV = P^T . dO / (1 - p). What a CTA does
// with one tile.
//
// Three products, one list of tiles: 128 rows or keys by 256 or 192 columns. dK and dV read dS and P as they lie, row after row;
// wgmma transposes them. Their k runs over the rows of one query head of a key head after the other, from the first row tile that
// sees a key of the tile; dQ's over the keys that a row of the tile sees. Every sum has one CTA and one order: no atomics.
// Of a gradient that is made of several sums each goes on in float from what earlier ones left (GradientOf::sums): those of earlier
// slices, or of the launch's earlier query heads. A tile that nothing is added to is written as well.
#pragma once

#include "attention/sm90/pipeline/backward.h"
#include "attention/visibility/gradient_tiles.cuh"
#include "core/tensor_map.h"
#include "device/sm90/global_counter.cuh"
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

  __device__ __forceinline__ unsigned heads() const { return list.group; }
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
  // Adds what earlier sums left; false where there are later ones, to which it leaves its own. Those of more keys, more rows or
  // more query heads are later. In causal calls a tile may have its last keys, or first rows, in a slice that is not at the end.
  __device__ __forceinline__ bool carry(const Place& at, int row, float (&product)[Tile::kN / 2]) const {
    const GradientOf& gradient = p.of[at.of];
    const int row_begin = static_cast<int>(p.slice.row_begin), col_begin = static_cast<int>(p.slice.col_begin);
    const int64_t row_end = p.slice.row_begin + p.slice.row_count, col_end = p.slice.col_begin + p.slice.col_count;
    bool first, last;
    if (at.of == kGradQuery) {
      first = col_begin == 0;
      last = col_end == p.S || (p.sequence.causal && row_begin + at.m < col_end);
    } else {
      const unsigned group = forget(static_cast<unsigned>(p.group)), in_group = at.n % group;
      first = in_group == 0 && (row_begin == 0 || (p.sequence.causal && col_begin + at.m >= row_begin));
      last = in_group + heads() == group && row_end == p.L;
    }
    // Of 8 columns this thread has 4 elements.
    constexpr int kColumns = 8, kAtOnce = 8, kThreads = 128 * Tile::kConsumers;
    const int64_t first_quad = at.m / Tile::kM * (gradient.pitch / kColumns) + at.col / kColumns;
    float4* g_sums = reinterpret_cast<float4*>(gradient.sums) + first_quad * kThreads + threadIdx.x;
    const unsigned batches = static_cast<unsigned>(p.slice.batch_count), sum_heads = forget(heads()),
                   turn = (at.n - static_cast<unsigned>(p.slice.batch_begin)) / sum_heads;
    unsigned* g_added = p.added != nullptr ? added(at) : nullptr;
    // By every lane: what the warp's lanes have written before is seen.
    while (g_added != nullptr && read_acquired(g_added) != turn) __nanosleep(32);
    if (!first) {
#pragma unroll
      for (int first_of = 0; first_of < Tile::kN / kColumns; first_of += kAtOnce) {
        if (first_of * kColumns >= at.cols) continue;
        float4 before[kAtOnce] = {};  // a wait is long
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if ((first_of + i) * kColumns < at.cols) before[i] = __ldcg(g_sums + (first_of + i) * kThreads);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float* quad = &product[(first_of + i) * 4];
          quad[0] += before[i].x;
          quad[1] += before[i].y;
          quad[2] += before[i].z;
          quad[3] += before[i].w;
        }
      }
    }
    if (!last) {
#pragma unroll
      for (int i = 0; i < Tile::kN / kColumns; ++i) {
        const float* quad = &product[i * 4];
        if (i * kColumns < at.cols) g_sums[i * kThreads] = make_float4(quad[0], quad[1], quad[2], quad[3]);
      }
    }
    if (g_added != nullptr) {
      __syncwarp();  // every lane has read and written
      if (threadIdx.x % 32 == 0) set_released(g_added, (turn + 1) * sum_heads == batches ? 0 : turn + 1);
    }
    return last;
  }
  // This warp's counter of a tile of dK or dV.
  __device__ __forceinline__ unsigned* added(const Place& at) const {
    constexpr int kWarps = 4 * Tile::kConsumers;
    const int column = at.col / Tile::kN + (at.of == kGradKey ? list.value_columns : 0);
    return p.added + (at.m / Tile::kM * static_cast<int>(list.of_key()) + column) * kWarps + threadIdx.x / 32;
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
