// Copies from global to shared memory (cp.async: sm_80 and newer) and shared addresses, one instruction per function.
#pragma once

#include <cstdint>

namespace attention_ext {

// The 32-bit address in shared memory of a generic pointer into it. Volatile: once computed it stays in a register, where the
// compiler would rather compute it anew for each use.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  uint32_t address;
  asm volatile("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }\n" : "=r"(address) : "l"(pointer));
  return address;
}

// The way back, for ordinary reads.
__device__ __forceinline__ const void* shared_pointer(uint32_t address) { return __cvta_shared_to_generic(address); }

// pointer + elements, as one addition: in an unrolled loop the compiler would multiply the step by each constant instead.
template <class T>
__device__ __forceinline__ const T* step_pointer(const T* pointer, int64_t elements) {
  const T* next;
  asm volatile("add.s64 %0, %1, %2;\n" : "=l"(next) : "l"(pointer), "l"(elements * static_cast<int64_t>(sizeof(T))));
  return next;
}

__device__ __forceinline__ void store_shared_16(uint32_t s_dst, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(s_dst), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Copies 16 bytes. Both addresses are 16-byte aligned. Through L1 (.ca): where a padded row puts the two halves of a 32-byte
// sector into different sectors of shared memory, .cg fetches the sector twice (measured: 1.5 times the traffic from L2).
__device__ __forceinline__ void cp_async_16(uint32_t s_dst, const void* g_src) {
  asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], 16;\n" ::"r"(s_dst), "l"(g_src) : "memory");
}

// Copies kBytes, 4 or 8, which both addresses are multiples of.
template <int kBytes>
__device__ __forceinline__ void cp_async_few(uint32_t s_dst, const void* g_src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(s_dst), "l"(g_src), "n"(kBytes) : "memory");
}

// Copies the first `bytes` (0 .. 16) of 16 and fills the rest with zeros; reads nothing past `bytes`.
__device__ __forceinline__ void cp_async_16_zero_filled(uint32_t s_dst, const void* g_src, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;\n" ::"r"(s_dst), "l"(g_src), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace attention_ext
