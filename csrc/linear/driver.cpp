// Driver of the linear layer. Pure host code.
//
// float: input and weight become two half terms each (split_half), some rows and some features at a time so that the terms stay
// small, and are multiplied on Tensor Cores, on Hopper by wgmma. Tiles that this marks as suspect are then made anew on CUDA cores,
// which make all sums of few products. Half types on Hopper: wgmma, where TMA takes the operands. All else: tiled_linear.cu.
#include "core/arithmetic.h"
#include "core/device_info.h"
#include "core/tensors.h"
#include "gemm/split_half/params.h"
#include "linear/params.h"

namespace attention_ext {
namespace {

constexpr int64_t kTermBytes = int64_t{64} << 20;  // of each operand's half terms, unless those of one tile take more

// The parts of split_half, in rows and in features, and where their half terms lie in the workspace.
struct SplitHalfPlan {
  int64_t rows, features;  // of a part
  int64_t pitch;           // of terms, in elements
  int64_t weight_at, input_rows_at, weight_rows_at, suspect_at, bytes;
};

int64_t tiles_of(int64_t count) { return ceil_div(count, kLinearTile); }

SplitHalfPlan plan_split_half(const LinearParams& params) {
  const int64_t sms = current_device_info().sms;
  SplitHalfPlan plan = {};
  plan.pitch = round_up(params.K, 8);
  const int64_t in_cap = std::max<int64_t>(kTermBytes / (4 * plan.pitch) / kLinearTile, 1);  // tiles
  plan.rows = even_piece(params.M, in_cap * kLinearTile, kLinearTile, kLinearTile);
  // Persistent CTAs take tile after tile, so whole rounds are the best parts.
  const int64_t row_tiles = tiles_of(plan.rows), rounds = in_cap * row_tiles / sms;
  const int64_t columns = rounds > 0 ? std::max<int64_t>(rounds * sms / row_tiles, 1) : in_cap;
  plan.features = std::min(columns * kLinearTile, params.N);
  plan.weight_at = round_up(4 * plan.rows * plan.pitch, kWorkspaceAlignment);
  plan.input_rows_at = plan.weight_at + round_up(4 * plan.features * plan.pitch, kWorkspaceAlignment);
  plan.weight_rows_at = plan.input_rows_at + round_up(sizeof(SplitHalfRow) * plan.rows, kWorkspaceAlignment);
  plan.suspect_at = plan.weight_rows_at + round_up(sizeof(SplitHalfRow) * plan.features, kWorkspaceAlignment);
  plan.bytes = plan.suspect_at + 4 * tiles_of(params.M) * tiles_of(params.N);
  return plan;
}

bool empty(const LinearParams& params) { return params.M == 0 || params.N == 0; }

bool by_split_half(const LinearParams& params, LinearKernel kernel) {
  return kernel == LinearKernel::kSplitHalf || (kernel == LinearKernel::kWgmma && params.type == DataType::kFloat);
}

// The half terms of some rows, as an operand of two matrices.
MatrixView terms_view(void* data, int64_t rows, int64_t pitch) {
  MatrixView view = {};
  view.data = data;
  view.batch_stride[0] = rows * pitch;
  view.row_stride = pitch;
  view.col_stride = 1;
  view.group = 1;
  view.vector = true;
  return view;
}

cudaError_t split_rows(const MatrixView& source, int64_t first, int64_t rows, int64_t cols, void* terms, SplitHalfRow* of_rows,
                       cudaStream_t stream) {
  SplitHalfRowsParams params = {source, rows, cols, terms, of_rows};
  params.source.data = static_cast<float*>(source.data) + first * source.row_stride;
  return launch_split_half_rows(params, stream);
}

// A part of the layer, but for its operands.
LinearPartParams part_of(const LinearParams& params, int64_t row, int64_t rows, int64_t feature, int64_t features) {
  LinearPartParams part = {};
  part.rows = rows;
  part.cols = features;
  part.K = params.K;
  if (params.bias != nullptr) {
    part.bias = static_cast<const char*>(params.bias) + feature * params.bias_stride * element_bytes(params.type);
  }
  part.bias_stride = params.bias_stride;
  part.out = static_cast<float*>(params.out) + row * params.N + feature;
  if (params.statistics != nullptr) {
    part.statistics = static_cast<ColumnStatistics<float>*>(params.statistics) + row / kStatisticsRows * params.N + feature;
  }
  part.pitch = params.N;
  part.type = params.type;
  return part;
}

cudaError_t multiply_split_half(const LinearParams& params, LinearKernel kernel, char* workspace, cudaStream_t stream) {
  const SplitHalfPlan plan = plan_split_half(params);
  void *input_terms = workspace, *weight_terms = workspace + plan.weight_at;
  SplitHalfRow* input_rows = reinterpret_cast<SplitHalfRow*>(workspace + plan.input_rows_at);
  SplitHalfRow* weight_rows = reinterpret_cast<SplitHalfRow*>(workspace + plan.weight_rows_at);
  int32_t* suspect = reinterpret_cast<int32_t*>(workspace + plan.suspect_at);
  cudaError_t status = cudaMemsetAsync(suspect, 0, 4 * tiles_of(params.M) * tiles_of(params.N), stream);
  for (int64_t row = 0; row < params.M && status == cudaSuccess; row += plan.rows) {
    const int64_t rows = std::min(plan.rows, params.M - row);
    status = split_rows(params.input, row, rows, params.K, input_terms, input_rows, stream);
    for (int64_t feature = 0; feature < params.N && status == cudaSuccess; feature += plan.features) {
      const int64_t features = std::min(plan.features, params.N - feature);
      if (row == 0 || plan.features < params.N) {
        status = split_rows(params.weight, feature, features, params.K, weight_terms, weight_rows, stream);
        if (status != cudaSuccess) return status;
      }
      LinearPartParams part = part_of(params, row, rows, feature, features);
      part.input = terms_view(input_terms, rows, plan.pitch);
      part.weight = terms_view(weight_terms, features, plan.pitch);
      part.input_rows = input_rows;
      part.weight_rows = weight_rows;
      part.suspect_pitch = tiles_of(params.N);
      part.suspect = suspect + row / kLinearTile * part.suspect_pitch + feature / kLinearTile;
      status = kernel == LinearKernel::kSplitHalf ? launch_split_half_linear(part, stream) : launch_wgmma_linear(part, stream);
    }
  }
  if (status != cudaSuccess) return status;
  LinearParams again = params;
  again.suspect = suspect;
  status = launch_tiled_linear(again, stream);
  if (kernel == LinearKernel::kSplitHalf) again.suspect = nullptr;  // it leaves all statistics to make
  return status != cudaSuccess || params.statistics == nullptr ? status : launch_column_statistics(again, stream);
}

}  // namespace

int64_t linear_workspace(const LinearParams& params, LinearKernel kernel) {
  return by_split_half(params, kernel) ? plan_split_half(params).bytes : 0;
}

cudaError_t linear(const LinearParams& params, LinearKernel kernel, void* workspace, cudaStream_t stream) {
  if (empty(params)) return cudaSuccess;
  if (by_split_half(params, kernel)) return multiply_split_half(params, kernel, static_cast<char*>(workspace), stream);
  if (kernel == LinearKernel::kWgmma) {
    LinearPartParams whole = part_of(params, 0, params.M, 0, params.N);
    whole.input = params.input;
    whole.weight = params.weight;
    return launch_wgmma_linear(whole, stream);
  }
  const cudaError_t status = launch_tiled_linear(params, stream);
  return status != cudaSuccess || params.statistics == nullptr ? status : launch_column_statistics(params, stream);
}

}  // namespace attention_ext
