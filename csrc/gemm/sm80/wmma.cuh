// Multiply policy for half and bfloat16: wmma 16x16x16 on Tensor Cores, float accumulators.
// Warps stand 2 x 2 in the 128x128 block tile, each with 4x4 fragments: 128 accumulator registers a thread; for
// float32 as two half terms (kSplitHalf) 2 x 4, each with 4x2 fragments of a step and as many sums.
#pragma once

#include <mma.h>

#include <type_traits>

#include "device/sm80/wmma_load.cuh"
#include "gemm/tile.cuh"

namespace attention_ext {

template <class Tile>
class WmmaMultiply {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ WmmaMultiply() {
    const int warp = threadIdx.x / 32;
    warp_m_ = (warp / kWarpsN) * kWarpM;
    warp_n_ = (warp % kWarpsN) * kWarpN;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) nvcuda::wmma::fill_fragment(accumulator_[i][j], 0.0f);
    }
  }

  // accumulator += A . B over the kK of one step; shared addresses of the two operands' tiles. `meanwhile` is called once, while
  // the first fragments are on their way.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(uint32_t s_a, uint32_t s_b, Meanwhile meanwhile) {
    if constexpr (Tile::kSplitHalf) {
      FragmentC step[kFragmentsM][kFragmentsN];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) nvcuda::wmma::fill_fragment(step[i][j], 0.0f);
      }
      accumulate(s_a, s_b, meanwhile, step);
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
          for (int e = 0; e < accumulator_[i][j].num_elements; ++e) accumulator_[i][j].x[e] += step[i][j].x[e];
        }
      }
    } else {
      accumulate(s_a, s_b, meanwhile, accumulator_);
    }
  }

  // Calls visit(s_strip, row, col) with strips of 16 rows by 64 columns of the block tile in shared memory, row-major with pitch
  // Tile::kStripPitch; row and col are those of the strip's first element. Each warp by itself, with its own strips.
  template <class Visit>
  __device__ __forceinline__ void for_each_strip(typename Tile::Shared& shared, Visit visit) const {
    static_assert(kWarpN == Tile::kStripCols && kFragment == Tile::kStripRows, "a strip holds a warp's row of fragments");
    float* s_strip = shared.strip[threadIdx.x / 32];
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      __syncwarp();  // the strip before has been read
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        nvcuda::wmma::store_matrix_sync(s_strip + j * kFragment, accumulator_[i][j], Tile::kStripPitch,
                                        nvcuda::wmma::mem_row_major);
      }
      __syncwarp();  // the strip is written
      visit(s_strip, warp_m_ + i * kFragment, warp_n_);
    }
  }

  // Calls epilogue(row, col, values) for quads of columns of the block tile, col a multiple of 4; rows from `rows` and columns
  // from `cols` on are left out (a quad that begins below `cols` is handed out whole). kWhole: none is to be left out.
  template <bool kWhole, class Epilogue>
  __device__ __forceinline__ void for_each_quad(typename Tile::Shared& shared, int rows, int cols, Epilogue epilogue) const {
    constexpr int kQuadsPerRow = kWarpN / 4, kRowsPerPass = 32 / kQuadsPerRow;
    constexpr int kUnroll = kWhole ? kFragment / kRowsPerPass : 2;
    const int lane = threadIdx.x % 32, lane_row = lane / kQuadsPerRow, lane_col = lane % kQuadsPerRow * 4;
    for_each_strip(shared, [&](const float* s_strip, int strip_row, int strip_col) {
      const int col = strip_col + lane_col;
#pragma unroll kUnroll
      for (int pass = 0; pass < kFragment; pass += kRowsPerPass) {
        const int row = strip_row + lane_row + pass;
        const Quad<float> quad =
            *reinterpret_cast<const Quad<float>*>(s_strip + (lane_row + pass) * Tile::kStripPitch + lane_col);
        if (kWhole || (row < rows && col < cols)) epilogue(row, col, quad.value);
      }
    });
  }

 private:
  static constexpr int kFragment = 16;
  static constexpr int kWarpsM = 2, kWarpsN = Tile::kThreads / 64;
  static constexpr int kWarpM = Tile::kM / kWarpsM, kWarpN = Tile::kN / kWarpsN;
  static constexpr int kFragmentsM = kWarpM / kFragment, kFragmentsN = kWarpN / kFragment;
  static_assert(Tile::kThreads == 32 * kWarpsM * kWarpsN, "one warp per part of the block tile");
  static_assert(Tile::kK % kFragment == 0, "a stage holds whole fragments");

  // Shared [m][k] is row-major for A, shared [k][m] column-major; for B the other way round.
  using LayoutA = std::conditional_t<Tile::A::major == Major::kInner, nvcuda::wmma::row_major, nvcuda::wmma::col_major>;
  using LayoutB = std::conditional_t<Tile::B::major == Major::kInner, nvcuda::wmma::col_major, nvcuda::wmma::row_major>;
  using FragmentA = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, kFragment, kFragment, kFragment, T, LayoutA>;
  using FragmentB = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, kFragment, kFragment, kFragment, T, LayoutB>;
  using FragmentC = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, kFragment, kFragment, kFragment, float>;

  // Bytes from the beginning of a tile.
  template <class Operand>
  static __device__ __forceinline__ uint32_t position(int extent, int k) {
    return (Operand::major == Major::kInner ? extent * Operand::kPitch + k : k * Operand::kPitch + extent) * sizeof(T);
  }

  // sums += A . B over a step.
  template <class Meanwhile>
  __device__ __forceinline__ void accumulate(uint32_t s_a, uint32_t s_b, Meanwhile meanwhile,
                                             FragmentC (&sums)[kFragmentsM][kFragmentsN]) const {
#pragma unroll
    for (int k = 0; k < Tile::kK; k += kFragment) {
      FragmentA a[kFragmentsM];
      FragmentB b[kFragmentsN];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        load_shared_fragment<Tile::A::kPitch>(a[i], s_a + position<typename Tile::A>(warp_m_ + i * kFragment, k));
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        load_shared_fragment<Tile::B::kPitch>(b[j], s_b + position<typename Tile::B>(warp_n_ + j * kFragment, k));
      }
      if (k == 0) meanwhile();
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
        for (int i = 0; i < kFragmentsM; ++i) {
          nvcuda::wmma::mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
        }
      }
    }
  }

  FragmentC accumulator_[kFragmentsM][kFragmentsN];
  int warp_m_, warp_n_;
};

}  // namespace attention_ext
