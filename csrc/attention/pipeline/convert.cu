// Backward: the mask's gradient from the accumulator type into the mask's dtype.
//
// Elementwise over dense memory; both arrays have the same layout. Grid: one thread per element, in strides of the
// grid. No shared memory.
#include "attention/pipeline/params.h"
#include "core/arithmetic.h"
#include "core/device_info.h"
#include "core/dispatch.h"
#include "device/common/types.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256;

template <class Out, class In>
__global__ void __launch_bounds__(kCtaThreads) convert_kernel(const In* g_in, Out* g_out, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kCtaThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCtaThreads + threadIdx.x; i < count; i += step) {
    g_out[i] = from_accumulator<Out>(static_cast<Accumulator<Out>>(g_in[i]));
  }
}

}  // namespace

cudaError_t launch_convert(const void* accumulated, void* out, int64_t count, DataType type, DataType out_type,
                           cudaStream_t stream) {
  const int64_t most = 16 * current_device_info().sms;  // fills the card; more would only wait
  const int64_t blocks = std::min(ceil_div(count, kCtaThreads), most);
  if (blocks == 0) return cudaSuccess;
  const auto launch = [&](auto from, auto to) {
    convert_kernel<<<static_cast<unsigned>(blocks), kCtaThreads, 0, stream>>>(static_cast<const decltype(from)*>(accumulated),
                                                                              static_cast<decltype(to)*>(out), count);
    return cudaGetLastError();
  };
  if (type == DataType::kDouble) {
    return dispatch_among<float>(out_type, [&](auto element) { return launch(double(), element); });
  }
  return dispatch_half_type(out_type, [&](auto element) { return launch(float(), element); });
}

}  // namespace attention_ext
