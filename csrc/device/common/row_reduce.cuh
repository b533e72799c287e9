// Reductions over the threads of a row, for the softmax kernels: a row belongs to one warp or to the whole CTA.
#pragma once

#include "device/common/math.cuh"

namespace attention_ext {

constexpr int kSoftmaxThreads = 256;  // of a CTA

struct Maximum {
  template <int kLanes, class A>
  static __device__ __forceinline__ A of_warp(A x) {
    return warp_max<kLanes>(x);
  }
  template <class A>
  static __device__ __forceinline__ A of_pair(A a, A b) {
    return maximum(a, b);
  }
};
struct Sum {
  template <int kLanes, class A>
  static __device__ __forceinline__ A of_warp(A x) {
    return warp_sum<kLanes>(x);
  }
  template <class A>
  static __device__ __forceinline__ A of_pair(A a, A b) {
    return a + b;
  }
};

// Reduces over the threads of a row; all of them get the result. `s_partial` has one place per warp.
template <class Tile, class Operation>
__device__ __forceinline__ typename Tile::Acc reduce_row(typename Tile::Acc x, typename Tile::Acc* s_partial) {
  constexpr int kLanes = Tile::kThreadsPerRow > 32 ? 32 : Tile::kThreadsPerRow;
  x = Operation::template of_warp<kLanes>(x);
  if constexpr (Tile::kThreadsPerRow > 32) {
    __syncthreads();  // the partials of the reduction before this one have been read
    if (threadIdx.x % 32 == 0) s_partial[threadIdx.x / 32] = x;
    __syncthreads();  // all warps' partials are there
    x = s_partial[0];
#pragma unroll
    for (int warp = 1; warp < kSoftmaxThreads / 32; ++warp) x = Operation::of_pair(x, s_partial[warp]);
  }
  return x;
}

}  // namespace attention_ext
