// What the row and the column kernel of the backward have in common: exponents, products, the way of a gradient out.
#pragma once

#include "attention/sm90/pipeline/backward.h"
#include "attention/sm90/rows/tile.cuh"
#include "attention/sm90/rows_backward/rows_backward.h"
#include "core/dispatch.h"
#include "device/common/batch.cuh"
#include "device/common/math.cuh"
#include "device/sm80/positive_pair.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/sm90/strip.cuh"
#include "plan/sm90_rows_backward.h"

namespace attention_ext {

struct RowsBackwardMaps {
  CUtensorMap query, key, value, grad_out;  // boxes of a tile of the one pair and of a block of the other
};

// In which order the CTAs take the tiles: section after section of heads, and in a section by length. The last section begins with
// the longest tiles of all its heads, and each one ends with tiles as long as the next one begins with: a section may end within
// a round over the SMs, in which tiles should be alike.
struct RowsBackwardOrder {
  uint32_t tiles, tiles_of_head, heads_of_section;  // 1: the tiles of a head are adjacent
  struct Place {
    uint32_t head, tile;  // tile: the n-th longest of the head
  };
  __device__ __forceinline__ Place at(uint32_t place) const {
    const uint32_t of_section = tiles_of_head * heads_of_section, section = place / of_section;
    const uint32_t heads = min(tiles / tiles_of_head - section * heads_of_section, heads_of_section);
    place -= section * of_section;
    const bool longest_first = ((tiles - 1) / of_section - section) % 2 == 0;
    return {section * heads_of_section + place % heads, longest_first ? place / heads : tiles_of_head - 1 - place / heads};
  }
};

constexpr int kRowsBackwardConsumers = 2;  // warpgroups that multiply; one more loads
constexpr int kRowsBackwardThreads = 128 * (kRowsBackwardConsumers + 1);
// Of the 168 that each of 384 threads begins with: nothing that is given exceeds it. Roles, and the row kernel's general instance
// at head dim 192, need fewer, and their producers more.
constexpr int rows_backward_consumer_registers(bool wide_producer) { return wide_producer ? 232 : 240; }
constexpr int rows_backward_producer_registers(bool wide_producer) { return wide_producer ? 40 : 24; }
static_assert(kRowsBackwardConsumers * rows_backward_consumer_registers(false) + rows_backward_producer_registers(false) <=
              504);
static_assert(kRowsBackwardConsumers * rows_backward_consumer_registers(true) + rows_backward_producer_registers(true) <= 504);

// Turns of the consumers at issuing products, so that they stay out of step. All take as many.
template <bool kTurns>
struct Turns {
  static constexpr int kThreads = 128 * kRowsBackwardConsumers;
  int consumer;

  __device__ __forceinline__ void begin() const {  // consumer 0 has the first
    if (kTurns && consumer == kRowsBackwardConsumers - 1) pass();
  }
  __device__ __forceinline__ void take() const {
    if constexpr (kTurns) barrier_sync(kBarrierTurn + consumer, kThreads);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (kTurns) barrier_arrive(kBarrierTurn + (consumer + 1) % kRowsBackwardConsumers, kThreads);
  }
};

// A probability is P = 2^(product * unit + offset) times weight_scale. Of a query with a large log-sum-exp, or where the scale is
// none to multiply exponents by, it is 2^((product * scale - lse) * log2 e + offset): the difference first.
template <class T>
struct Exponents {
  static constexpr float kWeightScale = weight_scale(kDataType<T>), kUnscale = 1.0f / kWeightScale;

  const RowsBackwardParams& p;

  __device__ __forceinline__ bool careful(float lse) const { return p.differences || !(fabsf(lse) < kLargeLse); }

  // Under a mask, where all rows have the difference: 2^((score - lse) * log2 e + offset).
  static __device__ __forceinline__ float weight_of_score(float score, float lse, float offset) {
    return exp2_approx(fmaf(score - lse, kLog2E, offset));
  }
  __device__ __forceinline__ float weight(float product, float offset) const {
    return exp2_approx(fmaf(product, p.unit, offset));
  }
  __device__ __forceinline__ float careful_weight(float product, float lse, float offset) const {
    const bool difference = careful(lse);
    // Rounded, as the norm of its row was made.
    return exp2_approx(
        fmaf(difference ? __fmul_rn(product, p.scale_factor) - lse : product, difference ? kLog2E : p.unit, offset));
  }
};

// d = A . B^T begun, of `kSteps` boxes of 64 columns each: 64 rows of A, in boxes of kRowsA rows, from s_a on.
template <class T, int kSteps, int kRowsA, int kRowsB, int kCount>
__device__ __forceinline__ void multiply_rows(float (&d)[kCount], uint32_t s_a, uint32_t s_b) {
  const uint64_t a = matrix_descriptor(s_a, 1024, 0), b = matrix_descriptor(s_b, 1024, 0);
#pragma unroll
  for (int k = 0; k < 4 * kSteps; ++k) {
    wgmma<T, false>(d, a + (k / 4 * (kRowsA * 128) + k % 4 * 32) / 16, b + (k / 4 * (kRowsB * 128) + k % 4 * 32) / 16, k == 0);
  }
  wgmma_commit();
}

// sums += A . B begun: A 64 rows in registers, B as many rows as A has columns, in boxes of so many rows by 64 columns.
template <class T, int kSlices, int kParts, int kCount>
__device__ __forceinline__ void add_product(float (&sums)[kParts][kCount], const uint32_t (&a)[kSlices][4], uint32_t s_b) {
  constexpr int kBoxBytes = kSlices * 16 * 128;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t b = matrix_descriptor(s_b + part * (kCount / 32) * kBoxBytes, 1024, kBoxBytes);
      wgmma_from_registers<T>(sums[part], a[slice], b + slice * 2048 / 16);
    }
  }
  wgmma_commit();
}

// A result of wgmma and an operand of it in registers lie alike. kPositive: negative ones as 0.
template <class T, bool kPositive = false, int kSlices, int kCount>
__device__ __forceinline__ void pack(uint32_t (&a)[kSlices][4], const float (&d)[kCount]) {
  static_assert(kCount == 8 * kSlices);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    a[i / 4][i % 4] = kPositive ? pack_positive_pair<T>(d[2 * i], d[2 * i + 1]) : pack_pair<T>(d[2 * i], d[2 * i + 1]);
  }
}

// Writes a warp's 16 rows of a gradient, of which `rows` exist, times `factor`; from row `seen` on 0. first: the place of the first
// row in the view. s_strip: 2 KB of the warp's own, on a 1024-byte boundary.
template <class T, int kParts, int kCount>
__device__ __forceinline__ void store_grad(const float (&sums)[kParts][kCount], float factor, const MatrixView& view,
                                           int64_t first, int rows, int seen, int cols, bool wide, uint32_t s_strip) {
  const int row = threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
#pragma unroll
  for (int step = 0; step < kParts * kCount / 32; ++step) {
    float values[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      values[i] = row + i / 2 % 2 * 8 < seen ? sums[step * 32 / kCount][step * 32 % kCount + i] * factor : 0.0f;
    }
    if (wide) {
      float* g_row = static_cast<float*>(view.data) + first + row * view.row_stride;
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const int half = i / 2 % 2, at = step * 64 + col + i / 4 * 8;
        if (row + half * 8 >= rows || at >= cols) continue;
        float* g_pair = g_row + half * 8 * view.row_stride + at * view.col_stride;
        if (view.vector && at + 2 <= cols) {
          *reinterpret_cast<float2*>(g_pair) = {values[i], values[i + 1]};
        } else {
          g_pair[0] = values[i];
          if (at + 1 < cols) g_pair[view.col_stride] = values[i + 1];
        }
      }
      continue;
    }
    for_each_chunk<T, 4>(values, s_strip, [&](int chunk_row, int chunk_col, const T* chunk) {
      T* g_row = static_cast<T*>(view.data) + first + chunk_row * view.row_stride;
      const int at = step * 64 + chunk_col;
      if (chunk_row < rows && at < cols) store_chunk(g_row, at, cols, view, chunk);
    });
  }
}

}  // namespace attention_ext
