// Between torch tensors and the plain structs of params.h: checks, layouts, allocation, views, errors.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binding/batch_dims.h"
#include "binding/errors.h"
#include "core/tensors.h"

namespace attention_ext {

inline Sizes strides_of(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return Sizes(strides.begin(), strides.end());
}

// The dtype that kernels compute for.
inline DataType data_type(const char* argument, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half: return DataType::kHalf;
    case ScalarType::BFloat16: return DataType::kBFloat16;
    case ScalarType::Float: return DataType::kFloat;
    case ScalarType::Double: return DataType::kDouble;
    default: fail(argument, "dtype float16, bfloat16, float32 or float64", text(tensor.scalar_type()));
  }
}

inline ScalarType accumulator_type(DataType type) { return type == DataType::kDouble ? ScalarType::Double : ScalarType::Float; }

inline void check_defined(const char* argument, const Tensor& tensor) {
  if (!tensor.defined()) fail(argument, "a tensor", "None");
}

// The last `matrix_dims` dims are small enough for 32-bit tile arithmetic.
inline void check_limits(const char* argument, const Tensor& tensor, int64_t matrix_dims) {
  const auto sizes = tensor.sizes();
  for (size_t dim = sizes.size() - matrix_dims; dim < sizes.size(); ++dim) {
    if (sizes[dim] > kMaxRowsAndCols) {
      fail(argument, "matrices of at most " + std::to_string(kMaxRowsAndCols) + " rows and columns", shape_of(tensor));
    }
  }
}

// An operand that goes with the first one, whose name in the genitive is `of`.
inline void check_operand(const char* argument, const Tensor& tensor, const Tensor& first, int64_t min_rank, const char* of) {
  check_defined(argument, tensor);
  data_type(argument, tensor);
  const auto of_first = [&](const char* what) { return std::string("the ") + of + what; };
  if (tensor.scalar_type() != first.scalar_type()) {
    fail(argument, of_first(" dtype ") + text(first.scalar_type()), text(tensor.scalar_type()));
  }
  if (!same_device(tensor, first)) fail(argument, of_first(" device ") + device_of(first), device_of(tensor));
  if (tensor.dim() < min_rank) {
    fail(argument, "rank " + std::to_string(min_rank) + " or more" + (min_rank == 3 ? " with enable_gqa" : ""),
         shape_of(tensor) + " of rank " + std::to_string(tensor.dim()));
  }
  check_limits(argument, tensor, 2);
}

// A tensor of just this shape and dtype on the device of `like`, the last `matrix_dims` of its dims a matrix's or a row's.
inline void check_shape(const char* argument, const Tensor& tensor, const Sizes& sizes, ScalarType type, const Tensor& like,
                        int64_t matrix_dims) {
  check_defined(argument, tensor);
  if (sizes_of(tensor) != sizes || tensor.scalar_type() != type || !same_device(tensor, like)) {
    fail(argument, "shape " + text(sizes) + ", " + text(type) + " on " + device_of(like),
         shape_of(tensor) + ", " + text(tensor.scalar_type()) + " on " + device_of(tensor));
  }
  check_limits(argument, tensor, matrix_dims);
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

// The stable ABI has no way to throw torch.OutOfMemoryError; attention_ext/_dispatch.py makes it of this sentence. The bytes are
// all that the operator would hold, for by then what it held is free again.
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
  explicit Views(bool enable_gqa) : enable_gqa_(enable_gqa) { operands_.reserve(kUsualOperands); }

  // Broadcasts the dims before the last `matrix_dims` into the problem's batch dims. With enable_gqa the first tensor
  // (the queries) says how many heads there are, and others may have a divisor of it.
  void broadcast(const char* argument, const Tensor& tensor, int64_t matrix_dims) {
    const Sizes own = batch_of(tensor, matrix_dims);
    const bool first = first_ == nullptr;
    if (first) {
      first_ = argument;
      first_tensor_ = &tensor;
    }
    if (own.size() > sizes_.size()) sizes_.prepend(own.size() - sizes_.size(), 1);
    for (size_t i = 1; i <= own.size(); ++i) {
      int64_t& whole = sizes_[sizes_.size() - i];
      const int64_t size = own[own.size() - i];
      if (first || (whole == 1 && !(enable_gqa_ && i == 1))) {
        whole = size;
      } else if (enable_gqa_ && i == 1) {
        if (size == 0) fail(argument, "at least one head with enable_gqa", shape_of(tensor));
        if (whole % size != 0) {
          fail(argument, std::string("a head count that divides the ") + whose() + " " + std::to_string(whole),
               shape_of(tensor));
        }
      } else if (size != whole && size != 1) {
        const bool grouped = !enable_gqa_ && i == 1 && size > 0 && size < whole && whole % size == 0;
        fail(argument,
             "leading dimensions that broadcast with the " + whose() + " " + shape_of(*first_tensor_) +
                 (grouped ? ", or enable_gqa=True" : ""),
             shape_of(tensor));
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
                            Sizes(strides.begin(), strides.end() - matrix_dims), &view};
    const int64_t element = element_size(type);
    view.vector = view.col_stride == 1 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (size_t dim = 0; dim + 1 < rank; ++dim) view.vector = view.vector && stride_of(dim) * element % 16 == 0;
    operands_.push_back(std::move(operand));
  }

  void finish(BatchDims& batch) const {
    if (!merge_batch_dims(sizes_, enable_gqa_, operands_, batch)) {
      fail(first_, "at most " + std::to_string(kMaxBatchDims) + " leading dims that strides keep apart", text(sizes_));
    }
  }

  const Sizes& batch_sizes() const { return sizes_; }
  Sizes with(std::initializer_list<int64_t> matrix) const {
    Sizes sizes = sizes_;
    sizes.append(matrix);
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

  std::string whose() const { return std::string(first_) + (std::string(first_).back() == 's' ? "'" : "'s"); }

  bool enable_gqa_;
  const char* first_ = nullptr;  // the argument that was broadcast first
  const Tensor* first_tensor_ = nullptr;
  Sizes sizes_;
  std::vector<BatchOperand> operands_;
};

}  // namespace attention_ext
