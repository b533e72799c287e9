// What warpgroups of one CTA do among themselves: registers moved between them, barriers of some warps, proxies. sm_90a.
#pragma once

#include <cstdint>

namespace attention_ext {

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// True in one thread of a whole warp. The compiler knows that it is one, and issues that thread's copies without a loop over
// threads.
__device__ __forceinline__ bool elect_thread() {
  uint32_t elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}\n" : "=r"(elected));
  return elected != 0;
}

// Barrier number `barrier` (1 to 15) among `threads` threads. Not bar.sync, the aligned form: warps of different roles meet here
// from different places of the code.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives at it without waiting; counts among its threads.
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// Keeps the compiler from moving reads of memory across, and so from holding many results in registers.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// The value, of which the compiler forgets what it knows: what follows from it is computed again rather than held in registers.
__device__ __forceinline__ uint32_t forget(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// gridDim.x, read anew: no register holds it from one use to the next.
__device__ __forceinline__ unsigned ctas_of_grid() {
  unsigned ctas;
  asm volatile("mov.u32 %0, %%nctaid.x;\n" : "=r"(ctas));
  return ctas;
}

// Of the object as well: what is computed from it alone is not held from one use of this to the next.
template <class Object>
__device__ __forceinline__ const Object& forget_object(const Object& object) {
  const Object* pointer = &object;
  asm volatile("" : "+l"(pointer));
  return *pointer;
}

// Makes this thread's writes to shared memory visible to wgmma and TMA, and puts what TMA writes later after this thread's reads.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit elements: register i holds this lane's two elements (row lane / 4, columns lane % 4 * 2) of
// matrix i; lane 8 i + r gives the address of row r of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t s_row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(s_row), "r"(m0), "r"(m1), "r"(m2),
               "r"(m3)
               : "memory");
}

// The way back.
__device__ __forceinline__ void load_matrices(uint32_t s_row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(s_row)
               : "memory");
}

}  // namespace attention_ext
