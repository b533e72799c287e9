#include "attention/sm90/rows/rows.h"

#include "plan/sm90_rows.h"

namespace attention_ext {

cudaError_t rows_forward(const ForwardParams& params, cudaStream_t stream) {
  switch (rows_class(params.E, params.Ev)) {
    case 64: return rows_forward_64(params, stream);
    case 128: return rows_forward_128(params, stream);
    case 160: return rows_forward_160(params, stream);
    case 192: return rows_forward_192(params, stream);
    default: return rows_forward_256(params, stream);
  }
}

}  // namespace attention_ext
