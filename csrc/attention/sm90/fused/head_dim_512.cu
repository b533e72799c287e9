// The fused forward for head dims up to 512: which tile a problem gets.
#include "attention/sm90/fused/fused.h"
#include "attention/sm90/fused/launch.cuh"
#include "core/dispatch.h"

namespace attention_ext {
namespace {

template <class T>
cudaError_t launch_typed(const ForwardParams& params, cudaStream_t stream) {
  const int64_t width = params.E > params.Ev ? params.E : params.Ev;
  if (width <= 128) return launch_class<T, 128>(params, stream);
  if (width <= 256) return launch_class<T, 256>(params, stream);
  if (width <= 384) return launch_class<T, 384>(params, stream);
  return launch_class<T, 512>(params, stream);
}

}  // namespace

bool fused_forward_512_takes(const ForwardParams& params) { return fused_forward_takes(params, 512) && params.Ev <= 512; }

cudaError_t fused_forward_512(const ForwardParams& params, cudaStream_t stream) {
  if (!fused_forward_512_takes(params)) return cudaErrorInvalidValue;
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
