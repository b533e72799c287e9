// Driver of the row kernels' backward: records of what belongs to rows first, then the kernels of the class. Workspace: a record
// for 32 queries; the marks of a mask; what parts of the column kernel's tiles leave, and in the same place, after it, parts of the
// mask's gradient.
#include "attention/sm90/rows_backward/rows_backward.h"

#include "attention/sm90/rows_backward/mask_tiles.h"
#include "core/arithmetic.h"
#include "core/operand.h"
#include "plan/sm90_column_parts.h"
#include "plan/sm90_rows.h"
#include "plan/sm90_rows_backward.h"

namespace attention_ext {
namespace {

bool is_general(const BackwardParams& p) { return p.mask_type != MaskType::kNone || p.dropout.seed != nullptr; }

RowsBackwardShape shape_of(const BackwardParams& p) {
  return rows_backward_shape(rows_backward_class(p.E, p.Ev), is_general(p));
}

int64_t records_of_head(const BackwardParams& p) {
  const int64_t block = shape_of(p).col_queries;
  return std::max(round_up(p.L, block), round_up(p.L, kRowsBackwardTile)) / QueryRecord::kQueries;
}

int64_t record_bytes(const BackwardParams& p) {
  return round_up(p.N * records_of_head(p) * static_cast<int64_t>(sizeof(QueryRecord)), kWorkspaceAlignment);
}

// Of the marks; 0: all blocks are multiplied, as of fewer than four few could be left out, or the workspace would be too large.
int64_t mark_bytes(const BackwardParams& p) {
  const RowsBackwardShape shape = shape_of(p);
  const bool masked = p.mask_type != MaskType::kNone && p.S >= 4 * shape.row_keys;
  const RowsMarkSizes sizes = rows_mark_sizes(masked, p.mask.row_stride == 0 ? 1 : p.L, p.S, shape.marked_keys());
  const int64_t matrices = operand_of(p.batch, p.mask, p.L, 1).matrices;
  const int64_t room = std::min(p.workspace_bytes - record_bytes(p), (int64_t{1} << 31) - 1);
  return sizes.cells > 0 && matrices <= room / sizes.cells ? sizes.cells * matrices : 0;
}

int64_t bytes_before_parts(const BackwardParams& p) { return record_bytes(p) + round_up(mark_bytes(p), kWorkspaceAlignment); }

ColumnSizes column_sizes(const BackwardParams& p) {
  const int64_t seen = p.sequence.causal ? std::min(p.S, p.L) : p.S;
  return {p.N / p.key_group, p.key_group, p.L, seen, p.E, p.Ev, p.sequence.causal, is_general(p)};
}

// How the column kernel's tiles are cut.
ColumnParts column_parts_of(const BackwardParams& p) {
  return plan_column_parts(column_sizes(p), p.workspace_bytes - bytes_before_parts(p));
}

// How the mask's gradient is cut, whose CTAs come after the columns' parts have been added.
MaskTilesPlan mask_tiles_of(const BackwardParams& p) {
  if (p.mask_grad.data == nullptr) return {};
  return plan_mask_tiles(mask_tiles_sizes(p), p.workspace_bytes - bytes_before_parts(p));
}

}  // namespace

int64_t rows_backward_workspace(const BackwardParams& params) {
  return bytes_before_parts(params) + std::max(column_parts_of(params).bytes, mask_tiles_of(params).bytes);
}

bool rows_backward_sums_mask(const BackwardParams&) { return false; }

cudaError_t rows_backward(const BackwardParams& params, cudaStream_t stream) {
  RowsBackwardParams rows;
  static_cast<BackwardParams&>(rows) = params;
  rows.records = static_cast<QueryRecord*>(params.workspace);
  rows.records_of_head = static_cast<int32_t>(records_of_head(params));
  rows.general = is_general(params);
  const MaskTilesPlan mask = mask_tiles_of(params);
  rows.mask_splits = mask.splits;
  auto* parts = reinterpret_cast<float*>(static_cast<char*>(params.workspace) + bytes_before_parts(params));
  rows.mask_parts = mask.bytes == 0 ? nullptr : parts;
  const ColumnParts columns = column_parts_of(params);
  rows.seen_keys = column_sizes(params).S;
  rows.cut = {static_cast<uint32_t>(columns.heads), static_cast<uint32_t>(columns.blocks),
              static_cast<uint32_t>(columns.heads_of_part), 0};
  rows.column_parts = columns.bytes == 0 ? nullptr : parts;
  rows.column_heads = columns.key_heads;
  RowsMarks marks = {};
  if (mark_bytes(params) > 0) {
    auto* data = static_cast<uint8_t*>(params.workspace) + record_bytes(params);
    const cudaError_t marked = launch_marks(params, shape_of(params).marked_keys(), data, marks, stream);
    if (marked != cudaSuccess) return marked;
  }
  switch (rows_backward_class(params.E, params.Ev)) {
    case 64: return rows_backward_64(rows, marks, stream);
    case 128: return rows_backward_128(rows, marks, stream);
    case 192: return rows_backward_192(rows, marks, stream);
    default: return rows_backward_256(rows, marks, stream);
  }
}

}  // namespace attention_ext
