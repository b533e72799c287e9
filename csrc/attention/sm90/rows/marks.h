// What a mask shows, looked up in advance: a byte for some queries and a block of keys.
#pragma once

#include <cstdint>

#include "core/tensors.h"

namespace attention_ext {

enum Shown : uint8_t { kNothingShown = 0, kSomeShown = 1, kAllShown = 2 };

// A cell for kMarkedRows queries and a block of keys of each matrix that the mask has of its own: (matrices, rows, blocks).
// data null: there is none, and everything counts as kSomeShown.
struct RowsMarks {
  uint8_t* data;
  int64_t batch_stride[kMaxBatchDims];  // in cells; 0 where the mask's is
  int matrices, rows, blocks;
  bool whole;  // whether kAllShown is told from kSomeShown, for which the whole mask has to be read
};

}  // namespace attention_ext
