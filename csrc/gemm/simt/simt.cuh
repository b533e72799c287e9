// Multiply policy for float and double on CUDA cores, so that float keeps float32 accuracy on every card.
// 256 threads stand 16 x 16; each owns kM/16 x kN/16 elements of the block tile, spread so that a warp's 16-byte reads
// of shared memory meet no bank conflict.
#pragma once

#include "device/sm80/cp_async.cuh"
#include "gemm/tile.cuh"

namespace attention_ext {

template <class Tile>
class SimtMultiply {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ SimtMultiply() {
#pragma unroll
    for (int i = 0; i < kPerThreadM; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThreadN; ++j) accumulator_[i][j] = 0;
    }
  }

  // accumulator += A . B over the kK of one step; shared addresses of the two operands' tiles. `meanwhile` is called once, first.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(uint32_t s_a_address, uint32_t s_b_address, Meanwhile meanwhile) {
    meanwhile();
    const T* s_a = static_cast<const T*>(shared_pointer(s_a_address));
    const T* s_b = static_cast<const T*>(shared_pointer(s_b_address));
    if constexpr (kTwoLevels) {
      T partial[kPerThreadM][kPerThreadN] = {};
      accumulate(s_a, s_b, partial);
#pragma unroll
      for (int i = 0; i < kPerThreadM; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThreadN; ++j) accumulator_[i][j] += partial[i][j];
      }
    } else {
      accumulate(s_a, s_b, accumulator_);
    }
  }

  // Calls epilogue(row, col, values) for quads of columns of the block tile, col a multiple of 4; rows from `rows` and columns
  // from `cols` on are left out (a quad that begins below `cols` is handed out whole). All threads take part.
  template <bool kWhole, class Epilogue>
  __device__ __forceinline__ void for_each_quad(typename Tile::Shared& shared, int rows, int cols, Epilogue epilogue) const {
    constexpr int kQuadsPerRow = Tile::kN / 4, kRowsPerPass = Tile::kThreads / kQuadsPerRow;
    const int thread_m = threadIdx.x / kSide, thread_n = threadIdx.x % kSide;
    const int pass_row = threadIdx.x / kQuadsPerRow, col = threadIdx.x % kQuadsPerRow * 4;
    T* s_strip = shared.strip[0];
#pragma unroll
    for (int i = 0; i < kPerThreadM; ++i) {
      __syncthreads();  // the strip before has been read
#pragma unroll
      for (int j = 0; j < kPerThreadN; ++j) {
        s_strip[thread_m * Tile::kStripPitch + owned<typename Tile::B>(thread_n, j)] = accumulator_[i][j];
      }
      __syncthreads();  // the strip is written: row t of it is the i-th row that threads t own
#pragma unroll 2
      for (int strip_row = pass_row; strip_row < Tile::kStripRows; strip_row += kRowsPerPass) {
        const int row = owned<typename Tile::A>(strip_row, i);
        const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(s_strip + strip_row * Tile::kStripPitch + col);
        if (row < rows && col < cols) epilogue(row, col, quad.value);
      }
    }
  }

 private:
  __device__ __forceinline__ void accumulate(const T* s_a, const T* s_b, T (&sum)[Tile::kM / 16][Tile::kN / 16]) const {
    const int thread_m = threadIdx.x / kSide, thread_n = threadIdx.x % kSide;
    if constexpr (Tile::B::major == Major::kInner) {
      // k is adjacent in both operands: 16 bytes of it per read. Unrolled, this loop spills at 128 registers
      // (nvcc 13.0).
      static_assert(Tile::A::major == Major::kInner, "no product has rows of A counted by k but not those of B");
#pragma unroll 1
      for (int k = 0; k < Tile::kK; k += kVector) {
        Vector a[kPerThreadM];
#pragma unroll
        for (int i = 0; i < kPerThreadM; ++i) a[i] = read(s_a + owned<typename Tile::A>(thread_m, i) * Tile::A::kPitch + k);
#pragma unroll
        for (int j = 0; j < kPerThreadN; ++j) {
          const Vector b = read(s_b + owned<typename Tile::B>(thread_n, j) * Tile::B::kPitch + k);
#pragma unroll
          for (int i = 0; i < kPerThreadM; ++i) {
#pragma unroll
            for (int e = 0; e < kVector; ++e) sum[i][j] += a[i].value[e] * b.value[e];
          }
        }
      }
    } else {
      // One step of k at a time: the columns of B are adjacent, those of A may be.
#pragma unroll 2
      for (int k = 0; k < Tile::kK; ++k) {
        T a[kPerThreadM];
#pragma unroll
        for (int i = 0; i < kPerThreadM; i += kVector) {
          if constexpr (Tile::A::major == Major::kInner) {
#pragma unroll
            for (int f = 0; f < kVector; ++f) a[i + f] = s_a[owned<typename Tile::A>(thread_m, i + f) * Tile::A::kPitch + k];
          } else {
            const Vector vector = read(s_a + k * Tile::A::kPitch + owned<typename Tile::A>(thread_m, i));
#pragma unroll
            for (int f = 0; f < kVector; ++f) a[i + f] = vector.value[f];
          }
        }
#pragma unroll
        for (int j = 0; j < kPerThreadN; j += kVector) {
          const Vector b = read(s_b + k * Tile::B::kPitch + owned<typename Tile::B>(thread_n, j));
#pragma unroll
          for (int i = 0; i < kPerThreadM; ++i) {
#pragma unroll
            for (int f = 0; f < kVector; ++f) sum[i][j + f] += a[i] * b.value[f];
          }
        }
      }
    }
  }

  static constexpr int kSide = 16;
  static constexpr int kPerThreadM = Tile::kM / kSide, kPerThreadN = Tile::kN / kSide;
  static constexpr int kVector = 16 / sizeof(T);
  // float sums each stage by itself before it joins the total: the error of a sum over k grows with its longest chain.
  static constexpr bool kTwoLevels = sizeof(T) == 4;
  static_assert(Tile::kThreads == kSide * kSide && kSide == Tile::kStripRows, "threads stand 16 x 16");
  static_assert(Tile::kK % kVector == 0 && kPerThreadM % kVector == 0 && kPerThreadN % kVector == 0, "16-byte reads");

  struct alignas(16) Vector {
    T value[kVector];
  };

  // The i-th row (or column) of the block tile that thread t of 16 owns. k adjacent: neighbours take neighbouring rows,
  // whose padded pitch spreads them over the banks. Rows adjacent: each takes 16 bytes of them, neighbours the next 16.
  template <class Operand>
  static __device__ __forceinline__ int owned(int t, int i) {
    if constexpr (Operand::major == Major::kInner) {
      return t + i * kSide;
    } else {
      return t * kVector + (i / kVector) * kSide * kVector + i % kVector;
    }
  }

  static __device__ __forceinline__ Vector read(const T* s_vector) { return *reinterpret_cast<const Vector*>(s_vector); }

  T accumulator_[kPerThreadM][kPerThreadN];
};

}  // namespace attention_ext
