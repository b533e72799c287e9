// What the CTAs of a cluster do among themselves (sm_90), one instruction per function.
#pragma once

#include <cstdint>

namespace attention_ext {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// All threads of all CTAs; what they wrote to shared memory before is visible after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
}

// The word at this CTA's shared address s_word in the CTA of another rank.
__device__ __forceinline__ uint32_t load_of_cluster(uint32_t s_word, uint32_t rank) {
  uint32_t word;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.u32 %0, [there];\n}\n"
               : "=r"(word)
               : "r"(s_word), "r"(rank)
               : "memory");
  return word;
}

}  // namespace attention_ext
