// Tensor maps for TMA, from the views that kernels share; of operands that TMA reads (core/operand.h).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/tensors.h"

namespace attention_ext {

// The map of a view (batch dims..., rows, cols), innermost first: cols, rows, then up to three batch dims (the last one divided by
// the view's group). A dim that is broadcast has one entry. Boxes of box_rows x 64 columns, swizzled by 128 bytes; zeros outside.
cudaError_t make_tensor_map(CUtensorMap& map, DataType type, const BatchDims& batch, const MatrixView& view, int64_t rows,
                            int64_t cols, int box_rows);

// The map of queries (batch dims..., Hq, L, E), or of their mask, whose heads belong to groups: cols, heads of a group, rows,
// groups, leading dim. Boxes of the queries of all heads of a group, tile_rows in all, by 64 columns. At most two batch dims. Of
// groups of one head as above.
cudaError_t make_group_map(CUtensorMap& map, DataType type, const BatchDims& batch, const MatrixView& view, int group,
                           int64_t rows, int64_t cols, int tile_rows);

}  // namespace attention_ext
