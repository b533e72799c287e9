// What crosses from host code into kernels: plain structs and the launchers that take them. No torch here.
//
// Sizes (one vocabulary everywhere): L queries, S keys, E head dim of query and key, Ev head dim of value,
// N = leading dims * Hq flattened row-major, the "flat batch index" n. A launcher returns its cudaError_t and never
// waits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace attention_ext {

// Batch dims left after merging. Real inputs need one to three; eight keeps every struct below within kernel
// parameters.
constexpr int kMaxBatchDims = 8;

enum class DataType : int32_t { kHalf, kBFloat16, kFloat, kDouble };
enum class MaskType : int32_t { kNone, kBool, kSameAsQuery, kFloat };

constexpr int64_t element_bytes(DataType type) { return type == DataType::kDouble ? 8 : type == DataType::kFloat ? 4 : 2; }

// Scores, sums and accumulators: float, or double for double.
constexpr int64_t accumulator_bytes(DataType type) { return type == DataType::kDouble ? 8 : 4; }

// The batch dims, outermost first; the last one is the query head dim (possibly merged with dims before it).
struct BatchDims {
  int64_t size[kMaxBatchDims];
  int32_t count;  // 1 .. kMaxBatchDims
};

// A stack of matrices. Element (n, row, col) lies at
//   data + sum over dims(index(n) * batch_stride) + (n - slice.batch_begin) * slice_stride + row * row_stride + col *
//   col_stride
// where the index along the last batch dim is divided by `group` first (query heads per key head). A tensor of the
// caller uses batch_stride and absolute rows and columns; a workspace slice uses slice_stride and counts rows and
// columns from the slice's own first one. Strides in elements; 0 means broadcast.
struct MatrixView {
  void* data;  // (batch dims..., rows, cols), any strides
  int64_t batch_stride[kMaxBatchDims];
  int64_t slice_stride;
  int64_t row_stride;
  int64_t col_stride;
  int32_t group;  // 1, or Hq / Hk
  bool vector;    // cols adjacent, and every row of every matrix begins on a 16-byte boundary
};

// The part of the (N, L, S) score space that one launch works on.
struct Slice {
  int64_t batch_begin, batch_count;
  int64_t row_begin, row_count;
  int64_t col_begin, col_count;
};

struct Dropout {
  const int64_t* seed;  // (1,) in device memory; null: no dropout
  uint64_t threshold;   // an element stays iff its random word >= threshold; p = 1 gives 2^32, which drops all
  double keep_scale;    // 1 / (1 - p), and 0 for p = 1
};

// What stage 1 writes: scores in the accumulator type; exp(score - lse) in the tensors' dtype; or, half types only,
// exp(score - reference of its segment) in the tensors' dtype with the segments' statistics.
enum class ScoresAs : int32_t { kScores, kProbabilities, kExponentials };
constexpr int kSegment = 64;  // keys
// The reference of a segment is the multiple of this at or below its maximum: segments of a row mostly share it, and then nothing has
// to be rescaled. exp(8) = 2981 leaves room below half precision's 65504, and weights lie further above its subnormals.
constexpr float kReferenceStep = 8.0f;
struct alignas(16) SegmentStatistics {
  float reference;
  float sum;          // of the exponentials, for the log-sum-exp
  float rounded_sum;  // of the same in the tensors' dtype, for the output: the weight of a row's only key is then exactly 1
};

// Scores of one slice: scale * query . key, mask, causal.
struct QkScoresParams {
  BatchDims batch;
  Slice slice;
  int64_t L, E;
  double scale;
  MatrixView query;       // (N, L, E)
  MatrixView key;         // (N / group, S, E)
  MatrixView mask;        // broadcasts to (N, L, S)
  MatrixView lse;         // (N, L), column unused; for probabilities
  const void* norm;       // (N, L) contiguous, accumulator type: factor of a row's probabilities; null: 1
  MatrixView out;         // slice (batch_count, row_count, col_count)
  MatrixView statistics;  // slice (batch_count, row_count, segments) of SegmentStatistics; for exponentials
  ScoresAs output;
  DataType type;
  MaskType mask_type;
  bool causal;
  bool write_hidden_tiles;  // fill tiles wholly above the diagonal with -inf instead of leaving them unwritten
};

// Rows of scores -> exp(score - row maximum) in `type`, the sum of those before rounding, and the log-sum-exp.
struct RowSoftmaxParams {
  BatchDims batch;
  Slice slice;
  MatrixView scores;   // slice (batch_count, row_count, S), accumulator type
  MatrixView weights;  // slice (batch_count, row_count, S), `type`; may start at the same address as scores
  MatrixView row_sum;  // slice (batch_count, row_count), accumulator type, column unused
  MatrixView lse;      // (N, L), accumulator type, column unused
  Dropout dropout;
  DataType type;
  bool causal;
};

// Exponentials relative to their segments' references -> the same relative to the row's, the largest, in place; row sums, log-sum-exp.
struct SegmentSoftmaxParams {
  BatchDims batch;
  Slice slice;
  MatrixView weights;     // slice (batch_count, row_count, col_count), half type
  MatrixView statistics;  // slice (batch_count, row_count, segments) of SegmentStatistics
  MatrixView row_sum;     // slice (batch_count, row_count), float, column unused
  MatrixView lse;         // (N, L), float, column unused
  Dropout dropout;
  DataType type;
  bool causal;
};

// weights . values * factor / row_sum: the attention output, and dQ = scale * dS . K.
struct ScoresValuesParams {
  BatchDims batch;
  Slice slice;
  int64_t Ev;  // columns of values
  double factor;
  MatrixView weights;  // slice (batch_count, row_count, S), `type`
  MatrixView values;   // (N / group, S, Ev)
  MatrixView row_sum;  // slice (batch_count, row_count), accumulator type, column unused; data null: divide by nothing
  MatrixView out;      // (N, L, Ev), `type`, or the accumulator type with wide_out
  void* carry;  // half types, many keys: slice (batch_count, row_count, Ev rounded up to 4), float; null: one sum over all keys
  DataType type;
  bool causal;
  bool wide_out;
};

// delta[n, i] = sum over e of grad_out[n, i, e] * out[n, i, e], minus grad_lse[n, i].
struct RowDotParams {
  BatchDims batch;
  int64_t N, L, Ev;
  MatrixView grad_out;  // (N, L, Ev)
  MatrixView out;       // (N, L, Ev)
  MatrixView grad_lse;  // (N, L), column unused; data null: absent
  void* delta;          // (N, L) contiguous, accumulator type
  DataType type;
};

// Makes the probabilities of whole rows sum to 1, where they do not: a large log-sum-exp, rounded to the accumulator type, leaves
// exp(score - lse) off by a factor common to the row. norm[n, i] is that factor, 1 where the sum is right within T's precision.
struct RowNormParams {
  BatchDims batch;
  Slice slice;  // all keys
  int64_t L;
  MatrixView probabilities;  // slice (batch_count, row_count, S), `type`
  void* norm;                // (N, L) contiguous, accumulator type
  DataType type;
  bool causal;
};

// dS = P * (keep * keep_scale * (grad_out . value^T) - delta). With dropout, P is overwritten with keep * P. `only_weight_grad`:
// neither: score_grad becomes keep * keep_scale * (grad_out . value^T).
struct ScoreGradParams {
  BatchDims batch;
  Slice slice;
  int64_t L, Ev;
  MatrixView grad_out;       // (N, L, Ev)
  MatrixView value;          // (N / group, S, Ev)
  MatrixView probabilities;  // slice (batch_count, row_count, col_count), `type`
  MatrixView score_grad;     // slice (batch_count, row_count, col_count), `type`
  const void* delta;         // (N, L) contiguous, accumulator type
  Dropout dropout;
  DataType type;
  bool causal;
  bool only_weight_grad;
};

// float and double, whole rows: delta = sum of P * dP over the row, minus grad_lse, then dS = P * (dP - delta) over dP in place; with
// dropout P is overwritten with keep * P.
struct RowDeltaParams {
  BatchDims batch;
  Slice slice;  // all keys
  int64_t L;
  MatrixView probabilities;  // slice (batch_count, row_count, S)
  MatrixView score_grad;     // the same; dP on the way in
  MatrixView grad_lse;       // (N, L), column unused; data null: absent
  void* delta;               // (N, L) contiguous
  Dropout dropout;
  DataType type;
  bool causal;
};

// out = factor * sum over the group's query heads of left^T . right: dV from P and grad_out, dK from dS and query.
struct KeyValueGradParams {
  BatchDims batch;
  Slice slice;    // batch_begin and batch_count are multiples of group; without carry row_begin is 0 and row_count is L
  int64_t L;      // rows of all slices
  int64_t group;  // query heads per key head
  int64_t width;  // columns of right and out: E or Ev
  double factor;
  MatrixView left;   // slice (batch_count, row_count, col_count), `type`
  MatrixView right;  // (N, L, width)
  MatrixView out;    // (N / group, S, width), `type`, or the accumulator type with wide_out
  void*
      carry;  // slices of rows, one after the other: (batch_count / group, col_count, width rounded up to 4), accumulator type
  DataType type;
  bool causal;
  bool wide_out;
};

// mask_grad[...] += score_grad summed over the batch dims, rows and columns along which the mask has size 1.
struct MaskGradParams {
  BatchDims batch;
  Slice slice;
  bool rows_kept;         // the mask has L rows (else 1)
  bool cols_kept;         // the mask has S columns (else 1)
  MatrixView score_grad;  // slice (batch_count, row_count, col_count), `type`
  MatrixView mask_grad;   // mask's own shape, accumulator type; batch_stride 0 along a dim of size 1
  DataType type;
};

// The whole forward: out = softmax(scale * query . key^T + mask) . value.
struct ForwardParams {
  BatchDims batch;
  int64_t N, L, S, E, Ev;
  double scale;
  MatrixView query;  // (N, L, E)
  MatrixView key;    // (N / group, S, E)
  MatrixView value;  // (N / group, S, Ev)
  MatrixView mask;   // broadcasts to (N, L, S)
  MatrixView out;    // (N, L, Ev)
  MatrixView lse;    // (N, L), accumulator type, natural logarithm, -inf for a row without a visible key
  Dropout dropout;
  DataType type;
  MaskType mask_type;
  bool causal;
  bool warpgroup_products;  // stages 1 and 3 by wgmma, on Hopper
  void* workspace;          // at least pipeline_forward_workspace bytes, 256-byte aligned
  int64_t workspace_bytes;  // what the slices may take
};

struct BackwardParams {
  BatchDims batch;
  int64_t N, L, S, E, Ev;
  int64_t key_group, value_group;  // Hq / Hk, Hq / Hv
  int64_t group;                   // their least common multiple, which slices of whole groups are multiples of
  double scale;
  MatrixView query, key, value;              // (N, L, E), (N / group, S, E), (N / group, S, Ev)
  MatrixView mask;                           // broadcasts to (N, L, S)
  MatrixView out, grad_out;                  // (N, L, Ev)
  MatrixView lse, grad_lse;                  // (N, L), accumulator type; grad_lse.data null: absent
  MatrixView grad_query;                     // (N, L, E), as the next two in `type`, or in the accumulator type with wide_grads
  MatrixView grad_key;                       // (N / group, S, E), dense
  MatrixView grad_value;                     // (N / group, S, Ev), dense
  int64_t grad_key_bytes, grad_value_bytes;  // of the two dense outputs, for clearing them when there is no query
  MatrixView mask_grad;                      // mask's own shape, accumulator type, zeroed by the caller; data null: not wanted
  bool mask_rows_kept, mask_cols_kept;
  bool wide_grads;
  void* norm;   // (N, L) scratch, accumulator type
  void* delta;  // (N, L) scratch, accumulator type
  Dropout dropout;
  DataType type;
  MaskType mask_type;
  bool causal;
  void* workspace;          // at least pipeline_backward_workspace bytes, 256-byte aligned
  int64_t workspace_bytes;  // what the slices may take
};

// One kernel each.
cudaError_t launch_qk_scores(const QkScoresParams& params, cudaStream_t stream);
cudaError_t launch_row_softmax(const RowSoftmaxParams& params, cudaStream_t stream);
cudaError_t launch_segment_softmax(const SegmentSoftmaxParams& params, cudaStream_t stream);
cudaError_t launch_scores_values(const ScoresValuesParams& params, cudaStream_t stream);
// The same as qk_scores (as exponentials) and scores_values, by warpgroups on Hopper: half types, operands that its copy engine takes.
cudaError_t launch_product_scores(const QkScoresParams& params, cudaStream_t stream);
cudaError_t launch_product_values(const ScoresValuesParams& params, cudaStream_t stream);
cudaError_t launch_row_dot(const RowDotParams& params, cudaStream_t stream);
cudaError_t launch_row_norm(const RowNormParams& params, cudaStream_t stream);
cudaError_t launch_row_delta(const RowDeltaParams& params, cudaStream_t stream);
cudaError_t launch_score_grad(const ScoreGradParams& params, cudaStream_t stream);
cudaError_t launch_key_value_grad(const KeyValueGradParams& params, cudaStream_t stream);
cudaError_t launch_mask_grad(const MaskGradParams& params, cudaStream_t stream);

// out[i] = accumulated[i], (count,) each: from the accumulator type of `type` to `out_type` (half types or float).
cudaError_t launch_convert(const void* accumulated, void* out, int64_t count, DataType type, DataType out_type,
                           cudaStream_t stream);

// Forward for Hopper (sm90/). `takes` says whether one can run a problem on such a card: half types, no empty dim, operands that the
// copy engine takes. Fused, no workspace: E and Ev up to 512; E up to 1024. The pipeline with warpgroup_products: any.
bool fused_forward_512_takes(const ForwardParams& params);
bool fused_forward_1024_takes(const ForwardParams& params);
bool product_pipeline_takes(const ForwardParams& params);
cudaError_t fused_forward_512(const ForwardParams& params, cudaStream_t stream);
cudaError_t fused_forward_1024(const ForwardParams& params, cudaStream_t stream);

// Host drivers: slices so that the workspace stays under the cap. The workspace functions return the bytes the driver
// will use under a cap: no more than the cap, except where a single row (forward) or a row tile by 8 keys of a group
// (backward) need more.
int64_t pipeline_forward_workspace(const ForwardParams& params);
cudaError_t pipeline_forward(const ForwardParams& params, cudaStream_t stream);
int64_t pipeline_backward_workspace(const BackwardParams& params);
cudaError_t pipeline_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace attention_ext
