// What TMA reads for the fused forwards, whose tiles have the rows of all heads of a group: tensor maps, and where queries lie.
#pragma once

#include "attention/params.h"
#include "core/tensor_map.h"
#include "device/sm90/tma.cuh"

namespace attention_ext {

struct GroupMaps {
  CUtensorMap query;       // (batch dims..., queries, heads of a group, head dim); without groups as key
  CUtensorMap key, value;  // (batch dims..., keys, head dim), five dims
};

// rows: of a tile; keys, value_keys: of boxes.
inline cudaError_t make_group_maps(GroupMaps& maps, const ForwardParams& p, int rows, int keys, int value_keys) {
  cudaError_t status = make_group_map(maps.query, p.type, p.batch, p.query, p.key.group, p.L, p.E, rows);
  if (status == cudaSuccess) status = make_tensor_map(maps.key, p.type, p.batch, p.key, p.S, p.E, keys);
  if (status == cudaSuccess) status = make_tensor_map(maps.value, p.type, p.batch, p.value, p.S, p.Ev, value_keys);
  return status;
}

// The same of a mask of the query's type: a box has those of the queries and heads that have rows of the mask of their own.
inline cudaError_t make_bias_map(CUtensorMap& map, const ForwardParams& p, int rows) {
  return make_group_map(map, p.type, p.batch, p.mask, p.key.group, p.L, p.S, rows);
}

// Sets the box of a tile's rows of a view of queries, or of the mask, but for its column.
template <class Work>
__device__ __forceinline__ void set_rows(TensorPosition& box, const ForwardParams& p, const MatrixView& view,
                                         const Work& work) {
  const int first = view.row_stride == 0 ? 0 : work.query_of(0);
  if (work.group == 1) {
    box.at[1] = first;
    set_batch(box, p.batch, view, work.n_group);
  } else {  // (leading dim, key head, query, head of the group, column)
    const int heads = p.batch.count - 1, key_heads = static_cast<int>(p.batch.size[heads]) / work.group;
    box = {{0, 0, first, static_cast<int>(work.n_group) % key_heads, static_cast<int>(work.n_group) / key_heads}};
    if (view.batch_stride[heads] == 0) box.at[3] = 0;
    if (p.batch.count == 1 || view.batch_stride[0] == 0) box.at[4] = 0;
  }
}

}  // namespace attention_ext
