// Backward by wgmma (Hopper), before all else: delta of each row, what makes the probabilities of a row with a large log-sum-exp
// sum to 1, and records of both (row_values.h).
//
// P = exp(score - lse) takes lse as the forward rounded it. At |lse| = 3e5 float's spacing is 0.03, so P is off by 3 %, and a row
// of finfo.min has lost the sum's share altogether; the error is one factor for the whole row. Below kLargeLse it is less than what
// the probabilities are rounded by. Few rows have that, if any, so the CTA that has one multiplies for it, and no launch is spent:
// 1. delta and lse of the CTA's rows (attention/pipeline/row_dots.cuh).
// 2. Where some are large: S = Q . K^T, 64 keys after 64 by one warpgroup, a thread of the other one loads; each row's sum of
//    exp(S - lse), in registers. Keys are added in the same order whatever the tiles.
// 3. A warp a record of 32 queries, a lane a query.
// Grid: a CTA of 256 threads for 64 rows of a matrix; of short matrices up to four. Shared memory: 35 KB, of which 32 are a ring of
// two steps for 2, so that several CTAs of an SM read.
#include "attention/pipeline/row_dots.cuh"
#include "attention/sm90/pipeline/backward.h"
#include "attention/sm90/pipeline/row_values.h"
#include "attention/visibility/score_modifier.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/launch.cuh"
#include "core/tensor_map.h"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"

namespace attention_ext {
namespace {

constexpr int kKeys = 64, kStep = 64, kStages = 2;  // keys at a time; columns of a step, a row of 128 bytes
// Of a CTA, of short ones. They follow one another where all have rows to multiply for, so not as many as rows would allow.
constexpr int64_t kMostMatrices = 4;
static_assert(kDotRows == 64 && kDotThreads == 256, "a wgmma has 64 rows; two warpgroups");
static_assert(QueryRecord::kQueries == 32 && kDotRows % QueryRecord::kQueries == 0,
              "a lane of a warp each, whole records a CTA");

// A sum that is off by less is right: rounding every probability again would cost more than it mends.
template <class T>
constexpr float kTolerance = weight_scale(kDataType<T>) > 1.0f ? 1.0f / 1024 : 1.0f / 128;

struct RowValuesParams {
  DotViews views;
  MatrixView query, key, mask;  // (N, L, E), (N / group, S, E); broadcasts to (N, L, S)
  Sequence sequence;
  int64_t N, L, S, E;
  float scale;
  MaskType mask_type;
  RowValues to;
  int64_t tiles;  // of a matrix, of 64 rows
  int matrices;   // of a CTA
};

struct RowValuesMaps {
  CUtensorMap query, key;  // boxes of 64 rows or keys
};

template <class T>
struct RowValuesShared {
  alignas(1024) T query[kStages][kDotRows * kStep];
  alignas(1024) T key[kStages][kKeys * kStep];
  DotRows rows;
  float norm[kDotRows];     // of rows with a large log-sum-exp
  uint64_t full[kStages];   // TMA arrives with the bytes of a step; the multiplying warpgroup waits
  uint64_t empty[kStages];  // its warps arrive; the loading thread waits
};

// A CTA: `rows` rows from `row` on of each of so many matrices, one after the other its slots 0, 1, ...
template <class T>
struct RowValuesCta {
  const RowValuesParams& p;
  RowValuesShared<T>& s;
  uint32_t n;  // the first matrix; heads are counted in 32 bits
  int row, rows, matrices;

  __device__ __forceinline__ void run(const RowValuesMaps& maps) const {
    const int slot = threadIdx.x % kDotRows, of = slot / rows;
    const bool exists = of < matrices;  // else its thread takes the first one, as all lanes shuffle
    const uint32_t own = n + (exists ? of : 0);
    const int own_row = row + (exists ? slot - of * rows : 0);
    const float value = find_dot_row(p.views, s.rows, own, own_row);
    __syncthreads();  // the places are there
    sum_dot_rows<T>(p.views, s.rows, value);
    const bool large = threadIdx.x / kDotRows == kDotLse && exists && is_large(value);
    const bool some_large = __syncthreads_or(large) != 0;  // and sums and values
    if (p.to.delta != nullptr && threadIdx.x < kDotRows && exists) p.to.delta[own * p.L + own_row] = s.rows.delta(slot);
    if (some_large) make_norms(maps);
    if (p.to.records != nullptr) write_records();
  }

 private:
  static __device__ __forceinline__ bool is_large(float lse) { return fabsf(lse) >= kLargeLse && !isinf(lse); }
  __device__ __forceinline__ void make_norms(const RowValuesMaps& maps) const {
    init_ring(s.full, s.empty, 4);
    mbarrier_fence_init();
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
    RingPlace<kStages> ring;
#pragma unroll 1
    for (int matrix = 0; matrix < matrices; ++matrix) {
      const int in_matrix = threadIdx.x % kDotRows;
      const bool large = in_matrix < rows && is_large(s.rows.lse(matrix * rows + in_matrix));
      if (__syncthreads_or(large) == 0) continue;
      const KeyRange range = key_range(p.sequence, n + matrix, p.S);
      const int tiles = (range.end_of_tile(row, rows) + kKeys - 1) / kKeys;
      if (warpgroup == 0) {
        multiply(ring, range, matrix, tiles);
      } else if (threadIdx.x == 128) {
        load(ring, maps, n + matrix, tiles);
      }
    }
    __syncthreads();  // the norms are there
  }
  __device__ __forceinline__ int steps() const { return static_cast<int>((p.E + kStep - 1) / kStep); }

  __device__ __forceinline__ void load(RingPlace<kStages>& ring, const RowValuesMaps& maps, uint32_t of, int tiles) const {
    TensorPosition query = {{0, row, 0, 0, 0}}, key = {};
    set_batch(query, p.views.batch, p.query, of);
    set_batch(key, p.views.batch, p.key, of);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      key.at[1] = tile * kKeys;
#pragma unroll 1
      for (int step = 0; step < steps(); ++step) {
        mbarrier_wait(shared_address(&s.empty[ring.slot]), ring.parity ^ 1);
        const uint32_t s_full = shared_address(&s.full[ring.slot]);
        mbarrier_arrive_expect_bytes(s_full, sizeof(s.query[0]) + sizeof(s.key[0]));
        query.at[0] = key.at[0] = step * kStep;
        tma_load(shared_address(s.query[ring.slot]), &maps.query, query, s_full);
        tma_load(shared_address(s.key[ring.slot]), &maps.key, key, s_full);
        ring.advance();
      }
    }
  }

  __device__ __forceinline__ void multiply(RingPlace<kStages>& ring, const KeyRange& range, int matrix, int tiles) const {
    const int first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // of this thread's two rows; the other one is 8 below
    const int64_t mask = p.mask_type != MaskType::kNone ? batch_offset(p.views.batch, p.mask, n + matrix, 0) : 0;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      float x[kKeys / 2];
#pragma unroll 1
      for (int step = 0; step < steps(); ++step) {
        mbarrier_wait(shared_address(&s.full[ring.slot]), ring.parity);
        const uint64_t a = matrix_descriptor(shared_address(s.query[ring.slot]), 1024, 0),
                       b = matrix_descriptor(shared_address(s.key[ring.slot]), 1024, 0);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k) wgmma<T, false>(x, a + k * 32 / 16, b + k * 32 / 16, step == 0 && k == 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(x);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&s.empty[ring.slot]));
        ring.advance();
      }
      add(range, mask, matrix, first, tile * kKeys + static_cast<int>(threadIdx.x % 4 * 2), x, sum);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = warp_sum<4>(sum[half]);
      const int in_matrix = first + 8 * half;
      if (threadIdx.x % 4 != 0 || !is_large(lse_of(matrix, in_matrix))) continue;
      // Written so that NaN stays NaN and an empty row stays 0.
      const float norm = total == 0.0f || fabsf(total - 1.0f) <= kTolerance<T> ? 1.0f : 1.0f / total;
      s.norm[matrix * rows + in_matrix] = norm;
      if (p.to.norm != nullptr) p.to.norm[(n + matrix) * p.L + row + in_matrix] = norm;
    }
  }

  __device__ __forceinline__ float lse_of(int matrix, int in_matrix) const {
    return in_matrix < rows ? s.rows.lse(matrix * rows + in_matrix) : 0.0f;
  }

  // x: products with the keys from `key` on.
  __device__ __forceinline__ void add(const KeyRange& range, int64_t mask, int matrix, int first, int key,
                                      float (&x)[kKeys / 2], float (&sum)[2]) const {
    const auto mask_row = [&](int half) {  // of the last row for rows that do not exist
      return mask + (row + min(first + 8 * half, rows - 1)) * p.mask.row_stride;
    };
    scale_and_mask<T>(x, p.scale, p.mask, p.mask_type, mask_row, key, range.keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hide_keys(x, half, key, first + 8 * half < rows ? range.end_of_row(row + first + 8 * half) : 0);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = lse_of(matrix, first + 8 * half);
#pragma unroll
      for (int i = 2 * half; i < kKeys / 2; i += 4) {
        sum[half] += exp2_approx((x[i] - lse) * kLog2E);
        sum[half] += exp2_approx((x[i + 1] - lse) * kLog2E);
      }
    }
  }

  // Of this CTA's queries; the last one of a matrix also those after its last query.
  __device__ __forceinline__ void write_records() const {
    const int first = row / QueryRecord::kQueries;
    const int count = (row + kDotRows < p.L ? first + kDotRows / QueryRecord::kQueries : p.to.records_of_head) - first;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) / 32; i < matrices * count; i += kDotThreads / 32) {
      const int matrix = i / count;
      write_record(matrix, first + i - matrix * count);
    }
  }
  __device__ __forceinline__ void write_record(int matrix, int record) const {
    const int lane = threadIdx.x % 32, query = record * QueryRecord::kQueries + lane;
    float lse = 0.0f, offset = negative_infinity(0.0f), delta = 0.0f;
    if (query < p.L) {
      const int slot = matrix * rows + query - row;
      const float given = s.rows.lse(slot);
      if (given != negative_infinity(0.0f)) {
        lse = isinf(given) ? given - given : given;  // of a score of +inf: NaN
        offset = weight_shift(kDataType<T>);
        delta = -s.rows.delta(slot) * (1.0f / weight_scale(kDataType<T>));
        if (is_large(lse)) {
          offset += log2f(s.norm[slot]);
        } else if (!p.to.differences) {
          offset -= lse * kLog2E;
        }
      }
    }
    const bool careful = __any_sync(0xffffffffu, p.to.differences || !(fabsf(lse) < kLargeLse));

    QueryRecord& to = p.to.records[static_cast<int64_t>(n + matrix) * p.to.records_of_head + record];
    to.lse[lane] = lse;
    to.offset[lane] = offset;
    to.delta[lane] = delta;
    if (lane == 0) {
      to.mask = p.mask_type != MaskType::kNone ? batch_offset(p.views.batch, p.mask, n + matrix, 0) : 0;
      to.n = n + matrix;
      to.query = record * QueryRecord::kQueries;
      to.careful = careful;
      for (int32_t& word : to.unused) word = 0;  // bulk copies read them
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kDotThreads, 3)
    row_values_kernel(const __grid_constant__ RowValuesParams p, const __grid_constant__ RowValuesMaps maps,
                      int64_t first_cta) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  int64_t group, tile;
  divide(first_cta + blockIdx.x, p.tiles, group, tile);
  const int64_t n = group * p.matrices, row = tile * kDotRows;
  const RowValuesCta<T> cta = {p,
                               *reinterpret_cast<RowValuesShared<T>*>(s_bytes),
                               static_cast<uint32_t>(n),
                               static_cast<int>(row),
                               static_cast<int>(min(p.L - row, int64_t{kDotRows})),
                               static_cast<int>(min(p.N - n, int64_t{p.matrices}))};
  cta.run(maps);
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

RowValuesParams row_values_params(const BackwardParams& params, const RowValues& values) {
  RowValuesParams p = {};
  p.views = {params.batch, {params.grad_out, params.out, params.grad_lse, params.lse}, static_cast<int>(params.Ev)};
  p.query = params.query;
  p.key = params.key;
  p.mask = params.mask;
  p.sequence = params.sequence;
  p.N = params.N;
  p.L = params.L;
  p.S = params.S;
  p.E = params.E;
  p.scale = static_cast<float>(params.scale);
  p.mask_type = params.mask_type;
  p.to = values;
  p.tiles = ceil_div(params.L, kDotRows);
  p.matrices = static_cast<int>(std::clamp<int64_t>(kDotRows / params.L, 1, kMostMatrices));
  return p;
}

template <class T>
cudaError_t launch_typed(const BackwardParams& params, const RowValues& values, cudaStream_t stream) {
  const RowValuesParams p = row_values_params(params, values);
  RowValuesMaps maps;
  cudaError_t status = make_tensor_map(maps.query, params.type, params.batch, params.query, params.L, params.E, kDotRows);
  if (status == cudaSuccess) {
    status = make_tensor_map(maps.key, params.type, params.batch, params.key, params.S, params.E, kKeys);
  }
  if (status != cudaSuccess) return status;
  return launch_parts(ceil_div(params.N, p.matrices) * p.tiles, kMaxCtas, [&](int64_t first, int64_t ctas) {
    row_values_kernel<T><<<static_cast<unsigned>(ctas), kDotThreads, sizeof(RowValuesShared<T>), stream>>>(p, maps, first);
  });
}

}  // namespace

cudaError_t launch_row_values(const BackwardParams& params, const RowValues& values, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, values, stream); });
}

}  // namespace attention_ext
