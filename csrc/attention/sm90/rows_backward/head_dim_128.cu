#include "attention/sm90/rows_backward/launch.cuh"
#include "attention/sm90/rows_backward/rows_backward.h"

namespace attention_ext {

cudaError_t rows_backward_128(const RowsBackwardParams& params, const RowsMarks& marks, cudaStream_t stream) {
  return launch_rows_backward<128>(params, marks, stream);
}

}  // namespace attention_ext
