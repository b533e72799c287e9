#include "attention/sm90/pipeline/pipeline.h"

namespace attention_ext {
namespace {

constexpr ForwardProducts kWgmmaProducts = {launch_wgmma_scores, launch_wgmma_values, true};

}  // namespace

cudaError_t wgmma_pipeline(const ForwardParams& params, cudaStream_t stream) {
  return run_forward(params, kWgmmaProducts, stream);
}

}  // namespace attention_ext
