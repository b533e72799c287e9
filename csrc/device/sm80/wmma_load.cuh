// wmma fragment loads from a 32-bit address in shared memory, so that they become ldmatrix (LDSM) instructions.
//
// nvcuda::wmma::load_matrix_sync takes a generic pointer: for bfloat16 nvcc 13.0 then emits 64 LD and 32 MOVM where 16 LDSM do,
// and for both types it converts the address anew at every load. This is the same wmma.load instruction with .shared spelled
// out. A 16x16 fragment takes eight 32-bit registers a lane for half, four for bfloat16.
#pragma once

#include <mma.h>

#include <cstdint>
#include <type_traits>

namespace attention_ext {

#define ATTENTION_EXT_WMMA_LOAD_HALF(USE, LAYOUT)                                                                             \
  asm volatile("wmma.load." USE ".sync.aligned." LAYOUT ".m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;\n" \
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])               \
               : "r"(s_tile), "n"(kPitch)                                                                                     \
               : "memory")
#define ATTENTION_EXT_WMMA_LOAD_BFLOAT16(USE, LAYOUT)                                                          \
  asm volatile("wmma.load." USE ".sync.aligned." LAYOUT ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;\n" \
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                \
               : "r"(s_tile), "n"(kPitch)                                                                      \
               : "memory")

// kPitch: elements from one row (column) of the tile to the next.
template <unsigned kPitch, class Use, class T, class Layout>
__device__ __forceinline__ void load_shared_fragment(nvcuda::wmma::fragment<Use, 16, 16, 16, T, Layout>& fragment,
                                                     uint32_t s_tile) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  constexpr bool kIsA = std::is_same_v<Use, nvcuda::wmma::matrix_a>;
  constexpr bool kIsRow = std::is_same_v<Layout, nvcuda::wmma::row_major>;
  static_assert(sizeof(fragment.x) == (kIsHalf ? 8 : 4) * sizeof(uint32_t), "what wmma.load m16n16k16 returns");
  uint32_t* r = reinterpret_cast<uint32_t*>(fragment.x);
  if constexpr (kIsHalf) {
    if constexpr (kIsA && kIsRow) ATTENTION_EXT_WMMA_LOAD_HALF("a", "row");
    if constexpr (kIsA && !kIsRow) ATTENTION_EXT_WMMA_LOAD_HALF("a", "col");
    if constexpr (!kIsA && kIsRow) ATTENTION_EXT_WMMA_LOAD_HALF("b", "row");
    if constexpr (!kIsA && !kIsRow) ATTENTION_EXT_WMMA_LOAD_HALF("b", "col");
  } else {
    if constexpr (kIsA && kIsRow) ATTENTION_EXT_WMMA_LOAD_BFLOAT16("a", "row");
    if constexpr (kIsA && !kIsRow) ATTENTION_EXT_WMMA_LOAD_BFLOAT16("a", "col");
    if constexpr (!kIsA && kIsRow) ATTENTION_EXT_WMMA_LOAD_BFLOAT16("b", "row");
    if constexpr (!kIsA && !kIsRow) ATTENTION_EXT_WMMA_LOAD_BFLOAT16("b", "col");
  }
}

#undef ATTENTION_EXT_WMMA_LOAD_HALF
#undef ATTENTION_EXT_WMMA_LOAD_BFLOAT16

}  // namespace attention_ext
