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

// Sets the box of a tile's queries, but for its column.
template <class Work>
__device__ __forceinline__ void set_queries(TensorPosition& box, const ForwardParams& p, const Work& work) {
  if (work.group == 1) {
    box.at[1] = work.first_row;
    set_batch(box, p.batch, p.query, work.n_group);
  } else {  // (leading dim, key head, query, head of the group, column)
    const int key_heads = static_cast<int>(p.batch.size[p.batch.count - 1]) / work.group;
    box = {{0, 0, work.query_of(0), static_cast<int>(work.n_group) % key_heads, static_cast<int>(work.n_group) / key_heads}};
    if (p.batch.count == 1 || p.query.batch_stride[0] == 0) box.at[4] = 0;
  }
}

}  // namespace attention_ext
