// The launch that the head-dim classes of the row kernels share, of a problem that their row of the table (plan/forward.cpp) does
// not refuse.
#pragma once

#include "attention/params.h"
#include "attention/sm90/rows/kernel.cuh"
#include "core/device_info.h"
#include "core/dispatch.h"
#include "core/launch.cuh"

namespace attention_ext {

template <class Tile, bool kGeneral>
cudaError_t launch_rows(const ForwardParams& params, const RowsWorkspace& plan, const RowsGrid& grid, int64_t sms,
                        cudaStream_t stream) {
  GroupMaps maps;
  cudaError_t status = make_group_maps(maps, params, Tile::kM, Tile::kN, Tile::kN);
  if (status != cudaSuccess) return status;

  const int64_t heads = params.N / params.key.group;
  // Causal tiles come longest first, of as many heads together as L2 keeps the keys and values of; but a section lasts for some
  // rounds over the SMs, as their loads only even out within one.
  constexpr int64_t kSectionBytes = int64_t{32} << 20, kSectionRounds = 8;
  const int64_t head_bytes = params.S * (params.E + params.Ev) * static_cast<int64_t>(sizeof(typename Tile::T));
  const int64_t section = std::max(kSectionBytes / head_bytes, ceil_div(kSectionRounds * sms * heads, grid.tiles));
  RowsOrder order = {
      static_cast<uint32_t>(grid.tiles), params.sequence.causal ? static_cast<int>(std::min(section, heads)) : 1, {}};

  RowsMarks marks = {};
  if constexpr (kGeneral) {
    if (plan.mark_bytes > 0) {  // the plan may give none (plan/forward.cpp)
      status = launch_marks<typename Tile::T, Tile::kN>(params, static_cast<uint8_t*>(params.workspace) + plan.pieces.bytes(),
                                                        marks, stream);
      if (status != cudaSuccess) return status;
    }
  }

  const auto launch = [&](int64_t tiles) {
    order.tiles = static_cast<uint32_t>(tiles);
    LaunchShape shape = {std::min(tiles, sms), Tile::kThreads, sizeof(typename Tile::Shared)};
    shape.early = tiles <= sms;  // of more than one wave later CTAs start late anyhow
    return launch_kernel(rows_forward_kernel<Tile, kGeneral>, shape, stream, params, maps, marks, order);
  };
  if constexpr (!Tile::kSplits) return launch(grid.tiles);

  order.heads_of_section = 1;
  const float unit = kGeneral ? 1.0f : static_cast<float>(params.scale);
  return launch_in_pieces(params, plan.pieces, unit, stream, [&](const KeyPieces& pieces, int64_t groups) {
    order.pieces = pieces;
    return launch(grid.tiles / heads * groups);
  });
}

template <int kClass>
cudaError_t launch_rows_class(const ForwardParams& params, cudaStream_t stream) {
  const bool general = params.mask_type != MaskType::kNone || params.dropout.seed != nullptr ||
                       params.sequence.key_lengths != nullptr || !scales_exponents(static_cast<float>(params.scale));
  const int64_t sms = current_device_info().sms;
  int64_t mask_matrices = 1;
  for (int dim = 0; dim < params.batch.count; ++dim) {
    if (params.mask.batch_stride[dim] != 0) mask_matrices *= params.batch.size[dim];
  }
  const RowsWorkspace plan =
      rows_workspace_of({params.N, params.L, params.S, params.E, params.Ev, params.key.group,
                         params.mask_type != MaskType::kNone, params.mask.row_stride != 0, mask_matrices},
                        params.workspace_bytes);
  const RowsGrid grid = rows_grid(kClass, general, params.N, params.key.group, params.L, plan.pieces.split.pieces, sms);
  return dispatch_half_type(params.type, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto tile) {
      using Tile = decltype(tile);
      return general ? launch_rows<Tile, true>(params, plan, grid, sms, stream)
                     : launch_rows<Tile, false>(params, plan, grid, sms, stream);
    };
    if (plan.pieces.split.pieces > 1) return launch(RowsTile<T, kClass, kSplitRows>());
    if constexpr (kClass == 64) {
      if (grid.rows == 192) return launch_rows<RowsTile<T, kClass, 192>, false>(params, plan, grid, sms, stream);
    }
    return launch(RowsTile<T, kClass, 128>());
  });
}

}  // namespace attention_ext
