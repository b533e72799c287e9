// The library _C: the operators' schemas, the build's stamp and the plan. Needs libtorch_cpu only, so it loads beside
// any torch.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "binding/batch_dims.h"
#include "core/tensors.h"
#include "plan/plan.h"

namespace attention_ext {
namespace {

// What setup.py stamped in: version, git tree of csrc/, CUDA major (0 without kernels), TORCH_CUDA_ARCH_LIST.
std::tuple<std::string, std::string, int64_t, std::string> build_info() {
  return {ATTENTION_EXT_VERSION, ATTENTION_EXT_CSRC, ATTENTION_EXT_CUDA_MAJOR, ATTENTION_EXT_BUILT_FOR};
}

// sizes: B, Hq, Hk, L, S, E, Ev. mask: "none", "bool" or "float".
std::tuple<std::string, std::string, int64_t, bool> plan(std::vector<int64_t> sizes, int64_t element_size, std::string mask,
                                                         bool is_causal, bool dropout, int64_t capability, bool tma_operands,
                                                         int64_t workspace_bytes) {
  if (sizes.size() != 7) throw std::runtime_error("plan: sizes: expected B, Hq, Hk, L, S, E, Ev");
  MaskKind kind = mask == "bool" ? MaskKind::kBool : mask == "float" ? MaskKind::kFloat : MaskKind::kNone;
  Problem problem{sizes[0],
                  sizes[1],
                  sizes[2],
                  sizes[3],
                  sizes[4],
                  sizes[5],
                  sizes[6],
                  element_size,
                  kind,
                  is_causal,
                  dropout,
                  capability,
                  tma_operands ? "" : "TMA cannot read them"};
  Plan made = make_plan(problem, workspace_bytes);
  return {kernel_name(made.kernel), made.reason, made.workspace_bytes, made.preferred};
}

// What no kernel takes more of: rows or columns of a matrix, leading dims that do not merge.
std::tuple<int64_t, int64_t> limits() { return {kMaxRowsAndCols, kMaxBatchDims}; }

// Whether the leading dims of several operands merge to as few as the kernels take. ranks: how many each operand has; own, strides:
// their sizes and strides, one operand after the other.
bool batch_dims_merge(std::vector<int64_t> sizes, std::vector<int64_t> ranks, std::vector<int64_t> own,
                      std::vector<int64_t> strides, bool enable_gqa) {
  std::vector<MatrixView> views(ranks.size());
  std::vector<BatchOperand> operands;
  auto size = own.cbegin(), stride = strides.cbegin();
  for (size_t i = 0; i < ranks.size(); size += ranks[i], stride += ranks[i], ++i) {
    operands.push_back({{size, size + ranks[i]}, {stride, stride + ranks[i]}, &views[i]});
  }
  BatchDims batch;
  return merge_batch_dims(sizes, enable_gqa, operands, batch);
}

}  // namespace
}  // namespace attention_ext

// kernel_name, not kernel: inductor passes arguments on by name, to a function with a parameter `kernel` of its own.
STABLE_TORCH_LIBRARY(attention_ext, m) {
  m.def(
      "sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
      "*, "
      "float? scale=None, bool enable_gqa=False) -> Tensor");
  m.def(
      "sdpa_forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? seed, float dropout_p, "
      "bool is_causal, *, float? scale=None, bool enable_gqa=False, "
      "int workspace_bytes=134217728, str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
  m.def(
      "sdpa_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
      "Tensor out, Tensor lse, Tensor? seed, float dropout_p, bool is_causal, *, float? scale=None, "
      "bool enable_gqa=False, bool mask_grad=False, bool wide_grads=False, "
      "int workspace_bytes=134217728, str kernel_name=\"auto\") -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "qk_scores(Tensor query, Tensor key, Tensor? attn_mask=None, bool is_causal=False, *, float? scale=None, "
      "bool enable_gqa=False) -> Tensor");
  m.def("row_softmax(Tensor scores, *, str dtype=\"float32\") -> (Tensor weights, Tensor row_sum, Tensor lse)");
  m.def("scores_values(Tensor weights, Tensor row_sum, Tensor value, *, bool enable_gqa=False) -> Tensor");
  m.def("linear_float32(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  // By the kernel of that name, for tests: on CUDA only, without a gradient.
  m.def("_linear_float32_by(Tensor input, Tensor weight, Tensor? bias, str kernel_name) -> Tensor");
  m.def(
      "_linear_batchnorm_softmax_by(Tensor input, Tensor weight, Tensor? bias, Tensor? bn_weight, Tensor? bn_bias, "
      "Tensor? running_mean, Tensor? running_var, Tensor scale, bool training, float eps, str kernel_name) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_batchnorm_softmax(Tensor input, Tensor weight, Tensor? bias, Tensor? bn_weight, Tensor? bn_bias, "
      "Tensor? running_mean, Tensor? running_var, Tensor scale, bool training, float eps) "
      "-> (Tensor out, Tensor mean, Tensor var, Tensor linear)");
  // Which kernel the operator would run for a call, and why; runs and allocates nothing. On CUDA only.
  m.def(
      "sdpa_plan(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, *, "
      "float? scale=None, bool enable_gqa=False, int workspace_bytes=134217728, str kernel_name=\"auto\") "
      "-> (str kernel, str reason, int workspace, bool preferred)");
  m.def("linear_plan(Tensor input, Tensor weight, Tensor? bias) -> (str kernel, str reason)");
  m.def("build_info() -> (str, str, int, str)");
  // Rules of the kernels that the checks in Python ask for, told by sizes and strides alone.
  m.def("limits() -> (int rows_and_cols, int batch_dims)");
  m.def("batch_dims_merge(int[] sizes, int[] ranks, int[] own, int[] strides, bool enable_gqa) -> bool");
  m.def(
      "plan(int[] sizes, int element_size, str mask, bool is_causal, bool dropout, int capability, bool tma_operands, "
      "int workspace_bytes) "
      "-> (str, str, int, bool)");
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&attention_ext::build_info));
  m.impl("plan", TORCH_BOX(&attention_ext::plan));
  m.impl("limits", TORCH_BOX(&attention_ext::limits));
  m.impl("batch_dims_merge", TORCH_BOX(&attention_ext::batch_dims_merge));
}

// Importing attention_ext._C runs the registrations above; the module itself is empty.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
