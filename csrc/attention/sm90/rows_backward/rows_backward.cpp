// Driver of the row kernels' backward: what belongs to rows first, by the pipeline's kernels and into records, then the kernels of
// the class. Workspace: delta and norm, (N, L) in float; a record for 32 queries.
#include "attention/sm90/rows_backward/rows_backward.h"

#include "attention/pipeline/stage.h"
#include "attention/sm90/pipeline/backward.h"
#include "core/arithmetic.h"
#include "plan/sm90_rows_backward.h"

namespace attention_ext {
namespace {

bool is_general(const BackwardParams& p) { return p.mask_type != MaskType::kNone || p.dropout.seed != nullptr; }

int64_t records_of_head(const BackwardParams& p) {
  const int64_t block = rows_backward_shape(rows_backward_class(p.E, p.Ev), is_general(p)).col_queries;
  return std::max(round_up(p.L, block), round_up(p.L, kRowsBackwardTile)) / QueryRecord::kQueries;
}

// Of delta and norm together.
int64_t row_bytes(const BackwardParams& p) {
  return round_up(2 * p.N * p.L * static_cast<int64_t>(sizeof(float)), kWorkspaceAlignment);
}

}  // namespace

int64_t rows_backward_workspace(const BackwardParams& params) {
  const int64_t records = params.N * records_of_head(params) * static_cast<int64_t>(sizeof(QueryRecord));
  return row_bytes(params) + round_up(records, kWorkspaceAlignment);
}

bool rows_backward_sums_mask(const BackwardParams&) { return false; }

cudaError_t rows_backward(const BackwardParams& params, cudaStream_t stream) {
  RowsBackwardParams rows;
  static_cast<BackwardParams&>(rows) = params;
  float* delta = static_cast<float*>(params.workspace);
  float* norm = delta + params.N * params.L;
  rows.delta = delta;
  rows.norm = norm;
  rows.records = reinterpret_cast<QueryRecord*>(static_cast<char*>(params.workspace) + row_bytes(params));
  rows.records_of_head = static_cast<int32_t>(records_of_head(params));
  rows.general = is_general(params);

  const Slice whole = {0, params.N, 0, params.L, 0, params.S};
  RowDotParams dot = stage_of<RowDotParams>(params, whole);
  dot.Ev = params.Ev;
  dot.grad_out = params.grad_out;
  dot.out = params.out;
  dot.grad_lse = params.grad_lse;
  dot.delta = delta;
  cudaError_t status = launch_row_dot(dot, stream);
  if (status != cudaSuccess) return status;

  LargeLseParams large = stage_of<LargeLseParams>(params, whole);
  large.E = params.E;
  large.scale = params.scale;
  large.query = params.query;
  large.key = params.key;
  large.mask = params.mask;
  large.mask_type = params.mask_type;
  large.lse = params.lse;
  large.norm = norm;
  status = launch_large_lse(large, stream);
  if (status != cudaSuccess) return status;

  switch (rows_backward_class(params.E, params.Ev)) {
    case 64: return rows_backward_64(rows, stream);
    case 128: return rows_backward_128(rows, stream);
    case 192: return rows_backward_192(rows, stream);
    default: return rows_backward_256(rows, stream);
  }
}

}  // namespace attention_ext
