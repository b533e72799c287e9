// The launch that the head-dim classes of the fused forward share, of a problem that their rows of the table (plan/forward.cpp) do
// not refuse.
#pragma once

#include "attention/params.h"
#include "attention/sm90/fused/kernel.cuh"
#include "core/device_info.h"
#include "core/launch.cuh"
#include "plan/sm90_fused.h"

namespace attention_ext {

template <class Tile, bool kGeneral>
cudaError_t launch(const ForwardParams& params, const PiecesWorkspace& plan, cudaStream_t stream) {
  GroupMaps maps;
  const cudaError_t status = make_group_maps(maps, params, Tile::kM, Tile::kN, Tile::kValueKeys);
  if (status != cudaSuccess) return status;
  const int64_t sms = current_device_info().sms;
  const FusedGrid grid = fused_grid(Tile::kClass, params.N, params.key.group, params.L, params.S, params.Ev,
                                    params.sequence.causal, kGeneral, plan.split.pieces, sms);
  FusedOrder order = {0, grid.columns, {}};
  const auto launch_tiles = [&](int64_t tiles) {
    order.tiles = static_cast<uint32_t>(tiles);
    LaunchShape shape = {grid.ctas_of(tiles, sms), Tile::kThreads, sizeof(typename Tile::Shared)};
    shape.early = shape.ctas <= sms;  // of more than one wave later CTAs start late anyhow
    return launch_kernel(fused_forward_kernel<Tile, kGeneral>, shape, stream, params, maps, order);
  };
  if constexpr (!Tile::kSplits) return launch_tiles(grid.tiles);

  const int64_t tiles_of_group = grid.tiles / (params.N / params.key.group);
  const float unit = kGeneral ? 1.0f : static_cast<float>(params.scale);
  return launch_in_pieces(params, plan, unit, stream, [&](const KeyPieces& pieces, int64_t groups) {
    order.pieces = pieces;
    return launch_tiles(tiles_of_group * groups);
  });
}

template <class T, int kClass>
cudaError_t launch_class(const ForwardParams& params, cudaStream_t stream) {
  const bool general = params.mask_type != MaskType::kNone || params.dropout.seed != nullptr ||
                       params.sequence.key_lengths != nullptr || !scales_exponents(static_cast<float>(params.scale));
  const PiecesWorkspace plan =
      fused_workspace(params.N, params.L, params.S, params.Ev, params.key.group, params.workspace_bytes);
  const auto launch_tile = [&](auto tile) {
    using Tile = decltype(tile);
    return general ? launch<Tile, true>(params, plan, stream) : launch<Tile, false>(params, plan, stream);
  };
  return plan.split.pieces > 1 ? launch_tile(FusedTile<T, kClass, true>()) : launch_tile(FusedTile<T, kClass, false>());
}

}  // namespace attention_ext
