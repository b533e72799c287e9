// The main loop of matrix products on every card: C[kM, kN] = sum over k of A[m, k] * B[k, n] for the block tile of a CTA.
//
// 1. Each operand's loader copies 16-byte chunks of the next step of k with cp.async, or element by element where the tensor's
//    strides or alignment forbid it; what lies outside the operand becomes zero and is never read.
// 2. Tile::kStages buffers are in flight; one barrier per step.
// 3. The multiply policy (sm80/wmma.cuh for half types, simt/simt.cuh for float and double) accumulates in registers, then hands
//    the block tile out in quads of adjacent columns to the epilogue.
//
// `Work` is what differs between kernels:
//   aim(loader_a, loader_b)   points the loaders at the tile's operands; returns the product's number of steps
//   fetch_row(row)            what the epilogue needs of a row of the tile, read before the product so that its latency is hidden
//   row_value(fetched)        what becomes of it: shared.row[row] in the epilogue
//   store(product, shared)    the epilogue
#pragma once

#include <type_traits>

#include "core/arithmetic.h"
#include "core/launch.cuh"
#include "core/shared_memory.h"
#include "core/tensors.h"
#include "device/common/batch.cuh"
#include "device/sm80/cp_async.cuh"
#include "gemm/simt/simt.cuh"
#include "gemm/sm80/wmma.cuh"
#include "gemm/tile.cuh"
#include "gemm/tile_order.cuh"

namespace attention_ext {

template <class Tile>
using Multiply = std::conditional_t<sizeof(typename Tile::T) == 2, WmmaMultiply<Tile>, SimtMultiply<Tile>>;

// Loads the tiles of one operand, one step of k after another. `Operand` is Tile::A or Tile::B.
template <class Tile, class Operand>
class TileLoader {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ TileLoader(const BatchDims& batch, const MatrixView& view) : batch_(batch), view_(view) {}

  // The tile covers [extent_begin, ...) of the operand's m or n dim, of which [.., extent_end) exists. The first matrix
  // is flat batch index n, number slice_index of its slice; k runs over [k_begin, k_end).
  __device__ __forceinline__ void aim(int64_t n, int64_t slice_index, int extent_begin, int extent_end, int k_begin,
                                      int k_end) {
    n_ = n;
    slice_index_ = slice_index;
    extent_begin_ = extent_begin;
    extent_end_ = extent_end;
    k_begin_ = k_begin;
    k_end_ = k_end;
    select(0);
  }

  // Turns to k_begin of matrix n + step.
  __device__ __forceinline__ void select(int step) {
    base_ = static_cast<const T*>(view_.data) + batch_offset(batch_, view_, n_ + step, slice_index_ + step);
    k_ = k_begin_;
    g_chunk_ = base_ + static_cast<int64_t>((kInner ? extent_begin_ : k_begin_) + thread_row()) * view_.row_stride +
               (kInner ? k_begin_ : extent_begin_) + thread_col();
  }

  // Whether every step is a whole tile of contiguous, aligned rows: nothing to compare, nothing to zero.
  __device__ __forceinline__ bool all_whole() const {
    return view_.vector && extent_begin_ + (kInner ? Operand::kRows : Operand::kCols) <= extent_end_ &&
           (k_end_ - k_begin_) % Tile::kK == 0;
  }

  // Whether the matrix is at its end.
  __device__ __forceinline__ bool done() const { return k_ >= k_end_; }

  // Fills the tile at shared address s_tile with the next kK of k, zeros from k_end and from extent_end on.
  template <bool kAllWhole>
  __device__ __forceinline__ void load_next(uint32_t s_tile) {
    const uint32_t s_chunk = s_tile + (thread_row() * Operand::kPitch + thread_col()) * static_cast<uint32_t>(sizeof(T));
    if constexpr (kAllWhole) {
      const T* g_chunk = g_chunk_;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        cp_async_16(s_chunk + pass * kPassBytes, g_chunk);
        if (pass + 1 < kPasses) g_chunk = step_pointer(g_chunk, kRowsPerPass * view_.row_stride);
      }
    } else {
      load_edge(s_chunk);
    }
    k_ += Tile::kK;
    g_chunk_ += kInner ? static_cast<int64_t>(Tile::kK) : Tile::kK * view_.row_stride;
  }

 private:
  static constexpr bool kInner = Operand::major == Major::kInner;
  static constexpr int kChunksPerRow = Operand::kCols / Operand::kChunk;
  static constexpr int kRowsPerPass = Tile::kThreads / kChunksPerRow;
  static constexpr int kPasses = Operand::kRows / kRowsPerPass;
  static constexpr uint32_t kPassBytes = kRowsPerPass * Operand::kPitch * sizeof(T);
  static_assert(Tile::kThreads % kChunksPerRow == 0 && Operand::kRows % kRowsPerPass == 0, "threads cover a tile evenly");

  struct alignas(16) Chunk {
    T value[Operand::kChunk];
  };

  static __device__ __forceinline__ int thread_row() { return threadIdx.x / kChunksPerRow; }
  static __device__ __forceinline__ int thread_col() { return threadIdx.x % kChunksPerRow * Operand::kChunk; }

  // A tile that may not lie wholly inside the operand, or whose rows may not be on 16-byte boundaries.
  __device__ __forceinline__ void load_edge(uint32_t s_chunk) const {
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
        cp_async_16_zero_filled(s_chunk + pass * kPassBytes, valid > 0 ? g_chunk : base_, valid);
        g_chunk += kRowsPerPass * view_.row_stride;
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
        store_shared_16(s_chunk + pass * kPassBytes, *reinterpret_cast<const uint4*>(&chunk));
      }
    }
  }

  const BatchDims& batch_;
  const MatrixView& view_;
  const T* base_;     // of the matrix
  const T* g_chunk_;  // this thread's first chunk of the next step, where rows are contiguous
  int64_t n_, slice_index_;
  int extent_begin_, extent_end_, k_begin_, k_end_;
  int k_;  // of the next step
};

// Steps of k that a product over `count` takes.
template <class Tile>
__device__ __forceinline__ int steps_of(int count) {
  return (max(count, 0) + Tile::kK - 1) / Tile::kK;
}

template <class Tile, bool kSumsMatrices, bool kAllWhole, class LoaderA, class LoaderB>
__device__ __forceinline__ void multiply_steps(Multiply<Tile>& product, uint32_t s_stages, LoaderA& loader_a, LoaderB& loader_b,
                                               int steps) {
  constexpr uint32_t kStageBytes = sizeof(typename Tile::Stage), kB = offsetof(typename Tile::Stage, b);
  [[maybe_unused]] int matrix = 0;
  const auto load_next = [&](int stage) {
    if constexpr (kSumsMatrices) {
      if (loader_a.done()) {
        ++matrix;
        loader_a.select(matrix);
        loader_b.select(matrix);
      }
    }
    loader_a.template load_next<kAllWhole>(s_stages + stage * kStageBytes);
    loader_b.template load_next<kAllWhole>(s_stages + stage * kStageBytes + kB);
  };

  // Loads run kStages - 1 steps ahead of the product.
#pragma unroll 1
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) {
    if (stage < steps) load_next(stage);
    cp_async_commit();
  }
  int stage = 0, load_stage = Tile::kStages - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // This thread's copies of this step have landed; after the barrier everyone's have, and everyone has left the buffer
    // that held the step before this one, which the next load fills.
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    product.multiply(s_stages + stage * kStageBytes, s_stages + stage * kStageBytes + kB, [&] {
      if (step + Tile::kStages - 1 < steps) load_next(load_stage);
      cp_async_commit();  // a group per step, empty or not, so that the count above is right to the end
    });
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    load_stage = load_stage + 1 == Tile::kStages ? 0 : load_stage + 1;
  }
}

// Does the CTA's block tile. kSumsMatrices: the product runs over several consecutive matrices of both operands, one after the
// other (the query heads of a key head).
template <class Tile, bool kSumsMatrices = false, class Work>
__device__ __forceinline__ void run_tile(const Work& work, TileLoader<Tile, typename Tile::A> loader_a,
                                         TileLoader<Tile, typename Tile::B> loader_b) {
  extern __shared__ __align__(128) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const uint32_t s_stages = shared_address(&shared.stage[0]);

  const int steps = work.aim(loader_a, loader_b);
  static_assert(Tile::kM <= Tile::kThreads, "a thread fetches one row's value");
  using Row = RowValues<typename Tile::Acc>;
  const Row fetched = threadIdx.x < Tile::kM ? work.fetch_row(threadIdx.x) : Row{};
  Multiply<Tile> product;
  if (loader_a.all_whole() && loader_b.all_whole()) {
    multiply_steps<Tile, kSumsMatrices, true>(product, s_stages, loader_a, loader_b, steps);
  } else {
    multiply_steps<Tile, kSumsMatrices, false>(product, s_stages, loader_a, loader_b, steps);
  }
  if (threadIdx.x < Tile::kM) shared.row[threadIdx.x] = work.row_value(fetched);
  // All reads of the stages are over before the strips, which share their bytes, are written; shared.row is written.
  cp_async_wait<0>();
  __syncthreads();
  work.store(product, shared);
}

// Launches kernel(params, m_tiles, n_tiles, first_batch) over all tiles of `batches` matrices, one CTA each.
template <class Tile, class Params>
cudaError_t launch_tiles(void (*kernel)(Params, int, int, int64_t), const Params& params, int64_t rows, int64_t cols,
                         int64_t batches, cudaStream_t stream) {
  const int64_t m_tiles = ceil_div(rows, Tile::kM), n_tiles = ceil_div(cols, Tile::kN), tiles = m_tiles * n_tiles;
  if (tiles == 0 || batches == 0) return cudaSuccess;
  if (tiles > kMaxCtas) return cudaErrorInvalidConfiguration;
  const cudaError_t status = allow_shared_memory(reinterpret_cast<const void*>(kernel), static_cast<int>(Tile::kSharedBytes));
  if (status != cudaSuccess) return status;
  return launch_parts(batches, kMaxCtas / tiles, [&](int64_t first, int64_t count) {
    kernel<<<static_cast<unsigned>(count * tiles), Tile::kThreads, Tile::kSharedBytes, stream>>>(
        params, static_cast<int>(m_tiles), static_cast<int>(n_tiles), first);
  });
}

}  // namespace attention_ext
