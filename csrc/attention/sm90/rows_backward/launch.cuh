// The launches that the head-dim classes of the row kernels' backward share.
#pragma once

#include "attention/pipeline/stage.h"
#include "attention/sm90/rows_backward/column_kernel.cuh"
#include "attention/sm90/rows_backward/mask_tiles.h"
#include "attention/sm90/rows_backward/row_kernel.cuh"
#include "core/device_info.h"
#include "core/shared_memory.h"
#include "core/tensor_map.h"

namespace attention_ext {

// query_rows, key_rows: of the boxes of each pair of operands.
inline cudaError_t make_maps(RowsBackwardMaps& maps, const RowsBackwardParams& p, int query_rows, int key_rows) {
  cudaError_t status = make_tensor_map(maps.query, p.type, p.batch, p.query, p.L, p.E, query_rows);
  if (status == cudaSuccess) status = make_tensor_map(maps.grad_out, p.type, p.batch, p.grad_out, p.L, p.Ev, query_rows);
  if (status == cudaSuccess) status = make_tensor_map(maps.key, p.type, p.batch, p.key, p.S, p.E, key_rows);
  if (status == cudaSuccess) status = make_tensor_map(maps.value, p.type, p.batch, p.value, p.S, p.Ev, key_rows);
  return status;
}

// Tiles of `tile` of `rows` queries or keys of each of so many heads, whose blocks come from `others` rows of the other pair of
// operands. Causal tiles come longest first, of as many heads together as L2 keeps the blocks of; but a section lasts for some
// rounds over the SMs, as their loads only even out within one.
inline RowsBackwardOrder order_of(const RowsBackwardParams& p, int64_t heads, int64_t rows, int64_t tile, int64_t others,
                                  int64_t sms) {
  constexpr int64_t kSectionBytes = int64_t{32} << 20, kSectionRounds = 8;
  const int64_t of_head = ceil_div(rows, tile), tiles = heads * of_head;
  const int64_t section =
      std::max(kSectionBytes / (others * (p.E + p.Ev) * element_bytes(p.type)), ceil_div(kSectionRounds * sms, of_head));
  return {static_cast<uint32_t>(tiles), static_cast<uint32_t>(of_head),
          p.sequence.causal ? static_cast<uint32_t>(std::min(section, heads)) : 1};
}

template <class Tile>
cudaError_t launch_tiles(void (*kernel)(RowsBackwardParams, RowsBackwardMaps, RowsBackwardOrder, RowsMarks),
                         const RowsBackwardParams& params, const RowsBackwardMaps& maps, const RowsBackwardOrder& order,
                         const RowsMarks& marks, int64_t sms, cudaStream_t stream) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(typename Tile::Shared));
  const cudaError_t status = allow_shared_memory(reinterpret_cast<const void*>(kernel), kSharedBytes);
  if (status != cudaSuccess) return status;
  const int64_t pieces =
      params.unseen.shares == 0 ? 0 : unseen_pieces(params) * (params.N / params.key_group) / params.unseen.shares;
  const unsigned ctas = static_cast<unsigned>(std::min(std::max<int64_t>(order.tiles, pieces / kUnseenWarps), sms));
  kernel<<<ctas, kRowsBackwardThreads, kSharedBytes, stream>>>(params, maps, order, marks);
  return cudaGetLastError();
}

// The call's column kernel. Where tiles are cut it leaves the sums of parts in float, as dK and dV of matrices with the keys that
// some query sees and whole quads of columns, of as many key heads at a time as there is room for; then they are added.
template <class Tile>
cudaError_t launch_columns(const RowsBackwardParams& params, const RowsMarks& marks, int64_t sms, cudaStream_t stream) {
  const int64_t key_heads = params.N / params.key_group, parts = params.cut.heads * params.cut.blocks;
  const int64_t walked = ceil_div(params.L * params.key_group, parts);
  RowsBackwardMaps maps;
  cudaError_t status = make_maps(maps, params, Tile::kM, Tile::kN);
  if (status != cudaSuccess) return status;
  const auto launch = [&](const RowsBackwardParams& p, int64_t heads) {
    return launch_tiles<Tile>(column_grads_kernel<Tile>, p, maps,
                              order_of(p, heads * parts, p.seen_keys, Tile::kN, walked, sms), marks, sms, stream);
  };
  if (params.column_parts == nullptr) return launch(params, key_heads);

  RowsBackwardParams cut = params;
  cut.S = params.seen_keys;
  cut.unseen = {};
  cut.E = round_up(params.E, 4);
  cut.Ev = round_up(params.Ev, 4);
  cut.wide_grads = true;
  cut.grad_key = cut.grad_value = {};
  for (MatrixView* view : {&cut.grad_key, &cut.grad_value}) {
    view->row_stride = cut.E + cut.Ev;
    view->slice_stride = cut.S * view->row_stride;
    view->col_stride = view->group = 1;
    view->vector = true;
  }
  cut.grad_key.data = params.column_parts;
  cut.grad_value.data = params.column_parts + cut.E;
  RowsBackwardParams sums = params;
  for (int64_t first = 0; first < key_heads && status == cudaSuccess; first += params.column_heads) {
    const int64_t heads = std::min(key_heads - first, params.column_heads);
    cut.cut.first = sums.cut.first = static_cast<uint32_t>(first);
    status = launch(cut, heads);
    if (status == cudaSuccess) status = launch_column_sums(sums, heads, stream);
  }
  return status;
}

template <int kClass, bool kGeneral>
cudaError_t launch_rows_backward(RowsBackwardParams params, const RowsMarks& marks, cudaStream_t stream) {
  params.scale_factor = static_cast<float>(params.scale);
  params.unit = params.scale_factor * kLog2E;
  params.differences = params.mask_type != MaskType::kNone || !scales_exponents(params.scale_factor);
  params.keep_factor = static_cast<float>(kept_factor(params.dropout));
  RowValues values;
  values.records = params.records;
  values.records_of_head = params.records_of_head;
  values.differences = params.differences;
  const cudaError_t written = launch_row_values(params, values, stream);
  if (written != cudaSuccess) return written;
  const int64_t sms = current_device_info().sms;
  const cudaError_t launched = dispatch_half_type(params.type, [&](auto element) {
    using ColumnTile = ColumnGradTile<decltype(element), kClass, kGeneral>;
    using RowTile = RowGradTile<decltype(element), kClass, kGeneral>;
    // Keys that no query sees and no tile or part has: half of their zeros are written under either kernel, all by the row kernel
    // where the other one leaves parts.
    const bool cut = params.column_parts != nullptr;
    const int64_t first = cut ? params.seen_keys : round_up(params.seen_keys, ColumnTile::kN);
    if (first < params.S) params.unseen = {static_cast<int32_t>(first), 0, cut ? 1u : 2u};
    cudaError_t status = launch_columns<ColumnTile>(params, marks, sms, stream);
    if (status != cudaSuccess) return status;
    params.unseen.share = params.unseen.shares / 2;
    RowsBackwardMaps maps;
    status = make_maps(maps, params, RowTile::kM, RowTile::kN);
    if (status != cudaSuccess) return status;
    return launch_tiles<RowTile>(row_grad_kernel<RowTile>, params, maps,
                                 order_of(params, params.N, params.L, RowTile::kM, params.S, sms), marks, sms, stream);
  });
  if (launched != cudaSuccess || params.mask_grad.data == nullptr) return launched;
  return launch_mask_tiles(params, stream);
}

template <int kClass>
cudaError_t launch_rows_backward(const RowsBackwardParams& params, const RowsMarks& marks, cudaStream_t stream) {
  return params.general ? launch_rows_backward<kClass, true>(params, marks, stream)
                        : launch_rows_backward<kClass, false>(params, marks, stream);
}

}  // namespace attention_ext
