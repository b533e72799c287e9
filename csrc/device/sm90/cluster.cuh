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

// What this CTA has at s_address: its address in the CTA of another rank, or of this one, for the functions below.
__device__ __forceinline__ uint32_t address_in_cluster(uint32_t s_address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(s_address), "r"(rank));
  return there;
}

// Arrives at a barrier of any CTA. Orders nothing but what a barrier of this CTA orders: to ask for more costs a fence.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t c_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(c_barrier) : "memory");
}

// Writes a word, whose four bytes the barrier of the same CTA counts: who has waited for it sees the word.
__device__ __forceinline__ void store_in_cluster(uint32_t c_word, uint32_t word, uint32_t c_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];\n" ::"r"(c_word), "r"(word),
               "r"(c_barrier)
               : "memory");
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
