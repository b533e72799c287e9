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

// What is known of a tile before it is loaded, in shared memory.
template <class Tile>
struct GradientPlan {
  typename GradientTiles<Tile>::Place at;
  TensorPosition a, b;  // the first boxes
  int64_t out;          // offset of the tile's first element in its gradient
  unsigned head;        // of the tile's query heads, the one that is loaded
};

template <class Tile>
struct Gradients {
  using T = typename Tile::T;
  using Plan = GradientPlan<Tile>;
  using Place = typename GradientTiles<Tile>::Place;

  const GradientsParams& p;
  const GradientTiles<Tile>& list;

  __device__ __forceinline__ unsigned heads() const { return list.group; }

  // Of a list of the slice's matrices from `batch_begin` on.
  __device__ __forceinline__ void make_plan(Plan& plan, unsigned tile, int64_t batch_begin) const {
    const Place at = list.place(tile, p.slice, p.sequence, p.slice.col_begin + p.slice.col_count, batch_begin);
    plan.at = at;
    const bool is_row = at.of == kGradQuery;
    const int row_begin = static_cast<int>(p.slice.row_begin), col_begin = static_cast<int>(p.slice.col_begin);
    const MatrixView& out = p.of[at.of].out;
    plan.out = batch_offset(p.batch, out, at.n, at.slice_index) + (at.m + (is_row ? row_begin : col_begin)) * out.row_stride +
               at.col * out.col_stride;
    keep_order();  // one after the other: what they read takes registers
    plan.b = {{at.col, is_row ? col_begin : row_begin + at.k_begin, 0, 0, 0}};
    plan.head = 0;
    place_head(plan);
  }

  // The operands of a tile.
  __device__ __forceinline__ void load(StepLoader<Tile>& loader, const GradientsMaps& maps, Plan& plan) const {
    const int steps = plan.at.steps;
    if (plan.at.of == kGradQuery) {
      loader.expect(steps);
      loader.template load<false, true>(maps.score_grad_rows, plan.a, maps.key, plan.b, steps);
      return;
    }
    const bool is_value = plan.at.of == kGradValue;
    const CUtensorMap& map_a = is_value ? maps.probabilities : maps.score_grad;
    const CUtensorMap& map_b = is_value ? maps.grad_out : maps.query;
    loader.expect(steps * static_cast<int>(heads()));
    if (steps == 0) return;
#pragma unroll 1
    for (;;) {
      loader.template load<true, true>(map_a, plan.a, map_b, plan.b, plan.at.steps);
      if (++plan.head == heads()) return;
      place_head(plan);
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

  __device__ __forceinline__ void write(const Plan& plan, int row, float (&product)[Tile::kN / 2]) const {
    if (p.of[plan.at.of].sums != nullptr && !carry(plan.at, row, product)) return;
    if (p.wide_out) {
      store_wide(plan, row, product);
    } else {
      store(plan, row, product);
    }
  }

 private:
  // A and the batch coordinates of B, of the tile's query head number plan.head.
  __device__ __forceinline__ void place_head(Plan& plan) const {
    const GradientsParams& params = forget_object(p);  // what divisions need is not held from head to head
    const Place& at = plan.at;
    const unsigned n = at.n + plan.head, matrix = n - static_cast<unsigned>(params.slice.batch_begin);
    const bool is_row = at.of == kGradQuery;
    plan.a = {
        {is_row ? 0 : at.m, is_row ? at.m : at.k_begin, static_cast<int>(matrix % static_cast<unsigned>(params.places)), 0, 0}};
    keep_order();
    set_batch(plan.b, params.batch, is_row ? params.key : at.of == kGradValue ? params.grad_out : params.query, n);
  }

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

  __device__ __forceinline__ void store_wide(const Plan& plan, int row, const float (&product)[Tile::kN / 2]) const {
    const MatrixView& out = p.of[plan.at.of].out;
    const float factor = static_cast<float>(p.of[plan.at.of].factor);
#pragma unroll
    for (int i = 0; i < Tile::kN / 2; ++i) {
      const int m = row + i / 2 % 2 * 8, col = i / 4 * 8 + i % 2 + static_cast<int>(threadIdx.x % 4 * 2);
      float* g_row = static_cast<float*>(out.data) + plan.out + m * out.row_stride;
      if (m < plan.at.ms && col < plan.at.cols) g_row[col * out.col_stride] = product[i] * factor;
    }
  }

  // By way of other lanes' registers, not of shared memory, whose latency the warpgroup would wait out four times.
  __device__ __forceinline__ void store(const Plan& plan, int row, const float (&product)[Tile::kN / 2]) const {
    const MatrixView& out = p.of[plan.at.of].out;
    const float factor = static_cast<float>(p.of[plan.at.of].factor);
    T* g_row = static_cast<T*>(out.data) + plan.out + row * out.row_stride;
    const int64_t down = 8 * out.row_stride;
    const bool exists[2] = {row < plan.at.ms, row + 8 < plan.at.ms};
    const int cols = plan.at.cols;
#pragma unroll
    for (int strip = 0; strip < Tile::kN / Tile::kStripCols; ++strip) {
      const int first_col = strip * Tile::kStripCols;
      if (first_col >= cols) break;
      float x[Tile::kStripCols / 2];
#pragma unroll
      for (int i = 0; i < Tile::kStripCols / 2; ++i) x[i] = product[strip * (Tile::kStripCols / 2) + i] * factor;
      uint32_t pairs[Tile::kStripCols / 4];
      pack_strip<T>(x, pairs);
      for_each_row_chunk(pairs, [&](int half, int col, uint4 chunk) {
        T* g_chunk = g_row + half * down + first_col + col;
        if (exists[half] && first_col + col < cols) *reinterpret_cast<uint4*>(g_chunk) = chunk;
      });
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
