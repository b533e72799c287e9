// Rows of an operand of wgmma that TMA has brought and that are not to count.
#pragma once

#include "device/sm80/cp_async.cuh"
#include "device/sm90/warpgroup.cuh"

namespace attention_ext {

// Makes rows [begin, rows) zero in each of `boxes` adjacent boxes of `rows` rows of 128 bytes, before the warpgroup that calls this
// multiplies them; `barrier` is one of its own. Other warpgroups may do the same to the same boxes.
__device__ __forceinline__ void clear_rows(uint32_t s_boxes, int boxes, int rows, int begin, int barrier) {
#pragma unroll 1
  for (int box = 0; box < boxes; ++box) {
    // 16 bytes at a time, and whole rows, so that their swizzle does not matter.
#pragma unroll 1
    for (int chunk = begin * 8 + threadIdx.x % 128; chunk < rows * 8; chunk += 128) {
      store_shared_16(s_boxes + (box * rows * 8 + chunk) * 16, make_uint4(0, 0, 0, 0));
    }
  }
  fence_async_proxy();
  barrier_sync(barrier, 128);
}

}  // namespace attention_ext
