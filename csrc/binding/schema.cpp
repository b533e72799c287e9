// The library _C: the operators' schemas, the build's stamp and the plan. Needs libtorch_cpu only, so it loads beside
// any torch.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

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

}  // namespace
}  // namespace attention_ext

// key_lengths: int32 (B,), B the product of the dims before the heads: a batch row sees its first keys only, and nothing reads the others.
// kernel_name, not kernel: inductor passes arguments on by name, to a function with a parameter `kernel` of its own.
STABLE_TORCH_LIBRARY(attention_ext, m) {
  m.def(
      "sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
      "*, "
      "float? scale=None, bool enable_gqa=False) -> Tensor");
  m.def(
      "sdpa_forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? seed, float dropout_p, "
      "bool is_causal, *, float? scale=None, bool enable_gqa=False, bool allow_tf32=False, "
      "int workspace_bytes=134217728, str kernel_name=\"auto\", Tensor? key_lengths=None) -> (Tensor out, Tensor lse)");
  m.def(
      "sdpa_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
      "Tensor out, Tensor lse, Tensor? seed, float dropout_p, bool is_causal, *, float? scale=None, "
      "bool enable_gqa=False, bool allow_tf32=False, bool deterministic=False, bool mask_grad=False, bool wide_grads=False, "
      "int workspace_bytes=134217728, str kernel_name=\"auto\", Tensor? key_lengths=None) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
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
      "float? scale=None, bool enable_gqa=False, int workspace_bytes=134217728, str kernel_name=\"auto\", "
      "Tensor? key_lengths=None) -> (str kernel, str reason, int workspace, bool preferred)");
  m.def("linear_plan(Tensor input, Tensor weight, Tensor? bias) -> (str kernel, str reason)");
  m.def("build_info() -> (str, str, int, str)");
  m.def(
      "plan(int[] sizes, int element_size, str mask, bool is_causal, bool dropout, int capability, bool tma_operands, "
      "int workspace_bytes) "
      "-> (str, str, int, bool)");
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&attention_ext::build_info));
  m.impl("plan", TORCH_BOX(&attention_ext::plan));
}

// Importing attention_ext._C runs the registrations above; the module itself is empty.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
