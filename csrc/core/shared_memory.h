// More than 48 KB of dynamic shared memory for a kernel.
#pragma once

#include <cuda_runtime_api.h>

namespace attention_ext {

// Allows it on the current device; the same bytes at every launch of a kernel, or of one thread also fewer. A thread asks the
// runtime once for each of the latest kernels, and where one wants more: that takes a few hundred nanoseconds.
cudaError_t allow_shared_memory(const void* kernel, int bytes);

}  // namespace attention_ext
