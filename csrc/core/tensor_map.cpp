#include "core/tensor_map.h"

#include <cuda_runtime_api.h>

#include "core/tensors.h"

namespace attention_ext {
namespace {

// The driver's encoder, looked up once: the library links against no driver, so that it loads where there is none.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
               : nullptr;
  }();
  return found;
}

constexpr int kRank = 5, kMatrixDims = 2;

cudaError_t encode(CUtensorMap& map, DataType type, void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
                   const cuuint32_t* box) {
  if (encoder() == nullptr) return cudaErrorNotSupported;
  const CUtensorMapDataType element =
      type == DataType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t steps[kRank] = {1, 1, 1, 1, 1};
  const auto try_encode = [&] {
    return encoder()(&map, element, kRank, data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = try_encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_NOT_INITIALIZED) {
    // A thread on which the runtime has not done anything yet: setting its device binds the context that the driver asks for.
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaSetDevice(device);
    if (status != cudaSuccess) return status;
    result = try_encode();
  }
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t make_tensor_map(CUtensorMap& map, DataType type, const BatchDims& batch, const MatrixView& view, int64_t rows,
                            int64_t cols, int box_rows) {
  const uint64_t element = static_cast<uint64_t>(element_bytes(type));
  // A dim that is never stepped along still needs a stride that TMA accepts.
  const uint64_t unused_stride = (static_cast<uint64_t>(cols) * element + 15) / 16 * 16;
  const bool apart = rows > 1 && view.row_stride > 0;
  cuuint64_t sizes[kRank] = {static_cast<uint64_t>(cols), apart ? static_cast<uint64_t>(rows) : 1, 1, 1, 1};
  cuuint64_t strides[kRank - 1] = {apart ? static_cast<uint64_t>(view.row_stride) * element : unused_stride, unused_stride,
                                   unused_stride, unused_stride};
  for (int dim = kMatrixDims; dim < kRank; ++dim) {
    const int batch_dim = batch.count - 1 - (dim - kMatrixDims);
    if (batch_dim < 0 || view.batch_stride[batch_dim] == 0) continue;
    const int64_t group = batch_dim == batch.count - 1 ? view.group : 1;
    sizes[dim] = static_cast<uint64_t>(batch.size[batch_dim] / group);
    strides[dim - 1] = static_cast<uint64_t>(view.batch_stride[batch_dim]) * element;
  }
  const cuuint32_t box[kRank] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  return encode(map, type, view.data, sizes, strides, box);
}

cudaError_t make_group_map(CUtensorMap& map, DataType type, const BatchDims& batch, const MatrixView& view, int group,
                           int64_t rows, int64_t cols, int tile_rows) {
  if (group == 1) return make_tensor_map(map, type, batch, view, rows, cols, tile_rows);
  const uint64_t element = static_cast<uint64_t>(element_bytes(type)), unused_stride = (cols * element + 15) / 16 * 16;
  const auto bytes = [&](int64_t stride) { return stride > 0 ? static_cast<uint64_t>(stride) * element : unused_stride; };
  const auto entries = [&](int64_t size, int64_t stride) { return stride > 0 ? static_cast<uint64_t>(size) : 1; };
  const int heads = batch.count - 1;  // the dim
  const int64_t head_stride = view.batch_stride[heads], leading_stride = batch.count > 1 ? view.batch_stride[0] : 0;
  const cuuint64_t sizes[kRank] = {static_cast<uint64_t>(cols), entries(group, head_stride), entries(rows, view.row_stride),
                                   entries(batch.size[heads] / group, head_stride), entries(batch.size[0], leading_stride)};
  const cuuint64_t strides[kRank - 1] = {bytes(head_stride), bytes(view.row_stride), bytes(group * head_stride),
                                         bytes(leading_stride)};
  const cuuint32_t box[kRank] = {64, static_cast<cuuint32_t>(group), static_cast<cuuint32_t>(tile_rows / group), 1, 1};
  return encode(map, type, view.data, sizes, strides, box);
}

}  // namespace attention_ext
