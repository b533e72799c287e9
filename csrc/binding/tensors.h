// Between torch tensors and the plain structs of params.h: checks, layouts, allocation, views, errors.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binding/batch_dims.h"
#include "core/tensors.h"

namespace attention_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = std::vector<int64_t>;

[[noreturn]] inline void fail(const char* op, const std::string& argument, const std::string& expected,
                              const std::string& got) {
  throw std::runtime_error("attention_ext: " + argument + ": expected " + expected + ", got " + got + " (" + op + ")");
}

inline std::string text(const Sizes& sizes) {
  std::string out = "(";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return out + (sizes.size() == 1 ? ",)" : ")");
}

inline std::string text(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    default: return "dtype number " + std::to_string(static_cast<int>(type));
  }
}

inline Sizes sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

inline Sizes strides_of(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return Sizes(strides.begin(), strides.end());
}

// The dtype that kernels compute for.
inline DataType data_type(const char* op, const char* argument, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half: return DataType::kHalf;
    case ScalarType::BFloat16: return DataType::kBFloat16;
    case ScalarType::Float: return DataType::kFloat;
    case ScalarType::Double: return DataType::kDouble;
    default: fail(op, argument, "dtype float16, bfloat16, float32 or float64", text(tensor.scalar_type()));
  }
}

inline ScalarType accumulator_type(DataType type) { return type == DataType::kDouble ? ScalarType::Double : ScalarType::Float; }

// A defined tensor on the given CUDA device with at least `rank` dims, each small enough for 32-bit tile arithmetic.
inline void check_tensor(const char* op, const char* argument, const Tensor& tensor, int64_t rank, int32_t device) {
  if (!tensor.defined()) fail(op, argument, "a tensor", "None");
  if (!tensor.is_cuda()) fail(op, argument, "a CUDA tensor", "a tensor on another device");
  if (tensor.get_device_index() != device) {
    fail(op, argument, "device cuda:" + std::to_string(device), "cuda:" + std::to_string(tensor.get_device_index()));
  }
  const Sizes sizes = sizes_of(tensor);
  if (tensor.dim() < rank) fail(op, argument, "at least " + std::to_string(rank) + " dims", "shape " + text(sizes));
  for (size_t dim = sizes.size() - rank; dim < sizes.size(); ++dim) {
    if (sizes[dim] > std::numeric_limits<int32_t>::max() - 1024)
      fail(op, argument, "matrices of at most 2^31 - 1025 rows and columns", "shape " + text(sizes));
  }
}

inline void check_type(const char* op, const char* argument, const Tensor& tensor, ScalarType type) {
  if (tensor.scalar_type() != type) fail(op, argument, "dtype " + text(type), text(tensor.scalar_type()));
}

inline void check_sizes(const char* op, const char* argument, const Tensor& tensor, const Sizes& sizes) {
  if (sizes_of(tensor) != sizes) fail(op, argument, "shape " + text(sizes), text(sizes_of(tensor)));
}

inline Sizes contiguous_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;
  }
  return strides;
}

// Strides of a result: memory order (..., L, H, E) where `like` has its heads inside its rows, else contiguous.
inline Sizes layout_like(const Sizes& sizes, const Tensor& like) {
  const size_t rank = sizes.size();
  if (rank < 3 || like.dim() < 3 || like.stride(like.dim() - 3) >= like.stride(like.dim() - 2))
    return contiguous_strides(sizes);
  Sizes order = sizes;
  std::swap(order[rank - 3], order[rank - 2]);
  Sizes strides = contiguous_strides(order);
  std::swap(strides[rank - 3], strides[rank - 2]);
  return strides;
}

inline int64_t element_size(ScalarType type) {
  return static_cast<int64_t>(aoti_torch_dtype_element_size(static_cast<int32_t>(type)));
}

// What every operator begins with: its tensors' device is current, and it has allocated nothing yet.
class OperatorScope {
 public:
  explicit OperatorScope(int32_t device) : guard_(device) { allocated() = 0; }
  static int64_t& allocated() {  // bytes, by the operator that runs on this thread
    thread_local int64_t bytes = 0;
    return bytes;
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

// The stable ABI has no way to throw torch.OutOfMemoryError; attention_ext/_dispatch.py makes it of this sentence. The bytes are all
// that the operator would hold, for by then what it held is free again.
[[noreturn]] inline void out_of_memory(int64_t bytes, int32_t device) {
  throw std::runtime_error("attention_ext: out of memory: " + std::to_string(OperatorScope::allocated() + bytes) +
                           " bytes on cuda:" + std::to_string(device));
}

inline Tensor allocate(const Sizes& sizes, const Sizes& strides, ScalarType type, int32_t device) {
  AtenTensorHandle handle = nullptr;
  const auto status = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                               static_cast<int32_t>(type), aoti_torch_device_type_cuda(), device, &handle);
  int64_t bytes = element_size(type);
  for (const int64_t size : sizes) bytes *= size;
  if (status != TORCH_SUCCESS) out_of_memory(bytes, device);
  OperatorScope::allocated() += bytes;
  return Tensor(handle);
}

// Scratch of `bytes` (its address aligned to 512 bytes by torch's allocator); freed in stream order when the tensor
// goes.
inline Tensor allocate_bytes(int64_t bytes, int32_t device) { return allocate({bytes}, {1}, ScalarType::Byte, device); }

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void* data_of(const Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

// The batch dims of a problem and the views that share them.
class Views {
 public:
  Views(const char* op, bool enable_gqa) : op_(op), enable_gqa_(enable_gqa) {}

  // Broadcasts the dims before the last `matrix_dims` into the problem's batch dims. With enable_gqa the first tensor
  // (the queries) says how many heads there are, and others may have a divisor of it.
  void broadcast(const char* argument, const Tensor& tensor, int64_t matrix_dims) {
    const Sizes own = batch_of(tensor, matrix_dims);
    if (enable_gqa_ && own.empty()) fail(op_, argument, "at least 3 dims with enable_gqa", "shape " + text(sizes_of(tensor)));
    const bool first = first_ == nullptr;
    if (first) first_ = argument;
    if (own.size() > sizes_.size()) sizes_.insert(sizes_.begin(), own.size() - sizes_.size(), 1);
    for (size_t i = 1; i <= own.size(); ++i) {
      int64_t& whole = sizes_[sizes_.size() - i];
      const int64_t size = own[own.size() - i];
      if (first || (whole == 1 && !(enable_gqa_ && i == 1))) {
        whole = size;
      } else if (enable_gqa_ && i == 1) {
        if (size == 0 || whole % size != 0)
          fail(op_, argument, "a head count that divides " + std::to_string(whole), std::to_string(size));
      } else if (size != whole && size != 1) {
        fail(op_, argument, "batch dims that broadcast to " + text(sizes_), text(own));
      }
    }
  }

  // (batch dims..., rows, cols) or, with matrix_dims 1, (batch dims..., rows). Kernels see a dim of size 1 with stride
  // 0.
  void add(MatrixView& view, const Tensor& tensor, int64_t matrix_dims = 2) {
    add(view, data_of(tensor), sizes_of(tensor), strides_of(tensor), tensor.scalar_type(), matrix_dims);
  }
  void add(MatrixView& view, void* data, const Sizes& sizes, const Sizes& strides, ScalarType type, int64_t matrix_dims = 2) {
    const auto stride_of = [&](size_t dim) { return sizes[dim] == 1 ? 0 : strides[dim]; };
    const size_t rank = sizes.size();
    view = {};
    view.data = data;
    view.row_stride = stride_of(rank - matrix_dims);
    view.col_stride = matrix_dims == 2 ? stride_of(rank - 1) : 0;
    BatchOperand operand = {Sizes(sizes.begin(), sizes.end() - matrix_dims),
                            Sizes(strides.begin(), strides.end() - matrix_dims), 1, &view};
    if (enable_gqa_ && !operand.size.empty() && operand.size.back() > 0) {
      operand.group = std::max<int64_t>(sizes_.back() / operand.size.back(), 1);
    }
    const int64_t element = element_size(type);
    view.vector = view.col_stride == 1 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (size_t dim = 0; dim + 1 < rank; ++dim) view.vector = view.vector && stride_of(dim) * element % 16 == 0;
    operands_.push_back(operand);
  }

  void finish(BatchDims& batch) const {
    if (!merge_batch_dims(sizes_, operands_, batch)) {
      fail(op_, first_, "at most " + std::to_string(kMaxBatchDims) + " leading dims that strides keep apart", text(sizes_));
    }
  }

  const Sizes& batch_sizes() const { return sizes_; }
  Sizes with(std::initializer_list<int64_t> matrix) const {
    Sizes sizes = sizes_;
    sizes.insert(sizes.end(), matrix);
    return sizes;
  }
  int64_t count() const {
    int64_t count = 1;
    for (const int64_t size : sizes_) count *= size;
    return count;
  }

 private:
  static Sizes batch_of(const Tensor& tensor, int64_t matrix_dims) {
    Sizes sizes = sizes_of(tensor);
    sizes.resize(sizes.size() - matrix_dims);
    return sizes;
  }

  const char* op_;
  bool enable_gqa_;
  const char* first_ = nullptr;  // the argument that was broadcast first
  Sizes sizes_;
  std::vector<BatchOperand> operands_;
};

}  // namespace attention_ext
