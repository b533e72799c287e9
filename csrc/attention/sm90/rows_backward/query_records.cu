// Before the backward of the row kernels: what they want to know of 32 queries together (QueryRecord), so that the threads which
// load never read or write it themselves.
//
// A warp a record, a lane a query; a lane reads lse, delta and, where lse is large, norm. Memory bounds it: 8 bytes a query read,
// 13 written. Grid: one CTA of 256 threads per 8 records of the flattened (N, records_of_head). No shared memory.
#include "attention/sm90/rows_backward/parts.cuh"
#include "core/launch.cuh"

namespace attention_ext {
namespace {

constexpr int kCtaThreads = 256, kRecordsPerCta = kCtaThreads / 32;
static_assert(QueryRecord::kQueries == 32, "a lane of a warp each");

template <class T>
__global__ void __launch_bounds__(kCtaThreads)
    query_records_kernel(const __grid_constant__ RowsBackwardParams p, int64_t first_record) {
  const int64_t at = first_record + static_cast<int64_t>(blockIdx.x) * kRecordsPerCta + threadIdx.x / 32;
  if (at >= p.N * p.records_of_head) return;
  int64_t matrix, record;
  divide(at, p.records_of_head, matrix, record);
  const uint32_t n = static_cast<uint32_t>(matrix);  // heads are counted in 32 bits
  const int lane = threadIdx.x % 32, first = static_cast<int>(record) * QueryRecord::kQueries, query = first + lane;

  const Exponents<T> exponents = {p};
  float lse = 0.0f, offset = negative_infinity(0.0f), delta = 0.0f;
  if (query < p.L) {
    const float* g_lse = static_cast<const float*>(p.lse.data) + batch_offset(p.batch, p.lse, n, 0);
    const float given = g_lse[query * p.lse.row_stride];
    if (given != negative_infinity(0.0f)) {
      lse = isinf(given) ? given - given : given;  // of a score of +inf: NaN
      offset = Exponents<T>::kShift;
      delta = -p.delta[matrix * p.L + query] * Exponents<T>::kUnscale;
      if (!(fabsf(lse) < kLargeLse)) {
        offset += log2f(p.norm[matrix * p.L + query]);
      } else if (!p.differences) {
        offset -= lse * kLog2E;
      }
    }
  }
  const bool careful = __any_sync(0xffffffffu, exponents.careful(lse));

  QueryRecord& to = p.records[at];
  to.lse[lane] = lse;
  to.offset[lane] = offset;
  to.delta[lane] = delta;
  if (lane == 0) {
    to.mask = p.mask_type != MaskType::kNone ? batch_offset(p.batch, p.mask, n, 0) : 0;
    to.n = n;
    to.query = first;
    to.careful = careful;
    for (int32_t& word : to.unused) word = 0;  // bulk copies read them
  }
}

}  // namespace

cudaError_t launch_query_records(const RowsBackwardParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) {
    return launch_rows(query_records_kernel<decltype(element)>, kCtaThreads, params.N * params.records_of_head, kRecordsPerCta,
                       stream, params);
  });
}

}  // namespace attention_ext
