// Counters in global memory, by which CTAs of one grid tell each other what they have written or read.
#pragma once

#include <cstdint>

namespace attention_ext {

// Adds one. Writes of this thread, and those that it has waited for, are seen by who reads the count by read_acquired.
__device__ __forceinline__ void count_released(unsigned* g_counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;\n" ::"l"(g_counter) : "memory");
}
// Sets it, by the only thread that may do so at the time; seen as an addition is.
__device__ __forceinline__ void set_released(unsigned* g_counter, unsigned count) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;\n" ::"l"(g_counter), "r"(count) : "memory");
}
// Adds one, and says nothing of what was written.
__device__ __forceinline__ void count_relaxed(unsigned* g_counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;\n" ::"l"(g_counter) : "memory");
}

__device__ __forceinline__ unsigned read_acquired(const unsigned* g_counter) {
  unsigned count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(count) : "l"(g_counter) : "memory");
  return count;
}

// Between plain stores to global memory and reads of it by TMA: by who has written, before it counts, and by who is to read, after
// it has seen the count.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;\n" ::: "memory"); }

}  // namespace attention_ext
