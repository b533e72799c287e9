// Barriers in shared memory that count arrivals and bytes (mbarrier: sm_80, with bytes sm_90), one instruction per function.
#pragma once

#include <cstdint>

#include "device/sm80/cp_async.cuh"

namespace attention_ext {

// Phases count from 0; a wait names the parity of the phase whose end it waits for.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// By a thread for each slot of a ring: so many arrivals end a phase of its barrier.
template <int kSlots>
__device__ __forceinline__ void init_slots(uint64_t (&barriers)[kSlots], int arrivals) {
  if (threadIdx.x < kSlots) mbarrier_init(shared_address(&barriers[threadIdx.x]), arrivals);
}
// The same: `filled` arrivals end a phase of a slot's full barrier, `emptied` one of its empty barrier.
template <int kSlots>
__device__ __forceinline__ void init_ring(uint64_t (&full)[kSlots], uint64_t (&empty)[kSlots], int emptied, int filled = 1) {
  init_slots(full, filled);
  init_slots(empty, emptied);
}

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only after `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A ring's place: which slot comes next, and which time around.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace attention_ext
