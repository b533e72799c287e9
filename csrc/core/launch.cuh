// Launches over more than one grid holds: as many as the limit asks for (one, in all but absurd cases).
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

}  // namespace attention_ext
