// A read asked for ahead, which takes no register.
#pragma once

namespace attention_ext {

// Asks for the sector of 32 bytes to be in L2.
__device__ __forceinline__ void prefetch_sector(const void* g_src) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(g_src)); }

}  // namespace attention_ext
