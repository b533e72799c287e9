// wmma fragment loads that are known to read shared memory, so that they become ldmatrix (LDSM) instructions.
#pragma once

#include <mma.h>

#include <cstdint>
#include <type_traits>

namespace attention_ext {

// half: nvcc sees through the pointer by itself.
template <class Use, class Layout>
__device__ __forceinline__ void load_shared_fragment(nvcuda::wmma::fragment<Use, 16, 16, 16, __half, Layout>& fragment,
                                                     const __half* s_tile, unsigned pitch) {
  nvcuda::wmma::load_matrix_sync(fragment, s_tile, pitch);
}

// bfloat16: load_matrix_sync of CUDA 13.0 keeps a generic address, which costs 64 LD and 32 MOVM where 16 LDSM do. The
// same wmma.load instruction with .shared spelled out: 16x16 elements, four 32-bit registers a lane.
template <class Use, class Layout>
__device__ __forceinline__ void load_shared_fragment(nvcuda::wmma::fragment<Use, 16, 16, 16, __nv_bfloat16, Layout>& fragment,
                                                     const __nv_bfloat16* s_tile, unsigned pitch) {
  static_assert(sizeof(fragment.x) == 4 * sizeof(uint32_t), "wmma.load of bf16 m16n16k16 returns four registers");
  uint32_t* r = reinterpret_cast<uint32_t*>(fragment.x);
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(s_tile));
  constexpr bool kIsA = std::is_same_v<Use, nvcuda::wmma::matrix_a>;
  constexpr bool kIsRow = std::is_same_v<Layout, nvcuda::wmma::row_major>;
  if constexpr (kIsA && kIsRow) {
    asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address), "r"(pitch)
                 : "memory");
  } else if constexpr (kIsA) {
    asm volatile("wmma.load.a.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address), "r"(pitch)
                 : "memory");
  } else if constexpr (kIsRow) {
    asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address), "r"(pitch)
                 : "memory");
  } else {
    asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address), "r"(pitch)
                 : "memory");
  }
}

}  // namespace attention_ext
