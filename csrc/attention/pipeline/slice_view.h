// The view of an array in the workspace of a slice. Pure host code.
#pragma once

#include "core/tensors.h"

namespace attention_ext {

// A matrix stack in the workspace: `rows` x `cols` per matrix, counted from the slice's own first row and column.
inline MatrixView slice_view(void* data, int64_t rows, int64_t pitch, bool vector) {
  MatrixView view = {};
  view.data = data;
  view.slice_stride = rows * pitch;
  view.row_stride = pitch;
  view.col_stride = 1;
  view.group = 1;
  view.vector = vector;
  return view;
}

}  // namespace attention_ext
