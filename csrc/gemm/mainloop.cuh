// The one tiled main loop: C[kM, kN] = sum over k of A[m, k] * B[k, n] for one block tile.
//
// 1. Each operand's loader copies 16-byte chunks of the next stage with cp.async, or element by element where the
// tensor's
//    strides or alignment forbid it; what lies outside the operand becomes zero and is never read.
// 2. Tile::kStages buffers are in flight; one barrier per stage.
// 3. The multiply policy (wmma.cuh, simt.cuh) accumulates in registers, then stages the block tile in shared memory.
// 4. for_each_quad hands out four adjacent columns at a time to an epilogue, whole rows per warp.
#pragma once

#include <type_traits>

#include "../device/batch.cuh"
#include "../device/cp_async.cuh"
#include "simt.cuh"
#include "tile.cuh"
#include "wmma.cuh"

namespace attention_ext {

template <class Tile>
using Multiply = std::conditional_t<sizeof(typename Tile::T) == 2, WmmaMultiply<Tile>, SimtMultiply<Tile>>;

// Loads tiles of one operand. `Operand` is Tile::A or Tile::B.
template <class Tile, class Operand>
class TileLoader {
 public:
  using T = typename Tile::T;

  // The tile covers [extent_begin, ...) of the operand's m or n dim, of which [.., extent_end) exists. The first matrix
  // is flat batch index n, number slice_index of its slice.
  __device__ __forceinline__ TileLoader(const BatchDims& batch, const MatrixView& view, int64_t n, int64_t slice_index,
                                        int extent_begin, int extent_end)
      : batch_(batch),
        view_(view),
        n_(n),
        slice_index_(slice_index),
        extent_begin_(extent_begin),
        extent_end_(extent_end) {
    select(0);
  }

  // Turns to matrix n + step.
  __device__ __forceinline__ void select(int step) {
    base_ = static_cast<const T*>(view_.data) + batch_offset(batch_, view_, n_ + step, slice_index_ + step);
  }

  // Fills s_tile with k in [k_begin, k_begin + kK), zeros from k_end and from extent_end on.
  __device__ __forceinline__ void load(T* s_tile, int k_begin, int k_end) const {
    constexpr bool kInner = Operand::major == Major::kInner;
    const int row_begin = (kInner ? extent_begin_ : k_begin) + threadIdx.x / kChunksPerRow;
    const int col = (kInner ? k_begin : extent_begin_) + threadIdx.x % kChunksPerRow * Operand::kChunk;
    const int row_end = kInner ? extent_end_ : k_end;
    const int cols_left = (kInner ? k_end : extent_end_) - col;
    T* s_chunk = s_tile + threadIdx.x / kChunksPerRow * Operand::kPitch + threadIdx.x % kChunksPerRow * Operand::kChunk;

    if (view_.vector) {
      const int bytes = max(0, min(cols_left, Operand::kChunk)) * static_cast<int>(sizeof(T));
      const T* g_chunk = base_ + row_begin * view_.row_stride + col;
      const int64_t g_step = kRowsPerPass * view_.row_stride;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int valid = row_begin + pass * kRowsPerPass < row_end ? bytes : 0;
        // With nothing to read the address is the matrix's own first element: never past the end.
        cp_async_16(s_chunk + pass * kRowsPerPass * Operand::kPitch, valid > 0 ? g_chunk : base_, valid);
        g_chunk += g_step;
      }
    } else {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = row_begin + pass * kRowsPerPass;
        const T* g_chunk = base_ + row * view_.row_stride + col * view_.col_stride;
        const int valid = row < row_end ? cols_left : 0;
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < Operand::kChunk; ++e) {
          chunk.value[e] = from_accumulator<T>(0);
          if (e < valid) chunk.value[e] = g_chunk[e * view_.col_stride];
        }
        *reinterpret_cast<Chunk*>(s_chunk + pass * kRowsPerPass * Operand::kPitch) = chunk;
      }
    }
  }

 private:
  static constexpr int kChunksPerRow = Operand::kCols / Operand::kChunk;
  static constexpr int kRowsPerPass = Tile::kThreads / kChunksPerRow;
  static constexpr int kPasses = Operand::kRows / kRowsPerPass;
  static_assert(Tile::kThreads % kChunksPerRow == 0 && Operand::kRows % kRowsPerPass == 0,
                "threads cover a tile evenly");

  struct alignas(16) Chunk {
    T value[Operand::kChunk];
  };

  const BatchDims& batch_;
  const MatrixView& view_;
  const T* base_;
  int64_t n_, slice_index_;
  int extent_begin_, extent_end_;
};

// Runs the product over k in [k_begin, k_end) and leaves the block tile in shared.staged, visible to all threads.
// kSumsMatrices: over `matrices` consecutive matrices of both operands, one after the other (the query heads of a key
// head).
template <class Tile, bool kSumsMatrices = false>
__device__ __forceinline__ void multiply_tile(typename Tile::Shared& shared,
                                              TileLoader<Tile, typename Tile::A>& loader_a,
                                              TileLoader<Tile, typename Tile::B>& loader_b, int k_begin, int k_end,
                                              int matrices = 1) {
  const int tiles_per_matrix = k_end > k_begin ? (k_end - k_begin + Tile::kK - 1) / Tile::kK : 0;
  const int tiles = tiles_per_matrix * matrices;

  // What the next load takes: it runs kStages - 1 tiles ahead of the product.
  [[maybe_unused]] int load_matrix = 0;
  int load_k = k_begin;
  const auto load_next = [&](int stage) {
    if constexpr (kSumsMatrices) {
      if (load_k >= k_end) {
        ++load_matrix;
        load_k = k_begin;
        loader_a.select(load_matrix);
        loader_b.select(load_matrix);
      }
    }
    loader_a.load(shared.stage[stage].a, load_k, k_end);
    loader_b.load(shared.stage[stage].b, load_k, k_end);
    load_k += Tile::kK;
  };

#pragma unroll
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) {
    if (stage < tiles) load_next(stage);
    cp_async_commit();
  }

  Multiply<Tile> product;
  int stage = 0, load_stage = Tile::kStages - 1;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    // This thread's copies of this tile have landed; after the barrier everyone's have, and everyone has left the
    // buffer that held the tile before this one, which the next load fills.
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    if (tile + Tile::kStages - 1 < tiles) load_next(load_stage);
    cp_async_commit();  // a group per tile, empty or not, so that the count above is right to the end
    product.multiply(shared.stage[stage].a, shared.stage[stage].b);
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    load_stage = load_stage + 1 == Tile::kStages ? 0 : load_stage + 1;
  }

  // All reads of the stages are over before `staged` (a re-view of the same bytes) is written, and written before it is
  // read.
  cp_async_wait<0>();
  __syncthreads();
  product.store(shared.staged);
  __syncthreads();
}

// Calls epilogue(row, col, values) for the thread's quads of the staged tile: row in [0, kM), col a multiple of 4 in
// [0, kN). Rows from `rows` and columns from `cols` on are left out (a quad that begins below `cols` is handed out
// whole).
template <class Tile, class Epilogue>
__device__ __forceinline__ void for_each_quad(const typename Tile::Shared& shared, int rows, int cols,
                                              Epilogue epilogue) {
  using Acc = typename Tile::Acc;
  constexpr int kQuadsPerRow = Tile::kN / 4;
  constexpr int kRowsPerPass = Tile::kThreads / kQuadsPerRow;
  const int col = threadIdx.x % kQuadsPerRow * 4;
  if (col >= cols) return;
#pragma unroll 2
  for (int row = threadIdx.x / kQuadsPerRow; row < min(rows, Tile::kM); row += kRowsPerPass) {
    const Quad<Acc> quad = *reinterpret_cast<const Quad<Acc>*>(shared.staged + row * Tile::kStagedPitch + col);
    epilogue(row, col, quad.value);
  }
}

}  // namespace attention_ext
