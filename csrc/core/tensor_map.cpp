#include "core/tensor_map.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <vector>

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

// All that a map is made of.
struct MapOf {
  DataType type;
  void* data;
  std::array<cuuint64_t, kRank> sizes;
  std::array<cuuint64_t, kRank - 1> strides;
  std::array<cuuint32_t, kRank> box;
  bool operator==(const MapOf&) const = default;

  size_t hash() const {
    uint64_t mixed = reinterpret_cast<uintptr_t>(data) / 16;
    for (const uint64_t part : {sizes[0], sizes[1], uint64_t{box[1]}}) mixed = (mixed ^ part) * 0x9e3779b97f4a7c15;
    return static_cast<size_t>(mixed >> 32);
  }
};

cudaError_t encode_anew(CUtensorMap& map, const MapOf& of) {
  if (encoder() == nullptr) return cudaErrorNotSupported;
  const CUtensorMapDataType element =
      of.type == DataType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t steps[kRank] = {1, 1, 1, 1, 1};
  const auto try_encode = [&] {
    return encoder()(&map, element, kRank, of.data, of.sizes.data(), of.strides.data(), of.box.data(), steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
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

// A map depends on nothing else, and the driver takes up to half a microsecond to make one. A model's tensors lie where they lay in
// the step before, so a thread keeps the maps that it made, one of each hash.
cudaError_t encode(CUtensorMap& map, const MapOf& of) {
  struct Made {
    MapOf of = {};
    CUtensorMap map;
  };
  constexpr size_t kMost = 256;  // 64 KB
  thread_local std::vector<Made> made;
  if (made.empty()) made.resize(kMost);
  Made& place = made[of.hash() % kMost];
  if (!(place.of == of)) {
    place.of = {};  // should it fail
    const cudaError_t status = encode_anew(place.map, of);
    if (status != cudaSuccess) return status;
    place.of = of;
  }
  map = place.map;
  return cudaSuccess;
}

}  // namespace

cudaError_t make_tensor_map(CUtensorMap& map, DataType type, const BatchDims& batch, const MatrixView& view, int64_t rows,
                            int64_t cols, int box_rows) {
  const uint64_t element = static_cast<uint64_t>(element_bytes(type));
  // A dim that is never stepped along still needs a stride that TMA accepts.
  const uint64_t unused_stride = (static_cast<uint64_t>(cols) * element + 15) / 16 * 16;
  const bool apart = rows > 1 && view.row_stride > 0;
  std::array<cuuint64_t, kRank> sizes = {static_cast<uint64_t>(cols), apart ? static_cast<uint64_t>(rows) : 1, 1, 1, 1};
  std::array<cuuint64_t, kRank - 1> strides = {apart ? static_cast<uint64_t>(view.row_stride) * element : unused_stride,
                                               unused_stride, unused_stride, unused_stride};
  for (int dim = kMatrixDims; dim < kRank; ++dim) {
    const int batch_dim = batch.count - 1 - (dim - kMatrixDims);
    if (batch_dim < 0 || view.batch_stride[batch_dim] == 0) continue;
    const int64_t group = batch_dim == batch.count - 1 ? view.group : 1;
    sizes[dim] = static_cast<uint64_t>(batch.size[batch_dim] / group);
    strides[dim - 1] = static_cast<uint64_t>(view.batch_stride[batch_dim]) * element;
  }
  return encode(map, {type, view.data, sizes, strides, {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1}});
}

cudaError_t make_group_map(CUtensorMap& map, DataType type, const BatchDims& batch, const MatrixView& view, int group,
                           int64_t rows, int64_t cols, int tile_rows) {
  if (group == 1) return make_tensor_map(map, type, batch, view, rows, cols, tile_rows);
  const uint64_t element = static_cast<uint64_t>(element_bytes(type)), unused_stride = (cols * element + 15) / 16 * 16;
  const auto bytes = [&](int64_t stride) { return stride > 0 ? static_cast<uint64_t>(stride) * element : unused_stride; };
  const auto entries = [&](int64_t size, int64_t stride) { return stride > 0 ? static_cast<uint64_t>(size) : 1; };
  const int heads = batch.count - 1;  // the dim
  const int64_t head_stride = view.batch_stride[heads], leading_stride = batch.count > 1 ? view.batch_stride[0] : 0;
  const std::array<cuuint64_t, kRank> sizes = {static_cast<uint64_t>(cols), entries(group, head_stride),
                                               entries(rows, view.row_stride), entries(batch.size[heads] / group, head_stride),
                                               entries(batch.size[0], leading_stride)};
  const std::array<cuuint64_t, kRank - 1> strides = {bytes(head_stride), bytes(view.row_stride), bytes(group * head_stride),
                                                     bytes(leading_stride)};
  const std::array<cuuint32_t, kRank> box = {64, static_cast<cuuint32_t>(group), static_cast<cuuint32_t>(tile_rows / group), 1,
                                             1};
  return encode(map, {type, view.data, sizes, strides, box});
}

}  // namespace attention_ext
