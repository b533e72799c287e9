// Backward: the mask's gradient from the accumulator type into the mask's dtype.
//
// Elementwise over dense memory; both arrays have the same layout. Grid: one thread per element, in strides of the
// grid. No shared memory.
#include "attention/pipeline/params.h"
#include "core/arithmetic.h"
#include "core/device_info.h"
#include "device/common/types.cuh"
#include "gemm/sm80/tile.cuh"

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

template <class Out, class In>
cudaError_t launch_typed(const void* in, void* out, int64_t count, cudaStream_t stream) {
  const int64_t most = 16 * current_device_info().sms;  // fills the card; more would only wait
  const int64_t blocks = ceil_div(count, kCtaThreads);
  if (blocks == 0) return cudaSuccess;
  convert_kernel<Out, In><<<static_cast<unsigned>(blocks < most ? blocks : most), kCtaThreads, 0, stream>>>(
      static_cast<const In*>(in), static_cast<Out*>(out), count);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_convert(const void* accumulated, void* out, int64_t count, DataType type, DataType out_type,
                           cudaStream_t stream) {
  if (type == DataType::kDouble) {
    return out_type == DataType::kFloat ? launch_typed<float, double>(accumulated, out, count, stream) : cudaErrorInvalidValue;
  }
  switch (out_type) {
    case DataType::kHalf: return launch_typed<__half, float>(accumulated, out, count, stream);
    case DataType::kBFloat16: return launch_typed<__nv_bfloat16, float>(accumulated, out, count, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace attention_ext
