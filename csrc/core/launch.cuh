// Launches: over more than one grid holds, as many as the limit asks for (one, in all but absurd cases); and with what a plain
// launch has no word for.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/arithmetic.h"
#include "core/shared_memory.h"

namespace attention_ext {

constexpr int64_t kMaxCtas = 0x7fffffff;  // of a one-dimensional grid

// Calls launch(first, count) for parts of `total`, one after another, of at most `most`.
template <class Launch>
cudaError_t launch_parts(int64_t total, int64_t most, const Launch& launch) {
  for (int64_t first = 0; first < total; first += most) {
    launch(first, std::min(total - first, most));
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// kernel(arguments..., first row) for `rows` rows, of which a CTA takes rows_per_cta.
template <class... Parameters, class... Arguments>
cudaError_t launch_rows(void (*kernel)(Parameters...), int threads, int64_t rows, int rows_per_cta, cudaStream_t stream,
                        const Arguments&... arguments) {
  return launch_parts(rows, kMaxCtas * rows_per_cta, [&](int64_t first, int64_t count) {
    kernel<<<static_cast<unsigned>(ceil_div(count, rows_per_cta)), threads, 0, stream>>>(arguments..., first);
  });
}

// How a kernel is launched.
struct LaunchShape {
  int64_t ctas;
  int threads;
  size_t shared_bytes = 0;  // dynamic
  int cluster = 1;          // CTAs of a cluster; more than one: sm_90
  // Its CTAs may start while the kernel before them in the stream still runs, as that one allows by launch_dependents
  // (device/sm90/dependent_launch.cuh): the kernel itself waits for it. sm_90.
  bool early = false;
};

// kernel(arguments...), whatever shared memory it asks for.
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                          const Arguments&... arguments) {
  if (shape.ctas == 0) return cudaSuccess;
  const int shared_bytes = static_cast<int>(shape.shared_bytes);
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status = allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.ctas));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace attention_ext
