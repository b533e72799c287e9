// Asynchronous copies from global to shared memory (sm_80 and newer), one instruction per function.
#pragma once

#include <cstdint>

namespace attention_ext {

// Copies 16 bytes. Both addresses are 16-byte aligned. Through L1 (.ca): where a padded row puts the two halves of a 32-byte
// sector into different sectors of shared memory, .cg fetches the sector twice (measured: 1.5 times the traffic from L2).
__device__ __forceinline__ void cp_async_16(void* s_dst, const void* g_src) {
  const uint32_t dst = static_cast<uint32_t>(__cvta_generic_to_shared(s_dst));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;\n" ::"r"(dst), "l"(g_src) : "memory");
}

// Copies the first `bytes` (0 .. 16) of 16 and fills the rest with zeros; reads nothing past `bytes`.
__device__ __forceinline__ void cp_async_16_zero_filled(void* s_dst, const void* g_src, int bytes) {
  const uint32_t dst = static_cast<uint32_t>(__cvta_generic_to_shared(s_dst));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(g_src), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace attention_ext
