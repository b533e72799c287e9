// The fused forward for Hopper, by class of head dims: launchers.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace attention_ext {

// Forward for Hopper (sm90/). `takes` says whether one can run a problem on such a card: half types, no empty dim, operands that the
// TMA takes; E and Ev up to 512, or E up to 1024. No workspace.
bool fused_forward_512_takes(const ForwardParams& params);
bool fused_forward_1024_takes(const ForwardParams& params);
cudaError_t fused_forward_512(const ForwardParams& params, cudaStream_t stream);
cudaError_t fused_forward_1024(const ForwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
