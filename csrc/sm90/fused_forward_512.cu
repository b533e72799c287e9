// The fused forward for head dims up to 512: which tile a problem gets, and its launch.
#include "fused_forward.cuh"
#include "tensor_map.h"

namespace attention_ext {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t fused_tiles(const ForwardParams& params, int64_t share_columns) {
  return params.N / params.key.group * ceil_div(params.L * params.key.group, kFusedRows) * ceil_div(params.Ev, share_columns);
}

// CTAs that stay and take tile after tile overlap the end of one with the loads of the next; where tiles are long and differ, in causal
// attention, one CTA a tile spreads them better.
constexpr int64_t kShortKeys = 1024;

template <class Tile, bool kGeneral>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  FusedMaps maps;
  cudaError_t status = make_tensor_map(maps.key, params.type, params.batch, params.key, params.S, params.E, Tile::kN);
  if (status != cudaSuccess) return status;
  status = make_tensor_map(maps.value, params.type, params.batch, params.value, params.S, params.Ev, Tile::kValueKeys);
  if (status != cudaSuccess) return status;
  auto* kernel = fused_forward_kernel<Tile, kGeneral>;
  constexpr int kSharedBytes = static_cast<int>(sizeof(typename Tile::Shared));
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  const int64_t tiles = fused_tiles(params, Tile::kShareColumns);
  int64_t ctas = tiles;
  if (!kGeneral && (!params.causal || params.S <= kShortKeys)) {
    int device = 0, processors = 0;
    status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    ctas = tiles < processors ? tiles : processors;
  }
  kernel<<<static_cast<unsigned>(ctas), Tile::kThreads, kSharedBytes, stream>>>(params, maps, static_cast<uint32_t>(tiles));
  return cudaGetLastError();
}

template <class T, int kClass>
cudaError_t launch_class(const ForwardParams& params, cudaStream_t stream) {
  // The short way of scaling wants a positive scale that keeps its factor log2(e) from overflowing.
  const bool general =
      params.mask_type != MaskType::kNone || params.dropout.seed != nullptr || !(params.scale > 0.0 && params.scale < 1e30);
  return general ? launch<FusedTile<T, kClass>, true>(params, stream) : launch<FusedTile<T, kClass>, false>(params, stream);
}

template <class T>
cudaError_t launch_typed(const ForwardParams& params, cudaStream_t stream) {
  const int64_t width = params.E > params.Ev ? params.E : params.Ev;
  if (width <= 128) return launch_class<T, 128>(params, stream);
  if (width <= 256) return launch_class<T, 256>(params, stream);
  if (width <= 384) return launch_class<T, 384>(params, stream);
  return launch_class<T, 512>(params, stream);
}

}  // namespace

bool fused_forward_512_takes(const ForwardParams& params) {
  const bool half_type = params.type == DataType::kHalf || params.type == DataType::kBFloat16;
  const bool not_empty = params.N > 0 && params.L > 0 && params.S > 0 && params.E > 0 && params.Ev > 0;
  return half_type && not_empty && params.E <= 512 && params.Ev <= 512 && params.query.vector &&
         params.key.group == params.value.group && params.L * params.key.group < (int64_t{1} << 31) - 1024 &&
         params.N < int64_t{1} << 31 && fused_tiles(params, 128) < int64_t{1} << 31 &&
         tensor_map_takes(params.batch, params.key, params.S) && tensor_map_takes(params.batch, params.value, params.S);
}

cudaError_t fused_forward_512(const ForwardParams& params, cudaStream_t stream) {
  if (!fused_forward_512_takes(params)) return cudaErrorInvalidValue;
  switch (params.type) {
    case DataType::kHalf: return launch_typed<__half>(params, stream);
    case DataType::kBFloat16: return launch_typed<__nv_bfloat16>(params, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace attention_ext
