// The row kernels for Hopper, by class of head dims (plan/sm90_rows.h): launchers.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace attention_ext {

// E and Ev up to 256. Of a problem that the kernel's row of the table (plan/forward.cpp) does not refuse.
cudaError_t rows_forward(const ForwardParams& params, cudaStream_t stream);

cudaError_t rows_forward_64(const ForwardParams& params, cudaStream_t stream);
cudaError_t rows_forward_128(const ForwardParams& params, cudaStream_t stream);
cudaError_t rows_forward_160(const ForwardParams& params, cudaStream_t stream);
cudaError_t rows_forward_192(const ForwardParams& params, cudaStream_t stream);
cudaError_t rows_forward_256(const ForwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
