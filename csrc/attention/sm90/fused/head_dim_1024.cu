// The fused forward for head dims up to 1024, any Ev: a CTA takes all columns of values in passes, or the CTAs that share those of
// a tile of rows each compute its scores.
#include "attention/sm90/fused/fused.h"
#include "attention/sm90/fused/launch.cuh"
#include "core/dispatch.h"

namespace attention_ext {
namespace {

template <class T>
cudaError_t launch_typed(const ForwardParams& params, cudaStream_t stream) {
  return fused_class_1024(params.E) == 768 ? launch_class<T, 768>(params, stream) : launch_class<T, 1024>(params, stream);
}

}  // namespace

cudaError_t fused_forward_1024(const ForwardParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
