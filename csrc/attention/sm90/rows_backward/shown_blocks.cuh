// The walk over a tile's blocks that leaves out what a mask hides: the loading warp asks the marks (attention/sm90/rows/marks.h), a
// lane a block, and tells the consumers what it has loaded. Of the instances for masks and dropout; without marks it is over all.
#pragma once

#include "attention/sm90/rows/marks.h"
#include "plan/sm90_rows.h"

namespace attention_ext {

// What the marks say of a block of so many rows and columns of cells, of those that there are. cells: where the matrix's begin.
template <int kRows, int kColumns>
__device__ __forceinline__ int shown(const RowsMarks& marks, uint32_t cells, int row, int column) {
  int least = kAllShown, most = kNothingShown;
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    const uint8_t* g_row = marks.data + (cells + static_cast<uint32_t>(min(row + i, marks.rows - 1)) * marks.blocks);
#pragma unroll 1
    for (int j = 0; j < kColumns; ++j) {
      const int cell = g_row[min(column + j, marks.blocks - 1)];
      least = min(least, cell);
      most = max(most, cell);
    }
  }
  return least == kAllShown ? kAllShown : most == kNothingShown ? kNothingShown : kSomeShown;
}

// Blocks [begin, end) from the last one to the first, 32 looked at together. All lanes of a warp.
class ShownBlocks {
 public:
  __device__ __forceinline__ void begin_at(int end) {
    from_ = end;
    some_ = 0;
  }
  // Whether there is another one. look(block): what is shown of it.
  template <class Look>
  __device__ __forceinline__ bool find(int begin, const Look& look) {
#pragma unroll 1
    while (some_ == 0 && from_ > begin) {
      from_ -= 32;
      const int block = from_ + static_cast<int>(threadIdx.x % 32);
      const int found = block >= begin ? look(block) : kNothingShown;
      some_ = __ballot_sync(0xffffffffu, found != kNothingShown);
      all_ = __ballot_sync(0xffffffffu, found == kAllShown);
    }
    return some_ != 0;
  }
  // It: twice its number, and 1 more where all of it is shown.
  __device__ __forceinline__ int take() {
    const int bit = 31 - __clz(static_cast<int>(some_));
    some_ ^= 1u << bit;
    return 2 * (from_ + bit) + (all_ >> bit & 1);
  }

 private:
  int from_;             // blocks before are still to be looked at
  uint32_t some_, all_;  // bit i: block from_ + i is still to be taken; is shown whole
};

}  // namespace attention_ext
