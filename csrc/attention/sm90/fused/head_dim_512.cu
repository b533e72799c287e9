// The fused forward for head dims up to 512: which tile a problem gets.
#include "attention/sm90/fused/fused.h"
#include "attention/sm90/fused/launch.cuh"
#include "core/dispatch.h"

namespace attention_ext {
namespace {

template <class T>
cudaError_t launch_typed(const ForwardParams& params, cudaStream_t stream) {
  switch (fused_class_512(std::max(params.E, params.Ev))) {
    case 384: return launch_class<T, 384>(params, stream);
    case 512: return launch_class<T, 512>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t fused_forward_512(const ForwardParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
