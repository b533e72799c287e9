// The library _C: the operators' schemas, the build's stamp and the plan. Needs libtorch_cpu only, so it loads beside
// any torch.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "binding/batch_dims.h"
#include "core/tensors.h"
#include "plan/kernels.h"

namespace attention_ext {
namespace {

// What setup.py stamped in: version, git tree of csrc/, CUDA major (0 without kernels), TORCH_CUDA_ARCH_LIST.
std::tuple<std::string, std::string, int64_t, std::string> build_info() {
  return {ATTENTION_EXT_VERSION, ATTENTION_EXT_CSRC, ATTENTION_EXT_CUDA_MAJOR, ATTENTION_EXT_BUILT_FOR};
}

template <class Table>
std::vector<std::string> names(const Table& table) {
  std::vector<std::string> found;
  for (const auto& row : table) found.push_back(row.name);
  return found;
}

std::vector<std::string> kernels(std::string table) {
  if (table == "forward") return names(kForwardKernels);
  if (table == "backward") return names(kBackwardKernels);
  if (table == "linear") return names(kLinearKernels);
  throw std::runtime_error("kernels: table: expected \"forward\", \"backward\" or \"linear\", got \"" + table + "\"");
}

using Field = std::pair<const char*, std::variant<int64_t*, bool*, DataType*, MaskType*>>;
bool assign(std::initializer_list<Field> fields, const std::string& name, int64_t value) {
  for (const auto& [known, place] : fields) {
    if (name != known) continue;
    std::visit([&](auto* field) { *field = static_cast<std::remove_pointer_t<decltype(field)>>(value); }, place);
    return true;
  }
  return false;
}
bool assign_operand(const char* prefix, Operand& operand, const std::string& name, int64_t value) {
  const size_t length = std::string(prefix).size();
  return name.compare(0, length, prefix) == 0 && assign({{"columns_adjacent", &operand.columns_adjacent},
                                                         {"rows_apart", &operand.rows_apart},
                                                         {"heads_apart", &operand.heads_apart},
                                                         {"strides_in_range", &operand.strides_in_range},
                                                         {"matrices", &operand.matrices},
                                                         {"row_alignment", &operand.row_alignment}},
                                                        name.substr(length), value);
}
bool assign(Problem& p, const std::string& name, int64_t value) {
  return assign({{"N", &p.N},
                 {"L", &p.L},
                 {"S", &p.S},
                 {"E", &p.E},
                 {"Ev", &p.Ev},
                 {"key_group", &p.key_group},
                 {"value_group", &p.value_group},
                 {"batch_dims", &p.batch_dims},
                 {"type", &p.type},
                 {"mask", &p.mask},
                 {"mask_rows", &p.mask_rows},
                 {"mask_matrices", &p.mask_matrices},
                 {"causal", &p.causal},
                 {"dropout", &p.dropout},
                 {"out_dense", &p.out_dense},
                 {"mask_grad", &p.mask_grad}},
                name, value) ||
         assign_operand("query.", p.query, name, value) || assign_operand("key.", p.key, name, value) ||
         assign_operand("value.", p.value, name, value) || assign_operand("grad_out.", p.grad_out, name, value);
}
bool assign(LinearProblem& p, const std::string& name, int64_t value) {
  return assign({{"M", &p.M}, {"N", &p.N}, {"K", &p.K}, {"type", &p.type}}, name, value) ||
         assign_operand("input.", p.input, name, value) || assign_operand("weight.", p.weight, name, value);
}

using Plan = std::tuple<std::string, std::string, int64_t, bool, std::vector<std::string>, std::vector<int64_t>>;
template <class Facts, size_t kRows>
Plan plan_of(const std::array<KernelRow<Facts>, kRows>& table, const std::vector<std::string>& facts,
             const std::vector<int64_t>& values, const DeviceInfo& card, int64_t cap) {
  Facts problem;
  for (size_t i = 0; i < facts.size(); ++i) {
    if (!assign(problem, facts[i], values.at(i))) throw std::runtime_error("plan: facts: there is none called " + facts[i]);
  }
  const Choice<Facts, kRows> choice(table, problem, card, cap);
  const auto& chosen = table[choice.row()];
  const int64_t workspace = chosen.workspace == nullptr ? 0 : chosen.workspace(problem, card, cap);
  bool is_preferred = false;
  if constexpr (std::is_same_v<Facts, Problem>) is_preferred = preferred(problem, card);
  std::vector<std::string> refusals;
  std::vector<int64_t> costs;
  for (const auto& row : table) {
    refusals.push_back(refusal(row, problem, card));
    costs.push_back(row.cost(problem, card, cap));
  }
  return {chosen.name, choice.reason(), workspace, is_preferred, refusals, costs};
}

// The plan for a problem of these facts (plan/problem.h; of an operand as "key.row_alignment"), on a card that need not be there.
Plan plan(std::string table, std::vector<std::string> facts, std::vector<int64_t> values, int64_t capability, int64_t sms,
          int64_t workspace_bytes) {
  if (sms < 1) throw std::runtime_error("plan: sms: expected a positive number, got " + std::to_string(sms));
  const DeviceInfo card = {capability, sms};
  if (table == "linear") return plan_of(kLinearKernels, facts, values, card, workspace_bytes);
  if (table == "backward") return plan_of(kBackwardKernels, facts, values, card, workspace_bytes);
  return plan_of(kForwardKernels, facts, values, card, workspace_bytes);
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
  return merge_batch_dims(Sizes(sizes.begin(), sizes.end()), enable_gqa, operands, batch);
}

}  // namespace
}  // namespace attention_ext

// key_lengths: int32 (B,), B the product of the dims before the heads: a batch row sees its first keys only, and nothing reads the
// others. kernel_name, not kernel: inductor passes arguments on by name, to a function with a parameter `kernel` of its own.
STABLE_TORCH_LIBRARY(attention_ext, m) {
  m.def(
      "sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
      "*, "
      "float? scale=None, bool enable_gqa=False) -> Tensor");
  m.def(
      "sdpa_forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? seed, float dropout_p, "
      "bool is_causal, *, float? scale=None, bool enable_gqa=False, "
      "int workspace_bytes=134217728, str kernel_name=\"auto\", Tensor? key_lengths=None) -> (Tensor out, Tensor lse)");
  m.def(
      "sdpa_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
      "Tensor out, Tensor lse, Tensor? seed, float dropout_p, bool is_causal, *, float? scale=None, "
      "bool enable_gqa=False, bool mask_grad=False, bool wide_grads=False, "
      "int workspace_bytes=134217728, str kernel_name=\"auto\", Tensor? key_lengths=None) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "qk_scores(Tensor query, Tensor key, Tensor? attn_mask=None, bool is_causal=False, *, float? scale=None, "
      "bool enable_gqa=False) -> Tensor");
  m.def("row_softmax(Tensor scores, *, str dtype=\"float32\") -> (Tensor weights, Tensor row_sum, Tensor lse)");
  m.def("scores_values(Tensor weights, Tensor row_sum, Tensor value, *, bool enable_gqa=False) -> Tensor");
  // The first result of sdpa_forward alone, without dropout, for calls that are known to want no more: on CUDA, without a gradient.
  m.def(
      "_sdpa_out(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale, bool enable_gqa) "
      "-> Tensor");
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
  // Batch normalisation and scale in one pass, for linear_batchnorm_softmax: on the CPU only, without a gradient.
  m.def(
      "_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, Tensor scale, float eps) "
      "-> (Tensor out, Tensor mean, Tensor var)");
  // Which kernel the operator would run for a call, and why; runs and allocates nothing. On CUDA only.
  m.def(
      "sdpa_plan(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, *, "
      "float? scale=None, bool enable_gqa=False, int workspace_bytes=134217728, str kernel_name=\"auto\", "
      "Tensor? key_lengths=None) -> (str kernel, str reason, int workspace, bool preferred)");
  m.def(
      "sdpa_backward_plan(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? attn_mask, "
      "Tensor out, Tensor lse, Tensor? seed, float dropout_p, bool is_causal, *, float? scale=None, "
      "bool enable_gqa=False, bool mask_grad=False, bool wide_grads=False, "
      "int workspace_bytes=134217728, str kernel_name=\"auto\", Tensor? key_lengths=None) -> (str kernel, str reason)");
  m.def("linear_plan(Tensor input, Tensor weight, Tensor? bias) -> (str kernel, str reason)");
  m.def("build_info() -> (str, str, int, str)");
  // Rules of the kernels that the checks in Python ask for, told by sizes and strides alone.
  m.def("limits() -> (int rows_and_cols, int batch_dims)");
  m.def("batch_dims_merge(int[] sizes, int[] ranks, int[] own, int[] strides, bool enable_gqa) -> bool");
  // The names of a table of kernels, "forward", "backward" or "linear", in its order; and what it makes of a problem, for tests.
  m.def("kernels(str table) -> str[]");
  m.def(
      "plan(str table, str[] facts, int[] values, int capability, int sms, int workspace_bytes) "
      "-> (str kernel, str reason, int workspace, bool preferred, str[] refusals, int[] costs)");
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&attention_ext::build_info));
  m.impl("kernels", TORCH_BOX(&attention_ext::kernels));
  m.impl("plan", TORCH_BOX(&attention_ext::plan));
  m.impl("limits", TORCH_BOX(&attention_ext::limits));
  m.impl("batch_dims_merge", TORCH_BOX(&attention_ext::batch_dims_merge));
}

// Importing attention_ext._C runs the registrations above; the module itself is empty.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
