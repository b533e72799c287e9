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

// Loads the tiles of one operand, one stage of k after another. `Operand` is Tile::A or Tile::B.
template <class Tile, class Operand>
class TileLoader {
 public:
  using T = typename Tile::T;

  // The tile covers [extent_begin, ...) of the operand's m or n dim, of which [.., extent_end) exists. The first matrix
  // is flat batch index n, number slice_index of its slice; k runs over [k_begin, k_end).
  __device__ __forceinline__ TileLoader(const BatchDims& batch, const MatrixView& view, int64_t n, int64_t slice_index,
                                        int extent_begin, int extent_end, int k_begin, int k_end)
      : batch_(batch),
        view_(view),
        n_(n),
        slice_index_(slice_index),
        extent_begin_(extent_begin),
        extent_end_(extent_end),
        k_begin_(k_begin),
        k_end_(k_end) {
    whole_extent_ = view.vector && extent_begin + (kInner ? Operand::kRows : Operand::kCols) <= extent_end;
    select(0);
  }

  // Turns to k_begin of matrix n + step.
  __device__ __forceinline__ void select(int step) {
    base_ = static_cast<const T*>(view_.data) + batch_offset(batch_, view_, n_ + step, slice_index_ + step);
    k_ = k_begin_;
    g_chunk_ = base_ + static_cast<int64_t>((kInner ? extent_begin_ : k_begin_) + thread_row()) * view_.row_stride +
               (kInner ? k_begin_ : extent_begin_) + thread_col();
  }

  // Fills s_tile with the next kK of k, zeros from k_end and from extent_end on. False: the matrix is at its end.
  __device__ __forceinline__ bool done() const { return k_ >= k_end_; }
  __device__ __forceinline__ void load_next(T* s_tile) {
    T* s_chunk = s_tile + thread_row() * Operand::kPitch + thread_col();
    const int64_t g_step = kRowsPerPass * view_.row_stride;
    if (whole_extent_ && k_ + Tile::kK <= k_end_) {  // the common case: nothing to compare, nothing to zero
      const T* g_chunk = g_chunk_;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        cp_async_16(s_chunk + pass * kRowsPerPass * Operand::kPitch, g_chunk);
        g_chunk += g_step;
      }
    } else {
      load_edge(s_chunk, g_step);
    }
    k_ += Tile::kK;
    g_chunk_ += kInner ? static_cast<int64_t>(Tile::kK) : Tile::kK * view_.row_stride;
  }

 private:
  static constexpr bool kInner = Operand::major == Major::kInner;
  static constexpr int kChunksPerRow = Operand::kCols / Operand::kChunk;
  static constexpr int kRowsPerPass = Tile::kThreads / kChunksPerRow;
  static constexpr int kPasses = Operand::kRows / kRowsPerPass;
  static_assert(Tile::kThreads % kChunksPerRow == 0 && Operand::kRows % kRowsPerPass == 0, "threads cover a tile evenly");

  struct alignas(16) Chunk {
    T value[Operand::kChunk];
  };

  static __device__ __forceinline__ int thread_row() { return threadIdx.x / kChunksPerRow; }
  static __device__ __forceinline__ int thread_col() { return threadIdx.x % kChunksPerRow * Operand::kChunk; }

  // A tile that is not wholly inside the operand, or whose rows are not on 16-byte boundaries.
  __device__ __forceinline__ void load_edge(T* s_chunk, int64_t g_step) const {
    const int row_begin = (kInner ? extent_begin_ : k_) + thread_row();
    const int col = (kInner ? k_ : extent_begin_) + thread_col();
    const int row_end = kInner ? extent_end_ : k_end_;
    const int cols_left = (kInner ? k_end_ : extent_end_) - col;
    if (view_.vector) {
      const int bytes = max(0, min(cols_left, Operand::kChunk)) * static_cast<int>(sizeof(T));
      const T* g_chunk = g_chunk_;
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int valid = row_begin + pass * kRowsPerPass < row_end ? bytes : 0;
        // With nothing to read the address is the matrix's own first element: never past the end.
        cp_async_16_zero_filled(s_chunk + pass * kRowsPerPass * Operand::kPitch, valid > 0 ? g_chunk : base_, valid);
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

  const BatchDims& batch_;
  const MatrixView& view_;
  const T* base_;     // of the matrix
  const T* g_chunk_;  // this thread's first chunk of the next stage, where rows are contiguous
  int64_t n_, slice_index_;
  int extent_begin_, extent_end_, k_begin_, k_end_;
  int k_;              // of the next stage
  bool whole_extent_;  // contiguous rows, all of the tile's m or n exists
};

// Runs the product over the loaders' k and leaves the block tile in shared.staged, visible to all threads.
// kSumsMatrices: over `matrices` consecutive matrices of both operands, one after the other (the query heads of a key head).
template <class Tile, bool kSumsMatrices = false>
__device__ __forceinline__ void multiply_tile(typename Tile::Shared& shared, TileLoader<Tile, typename Tile::A>& loader_a,
                                              TileLoader<Tile, typename Tile::B>& loader_b, int k_count, int matrices = 1) {
  const int tiles = (max(k_count, 0) + Tile::kK - 1) / Tile::kK * matrices;

  // Loads run kStages - 1 tiles ahead of the product.
  [[maybe_unused]] int matrix = 0;
  const auto load_next = [&](int stage) {
    if constexpr (kSumsMatrices) {
      if (loader_a.done()) {
        ++matrix;
        loader_a.select(matrix);
        loader_b.select(matrix);
      }
    }
    loader_a.load_next(shared.stage[stage].a);
    loader_b.load_next(shared.stage[stage].b);
  };

#pragma unroll 1
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) {
    if (stage < tiles) load_next(stage);
    cp_async_commit();
  }

  Multiply<Tile> product;
  int stage = 0, load_stage = Tile::kStages - 1;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    // This thread's copies of this tile have landed; after the barrier everyone's have, and everyone has left the buffer
    // that held the tile before this one, which the next load fills.
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    // The copies are issued while the first fragments are on their way from shared memory.
    product.multiply(shared.stage[stage].a, shared.stage[stage].b, [&] {
      if (tile + Tile::kStages - 1 < tiles) load_next(load_stage);
      cp_async_commit();  // a group per tile, empty or not, so that the count above is right to the end
    });
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    load_stage = load_stage + 1 == Tile::kStages ? 0 : load_stage + 1;
  }

  // All reads of the stages are over before `staged` (a re-view of the same bytes) is written, and written before it is read.
  cp_async_wait<0>();
  __syncthreads();
  product.store(shared.staged);
  __syncthreads();
}

// Calls epilogue(row, col, values) for the thread's quads of the staged tile: row in [0, kM), col a multiple of 4 in
// [0, kN). Rows from `rows` and columns from `cols` on are left out (a quad that begins below `cols` is handed out
// whole).
template <class Tile, class Epilogue>
__device__ __forceinline__ void for_each_quad(const typename Tile::Shared& shared, int rows, int cols, Epilogue epilogue) {
  using Acc = typename Tile::Acc;
  constexpr int kQuadsPerRow = Tile::kN / 4;
  constexpr int kRowsPerPass = Tile::kThreads / kQuadsPerRow;
  const int col = threadIdx.x % kQuadsPerRow * 4;
  if (col >= cols) return;
#pragma unroll 4
  for (int row = threadIdx.x / kQuadsPerRow; row < min(rows, Tile::kM); row += kRowsPerPass) {
    const Quad<Acc> quad = *reinterpret_cast<const Quad<Acc>*>(shared.staged + row * Tile::kStagedPitch + col);
    epilogue(row, col, quad.value);
  }
}

}  // namespace attention_ext
