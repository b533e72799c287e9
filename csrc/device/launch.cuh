// Kernels of one stream that overlap: on sm_90 a kernel may begin before the one in front of it has ended, up to where it waits.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace attention_ext {

// From here on the kernel behind this one may begin, once all CTAs have come here. Nothing where kernels do not overlap.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// The kernel in front of this one, and all before it that did the same, have ended; what they wrote is visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

template <class... Parameters, class... Arguments>
cudaError_t launch_in_order(void (*kernel)(Parameters...), unsigned grid, int threads, size_t shared_bytes, cudaStream_t stream,
                            Arguments... arguments) {
  kernel<<<grid, threads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

// Begins as early as the kernel in front allows; the kernel must wait_for_previous_kernel before it reads or writes memory.
template <class... Parameters, class... Arguments>
cudaError_t launch_overlapping(void (*kernel)(Parameters...), unsigned grid, int threads, size_t shared_bytes,
                               cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace attention_ext
