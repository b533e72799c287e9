// The fused forward for Hopper, by class of head dims: launchers.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace attention_ext {

// E and Ev up to 512; E up to 1024. Of a problem that the kernel's row of the table (plan/forward.cpp) does not refuse.
cudaError_t fused_forward_512(const ForwardParams& params, cudaStream_t stream);
cudaError_t fused_forward_1024(const ForwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
