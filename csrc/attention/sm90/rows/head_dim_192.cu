#include "attention/sm90/rows/launch.cuh"
#include "attention/sm90/rows/rows.h"

namespace attention_ext {

cudaError_t rows_forward_192(const ForwardParams& params, cudaStream_t stream) {
  return launch_rows_class<192>(params, stream);
}

}  // namespace attention_ext
