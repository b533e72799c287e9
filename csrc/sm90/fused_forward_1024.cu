// The fused forward for head dims up to 1024: the CTAs that share the columns of values of a tile of rows each compute its scores.
#include "fused_launch.cuh"

namespace attention_ext {

bool fused_forward_1024_takes(const ForwardParams& params) { return fused_forward_takes(params, 1024); }

cudaError_t fused_forward_1024(const ForwardParams& params, cudaStream_t stream) {
  if (!fused_forward_1024_takes(params)) return cudaErrorInvalidValue;
  return params.type == DataType::kHalf ? launch_class<__half, 1024>(params, stream)
                                        : launch_class<__nv_bfloat16, 1024>(params, stream);
}

}  // namespace attention_ext
