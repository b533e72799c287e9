// The launch that the head-dim classes of the row kernels share, of a problem that their row of the table (plan/forward.cpp) does
// not refuse.
#pragma once

#include "attention/params.h"
#include "attention/sm90/rows/kernel.cuh"
#include "core/device_info.h"
#include "core/dispatch.h"
#include "core/launch.cuh"

namespace attention_ext {

// How many entries of the leading batch dim read the same matrices of the mask, where it has several.
inline int64_t sharers_of_mask(const ForwardParams& params) {
  bool several = false;
  for (int dim = 1; dim < params.batch.count; ++dim) several = several || params.mask.batch_stride[dim] != 0;
  return several && params.mask.batch_stride[0] == 0 ? params.batch.size[0] : 1;
}

inline int64_t elements_of_mask(const ForwardParams& params) {
  return mask_matrices(params) * (params.mask.row_stride != 0 ? params.L * params.S : params.S);
}

template <class Tile, RowsKind kKind>
cudaError_t launch_rows(const ForwardParams& params, const RowsWorkspace& plan, const RowsGrid& grid, int64_t sms,
                        cudaStream_t stream) {
  RowsMaps maps;
  cudaError_t status = make_group_maps(maps, params, Tile::kM, Tile::kN, Tile::kN);
  if constexpr (Tile::bias_ring(kKind)) {
    if (status == cudaSuccess) status = make_bias_map(maps.bias, params, Tile::kM);
  }
  if (status != cudaSuccess) return status;

  const int64_t heads = params.N / params.key.group;
  // Heads that are worked on together, no more than L2 keeps the keys and values of: of causal tiles the longest come first, but a
  // section lasts for some rounds over the SMs, as their loads only even out within one; and where leading batch dims share a mask
  // that heads do not share, L2 serves all but one reading of it.
  constexpr int64_t kSectionBytes = int64_t{32} << 20, kSectionRounds = 8, kElement = sizeof(typename Tile::T);
  const int64_t head_bytes = params.S * (params.E + params.Ev) * kElement;
  const int64_t fitting = std::max<int64_t>(kSectionBytes / head_bytes, 1);
  const int64_t sharers = kKind == kPlain || Tile::kSplits ? 1 : sharers_of_mask(params);
  const int64_t section = params.sequence.causal ? std::max(fitting, ceil_div(kSectionRounds * sms * heads, grid.tiles))
                                                 : std::min(fitting, sharers);
  const int tile_rows = rows_of_tile(Tile::kM, params.key.group);
  RowsOrder order = {static_cast<uint32_t>(grid.tiles),
                     tile_rows,
                     static_cast<uint32_t>(ceil_div(params.L * params.key.group, tile_rows)),
                     static_cast<int>(std::min(section, heads)),
                     static_cast<uint32_t>(sharers),
                     kKind == kBias && elements_of_mask(params) > kSectionBytes / kElement,
                     {}};

  RowsMarks marks = {};
  if constexpr (kKind != kPlain) {
    if (plan.mark_bytes > 0) {  // the plan may give none (plan/forward.cpp)
      status = launch_marks<typename Tile::T, Tile::kN>(params, static_cast<uint8_t*>(params.workspace) + plan.pieces.bytes(),
                                                        marks, stream);
      if (status != cudaSuccess) return status;
    }
  }

  const auto launch = [&](int64_t tiles) {
    order.tiles = static_cast<uint32_t>(tiles);
    LaunchShape shape = {std::min(tiles, sms), Tile::kThreads, sizeof(typename Tile::Shared)};
    // Of more than one wave later CTAs start late anyhow; but not behind the marks, which take a few microseconds.
    shape.early = tiles <= sms || marks.data != nullptr;
    return launch_kernel(rows_forward_kernel<Tile, kKind>, shape, stream, params, maps, marks, order);
  };
  if constexpr (!Tile::kSplits) return launch(grid.tiles);

  order.heads_of_section = 1;
  const float unit = kKind == kPlain ? static_cast<float>(params.scale) : 1.0f;
  return launch_in_pieces(params, plan.pieces, unit, stream, [&](const KeyPieces& pieces, int64_t groups) {
    order.pieces = pieces;
    return launch(grid.tiles / heads * groups);
  });
}

// Whether a bias is all there is, and all of it can be read in whole chunks of 16 bytes.
inline bool only_bias(const ForwardParams& params) {
  return params.mask_type == MaskType::kSameAsQuery && params.mask.vector && params.S % 8 == 0 &&
         params.dropout.seed == nullptr;
}

template <int kClass>
cudaError_t launch_rows_class(const ForwardParams& params, cudaStream_t stream) {
  const bool general = params.mask_type != MaskType::kNone || params.dropout.seed != nullptr ||
                       params.sequence.key_lengths != nullptr || !scales_exponents(static_cast<float>(params.scale));
  const int64_t sms = current_device_info().sms;
  const RowsWorkspace plan =
      rows_workspace_of({params.N, params.L, params.S, params.E, params.Ev, params.key.group,
                         params.mask_type != MaskType::kNone, params.mask.row_stride != 0, mask_matrices(params)},
                        params.workspace_bytes);
  const RowsGrid grid = rows_grid(kClass, general, params.N, params.key.group, params.L, plan.pieces.split.pieces, sms);
  return dispatch_half_type(params.type, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto tile) {
      using Tile = decltype(tile);
      if (!general) return launch_rows<Tile, kPlain>(params, plan, grid, sms, stream);
      if constexpr (!Tile::kSplits) {
        if (only_bias(params)) return launch_rows<Tile, kBias>(params, plan, grid, sms, stream);
      }
      return launch_rows<Tile, kGeneral>(params, plan, grid, sms, stream);
    };
    if (plan.pieces.split.pieces > 1) return launch(RowsTile<T, kClass, kSplitRows>());
    if constexpr (kClass == 64) {
      if (grid.rows == 192) return launch_rows<RowsTile<T, kClass, 192>, kPlain>(params, plan, grid, sms, stream);
    }
    return launch(RowsTile<T, kClass, 128>());
  });
}

}  // namespace attention_ext
