// A product of a warpgroup on Tensor Cores with n of 32 and A from registers; as wgmma_from_registers (wgmma.cuh).
#pragma once

#include "device/sm90/wgmma.cuh"

namespace attention_ext {

// B's n runs along the first 64 bytes of rows of 128.
__device__ __forceinline__ void wgmma_half_from_registers(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool fresh) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.eq.u32 add, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add, 1, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<uint32_t>(fresh)));
}
__device__ __forceinline__ void wgmma_half_from_registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool fresh) {
  wgmma_from_registers<__half>(d, a, b, fresh);
}

}  // namespace attention_ext
