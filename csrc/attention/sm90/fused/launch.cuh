// What the head-dim classes of the fused forward share: which problems they take, and the launch.
#pragma once

#include "attention/params.h"
#include "attention/sm90/fused/kernel.cuh"
#include "core/arithmetic.h"
#include "core/tensor_map.h"
#include "gemm/sm80/tile.cuh"

namespace attention_ext {

inline int64_t fused_tiles(const ForwardParams& params, int64_t share_columns) {
  return params.N / params.key.group * ceil_div(params.L * params.key.group, fused_tile_rows(params.key.group)) *
         ceil_div(params.Ev, share_columns);
}

// Half types, no empty dim, E up to `E_limit`, operands that TMA takes, key and value with the same heads, groups of up to
// 64 query heads.
inline bool fused_forward_takes(const ForwardParams& params, int64_t E_limit) {
  const bool half_type = params.type == DataType::kHalf || params.type == DataType::kBFloat16;
  const bool not_empty = params.N > 0 && params.L > 0 && params.S > 0 && params.E > 0 && params.Ev > 0;
  const int group = params.key.group;
  const bool groups = group == params.value.group && group <= kFusedRows &&
                      (group == 1 || (params.batch.count <= 2 && params.query.batch_stride[params.batch.count - 1] > 0));
  return half_type && not_empty && params.S <= kMostWgmmaKeys && params.E <= E_limit && groups &&
         params.L * group < (int64_t{1} << 31) - 1024 && params.N < int64_t{1} << 31 &&
         fused_tiles(params, 128) < int64_t{1} << 31 && tensor_map_takes(params.batch, params.query, params.L) &&
         tensor_map_takes(params.batch, params.key, params.S) && tensor_map_takes(params.batch, params.value, params.S);
}

// CTAs that stay and take tile after tile overlap the end of one with the loads of the next; where tiles are long and differ, in causal
// attention, one CTA a tile spreads them better.
constexpr int64_t kShortKeys = 1024;

template <class Tile, bool kGeneral>
cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
  FusedMaps maps;
  const int group = params.key.group;
  cudaError_t status =
      group == 1
          ? make_tensor_map(maps.query, params.type, params.batch, params.query, params.L, params.E, Tile::kM)
          : make_group_map(maps.query, params.type, params.batch, params.query, group, params.L, params.E, Tile::kM / group);
  if (status != cudaSuccess) return status;
  status = make_tensor_map(maps.key, params.type, params.batch, params.key, params.S, params.E, Tile::kN);
  if (status != cudaSuccess) return status;
  status = make_tensor_map(maps.value, params.type, params.batch, params.value, params.S, params.Ev, Tile::kValueKeys);
  if (status != cudaSuccess) return status;
  auto* kernel = fused_forward_kernel<Tile, kGeneral>;
  constexpr int kSharedBytes = static_cast<int>(sizeof(typename Tile::Shared));
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status != cudaSuccess) return status;
  int device = 0, sms = 0;
  status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  int columns = Tile::kShareColumns;
  if (Tile::kPasses && params.S <= 2 * Tile::kN && params.Ev <= kAllColumns && fused_tiles(params, columns) > sms) {
    columns = kAllColumns;
  }
  const int64_t tiles = fused_tiles(params, columns);
  const bool ctas_stay = !kGeneral && (!params.sequence.causal || params.S <= kShortKeys);
  const int64_t ctas = ctas_stay && tiles > sms ? sms : tiles;

  // In one wave: start while the kernel before still runs; the kernel waits for it (wait_for_prerequisites). In more, later CTAs
  // start late anyhow.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = ctas <= sms ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, params, maps, static_cast<uint32_t>(tiles), columns);
  return cudaGetLastError();
}

template <class T, int kClass>
cudaError_t launch_class(const ForwardParams& params, cudaStream_t stream) {
  const float scale = static_cast<float>(params.scale);
  const bool general = params.mask_type != MaskType::kNone || params.dropout.seed != nullptr ||
                       params.sequence.key_lengths != nullptr || !scales_exponents(scale);
  return general ? launch<FusedTile<T, kClass>, true>(params, stream) : launch<FusedTile<T, kClass>, false>(params, stream);
}

}  // namespace attention_ext
