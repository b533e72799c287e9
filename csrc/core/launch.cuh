// Launches: over more than one grid holds, as many as the limit asks for (one, in all but absurd cases); and such that begin while
// the kernel before them ends.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/arithmetic.h"

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

// kernel(arguments...) by CTAs that may start while the kernel before them in the stream still runs, as it allows by
// launch_dependents (device/sm90/dependent_launch.cuh): the kernel itself waits for it. cluster: CTAs of a cluster. sm_90.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), int64_t ctas, int cluster, int threads, int shared_bytes,
                         cudaStream_t stream, const Arguments&... arguments) {
  if (ctas == 0) return cudaSuccess;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace attention_ext
