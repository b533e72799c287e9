// The pipeline's forward with its two products by wgmma, on Hopper.
#pragma once

#include "attention/pipeline/params.h"

namespace attention_ext {

// The same as qk_scores (as exponentials) and scores_values: half types, operands that TMA takes.
cudaError_t launch_wgmma_scores(const QkScoresParams& params, cudaStream_t stream);
cudaError_t launch_wgmma_values(const ScoresValuesParams& params, cudaStream_t stream);

cudaError_t wgmma_pipeline(const ForwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
