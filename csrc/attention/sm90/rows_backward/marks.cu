// What a mask shows to the blocks and tiles of the row kernels' backward, by the forward's kernel.
#include "attention/sm90/rows/mark.cuh"
#include "attention/sm90/rows_backward/rows_backward.h"
#include "core/dispatch.h"

namespace attention_ext {

cudaError_t launch_marks(const BackwardParams& params, int marked_keys, uint8_t* data, RowsMarks& marks, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) {
    using T = decltype(element);
    return marked_keys == 64 ? launch_marks<T, 64>(params, data, marks, stream)
                             : launch_marks<T, 32>(params, data, marks, stream);
  });
}

}  // namespace attention_ext
