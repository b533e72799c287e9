#include "attention/sm90/rows_backward/launch.cuh"
#include "attention/sm90/rows_backward/rows_backward.h"

namespace attention_ext {

cudaError_t rows_backward_192(const RowsBackwardParams& params, cudaStream_t stream) {
  return launch_rows_backward<192>(params, stream);
}

}  // namespace attention_ext
