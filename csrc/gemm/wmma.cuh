// Multiply policy for half and bfloat16: wmma 16x16x16 on Tensor Cores, float accumulators.
// Warps stand 2 x 2 in the 128x128 block tile, each with 4x4 fragments: 128 accumulator registers a thread.
#pragma once

#include <mma.h>

#include <type_traits>

#include "../device/wmma_load.cuh"
#include "tile.cuh"

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

  // accumulator += A . B over the kK steps of one stage. `meanwhile` is called once, behind the first fragment loads.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(const T* s_a, const T* s_b, Meanwhile meanwhile) {
#pragma unroll
    for (int k = 0; k < Tile::kK; k += kFragment) {
      FragmentA a[kFragmentsM];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        load_shared_fragment(a[i], s_a + position<typename Tile::A>(warp_m_ + i * kFragment, k), Tile::A::kPitch);
      }
      FragmentB b[kFragmentsN];
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        load_shared_fragment(b[j], s_b + position<typename Tile::B>(warp_n_ + j * kFragment, k), Tile::B::kPitch);
      }
      if (k == 0) meanwhile();
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
        for (int i = 0; i < kFragmentsM; ++i) {
          nvcuda::wmma::mma_sync(accumulator_[i][j], a[i], b[j], accumulator_[i][j]);
        }
      }
    }
  }

  // Writes the warp's part of the block tile, row-major with pitch Tile::kStagedPitch.
  __device__ __forceinline__ void store(float* s_staged) const {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        float* s_fragment = s_staged + (warp_m_ + i * kFragment) * Tile::kStagedPitch + warp_n_ + j * kFragment;
        nvcuda::wmma::store_matrix_sync(s_fragment, accumulator_[i][j], Tile::kStagedPitch, nvcuda::wmma::mem_row_major);
      }
    }
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

  template <class Operand>
  static __device__ __forceinline__ int position(int extent, int k) {
    return Operand::major == Major::kInner ? extent * Operand::kPitch + k : k * Operand::kPitch + extent;
  }

  FragmentC accumulator_[kFragmentsM][kFragmentsN];
  int warp_m_, warp_n_;
};

}  // namespace attention_ext
