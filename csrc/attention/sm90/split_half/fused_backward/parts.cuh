// What the kernels of the fused backward share: a CTA's tile and its loads, products of terms, scores.
//
// A tile is 128 rows of two operands, of which each of two consumer warpgroups has 64: query and grad_out in the row kernel, key
// and value in the column kernel. One thread of a third warpgroup loads them, and in a ring blocks of 64 rows of the other two. S
// and dP, transposed in the column kernel, are products of the tile's rows and a block's; a consumer holds 64 x 64 of each.
#pragma once

#include <type_traits>

#include "attention/sm90/split_half/fused_backward/fused_backward.h"
#include "attention/sm90/split_half/segment_weights.cuh"
#include "attention/sm90/split_half/terms_map.h"
#include "core/device_info.h"
#include "core/launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma_narrow.cuh"
#include "gemm/split_half/epilogue.cuh"
#include "gemm/tile_order.cuh"

namespace attention_ext {

constexpr int kBackwardRows = 128, kBackwardBlock = kSplitHalfBlock, kBackwardScores = kBackwardBlock / 2;  // of a thread
constexpr int kBackwardConsumers = 2, kBackwardThreads = 128 * (kBackwardConsumers + 1);
constexpr int kBlockBytes = kBackwardBlock * 128;  // of one term: 64 columns, zeros beyond the operand's
constexpr int kProbabilityPower = 15;              // of P for its terms: low's least bit is 2^-24
static_assert(kBackwardBlock == kSegment, "a block of keys is a segment");

// 64 rows of what scores are made of, and of what their gradients are made of.
struct FusedBackwardBlock {
  alignas(1024) unsigned char scores[2][kBlockBytes], grads[2][kBlockBytes];
};

// kE: columns that E and Ev are taken for, 32 or 64. kRecords: of queries, for the column kernel.
template <int kE_, bool kRecords_>
struct FusedBackwardTile {
  static constexpr int kE = kE_, kStages = kRecords_ ? 4 : 5, kRegisters = 240;
  static constexpr bool kRecords = kRecords_;
  using Block = FusedBackwardBlock;
  struct Shared {
    alignas(1024) unsigned char scores[2][kBackwardRows * 128], grads[2][kBackwardRows * 128];
    Block stage[kStages];
    alignas(16) SplitHalfQueryRecord records[kRecords ? kStages : 1];
    uint64_t rows_full, rows_empty, full[kStages], empty[kStages];
  };
  static __device__ __forceinline__ void init_rows(Shared& shared) {
    mbarrier_init(shared_address(&shared.rows_full), 1);
    mbarrier_init(shared_address(&shared.rows_empty), 4 * kBackwardConsumers);
  }
  static constexpr int kStageBytes = sizeof(Block) + (kRecords ? sizeof(SplitHalfQueryRecord) : 0);
  static constexpr int kRowsBytes = 4 * kBackwardRows * 128;
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

// Terms of the tile's rows, and of a block.
struct FusedBackwardMaps {
  CUtensorMap tile_scores, tile_grads, scores, grads;
};

__device__ __forceinline__ int64_t blocks_of(int64_t rows) { return (rows + kBackwardBlock - 1) / kBackwardBlock; }

// Both terms of a box. One thread.
template <int kBytes>
__device__ __forceinline__ void load_terms(unsigned char (&s_terms)[2][kBytes], const CUtensorMap& map, int row, int64_t matrix,
                                           uint32_t full) {
#pragma unroll
  for (int term = 0; term < 2; ++term) {
    const TensorPosition box = {{0, row, term, static_cast<int>(matrix), 0}};
    tma_load(shared_address(s_terms[term]), &map, box, full);
  }
}

// Loads, tile after tile. One thread.
template <class Tile>
class FusedBackwardLoader {
 public:
  __device__ __forceinline__ FusedBackwardLoader(const FusedBackwardMaps& maps, typename Tile::Shared& shared)
      : maps_(maps), shared_(shared) {}

  __device__ __forceinline__ void load_rows(int row, int64_t matrix) {
    mbarrier_wait(shared_address(&shared_.rows_empty), parity_ ^ 1);
    parity_ ^= 1;
    const uint32_t full = shared_address(&shared_.rows_full);
    mbarrier_arrive_expect_bytes(full, Tile::kRowsBytes);
    load_terms(shared_.scores, maps_.tile_scores, row, matrix, full);
    load_terms(shared_.grads, maps_.tile_grads, row, matrix, full);
  }
  __device__ __forceinline__ void load_block(int row, int64_t matrix, const SplitHalfQueryRecord* g_record) {
    mbarrier_wait(shared_address(&shared_.empty[ring_.slot]), ring_.parity ^ 1);
    const uint32_t full = shared_address(&shared_.full[ring_.slot]);
    mbarrier_arrive_expect_bytes(full, Tile::kStageBytes);
    load_terms(shared_.stage[ring_.slot].scores, maps_.scores, row, matrix, full);
    if constexpr (Tile::kRecords) {
      bulk_load(shared_address(&shared_.records[ring_.slot]), g_record, sizeof(SplitHalfQueryRecord), full);
    }
    load_terms(shared_.stage[ring_.slot].grads, maps_.grads, row, matrix, full);
    ring_.advance();
  }

 private:
  const FusedBackwardMaps& maps_;
  typename Tile::Shared& shared_;
  RingPlace<Tile::kStages> ring_;
  uint32_t parity_ = 0;
};

// x + rest = A . B^T of two terms each, begun: 64 rows of the tile's by a block's, a part of 32 of k in each. kQueries: A is the
// query's side; the products of terms come in the same order either way, to the same bits.
template <int kE, bool kQueries>
__device__ __forceinline__ void begin_scores(float (&x)[kBackwardScores], float (&rest)[kBackwardScores],
                                             const unsigned char (&s_rows)[2][kBackwardRows * 128],
                                             const unsigned char (&s_block)[2][kBlockBytes], int consumer) {
  const auto multiply = [&](float (&part)[kBackwardScores], int k, int of_query, int of_key, bool fresh) {
    const int term_a = kQueries ? of_query : of_key, term_b = kQueries ? of_key : of_query;
    const uint64_t a = matrix_descriptor(shared_address(s_rows[term_a]) + consumer * kBlockBytes, 1024, 0),
                   b = matrix_descriptor(shared_address(s_block[term_b]), 1024, 0);
#pragma unroll
    for (int i = k; i < k + kSplitHalfPromoted; i += 16) {
      wgmma<__half, false>(part, a + i * 2 / 16, b + i * 2 / 16, fresh && i == k);
    }
  };
  const auto multiply_part = [&](float (&part)[kBackwardScores], int k) {
    multiply(part, k, 1, 0, true);  // the small ones first, while there is little to truncate
    multiply(part, k, 0, 1, false);
    multiply(part, k, 0, 0, false);
  };
  multiply_part(x, 0);
  if constexpr (kE == 64) multiply_part(rest, kSplitHalfPromoted);
}
// They are there.
template <int kE>
__device__ __forceinline__ void end_scores(float (&x)[kBackwardScores], float (&rest)[kBackwardScores]) {
  pin_registers(x);
  if constexpr (kE == 64) {
    pin_registers(rest);
#pragma unroll
    for (int i = 0; i < kBackwardScores; ++i) x[i] += rest[i];
  }
}

// part = A . B of 32 of k from `k` on, begun. A: terms of 64 x 64 in registers; B: a block, whose rows count k.
template <int kE>
__device__ __forceinline__ void begin_part(float (&part)[kE / 2], const uint32_t (&terms)[2][kBackwardBlock / 4],
                                           const unsigned char (&s_block)[2][kBlockBytes], int k) {
  const auto multiply = [&](int term_a, int term_b, bool fresh) {
    const uint64_t b = matrix_descriptor(shared_address(s_block[term_b]), 1024, kBlockBytes);
#pragma unroll
    for (int i = k; i < k + kSplitHalfPromoted; i += 16) {
      const uint32_t (&a)[4] = *reinterpret_cast<const uint32_t (*)[4]>(&terms[term_a][i / 4]);
      wgmma_half_from_registers(part, a, b + i * 128 / 16, fresh && i == k);
    }
  };
  multiply(1, 0, true);
  multiply(0, 1, false);
  multiply(0, 0, false);
}

// x as terms.
__device__ __forceinline__ void make_terms(float (&x)[kBackwardScores], uint32_t (&terms)[2][kBackwardBlock / 4]) {
  take_term(x, terms[0]);
#pragma unroll
  for (int i = 0; i < kBackwardBlock / 4; ++i) terms[1][i] = pack_pair<__half>(x[2 * i], x[2 * i + 1]);
}

// The power of two of a sum that grows by parts of different powers: the largest so far.
struct SumPower {
  int top = -(1 << 30);
  float factor = 0.0f;  // of the part's products

  // Returns what the sum so far is to be multiplied by.
  __device__ __forceinline__ float step(int power) {
    const int before = top;
    top = max(top, power);
    factor = relative_to_largest(power, top);
    return relative_to_largest(before, top);
  }
};

// How products of query and key become exponents: score * log2(e) = (product * before + mask) * unit.
struct ScoreFactor {
  float before, unit;
  bool too_large;
};
template <bool kMasked>
__device__ __forceinline__ ScoreFactor score_factor(double scale, int exponent) {
  const float power = exponent < -126 ? 0.0f : __int_as_float((min(exponent, 127) + 127) << 23);
  const float factor = static_cast<float>(scale) * power;
  const bool waits = !kMasked && factor > kLeastSplitHalfFactor;  // as in make_segment_weights
  return {waits ? 1.0f : factor, (waits ? factor : 1.0f) * kLog2E, exponent > kMostSplitHalfExponent};
}

// Brings products of grad_out and value, in units of 2^exponent, near their range; returns the unit that is left.
__device__ __forceinline__ float grads_unit(float (&grads)[kBackwardScores], int exponent) {
  exponent = min(max(exponent, -252), 252);
  if (abs(exponent) > 126) {
    const int first = exponent / 2;
    exponent -= first;
#pragma unroll
    for (int i = 0; i < kBackwardScores; ++i) grads[i] *= __int_as_float((first + 127) << 23);
  }
  return __int_as_float((exponent + 127) << 23);
}

// What a mask adds to a fragment of scores, whose rows are queries or keys: element i is row i / 2 % 2 * 8 from `row` on, and
// column i / 4 * 8 + i % 2 from `col` on. Rows from end_row on take the last one's, columns from end_col on 0. offset: of the
// matrix.
struct MaskPlace {
  int64_t offset, row_stride, col_stride;
  int row, end_row, col, end_col;
  bool pairs;  // adjacent columns lie in 8 aligned bytes, if all columns exist
};
template <class Stored>
__device__ __forceinline__ float mask_value(Stored stored) {
  if constexpr (std::is_same_v<Stored, uint8_t>) {
    return stored != 0 ? 0.0f : negative_infinity(0.0f);
  } else {
    return to_accumulator(stored);
  }
}
__device__ __forceinline__ void load_mask(float (&bias)[kBackwardScores], const MatrixView& mask, MaskType type,
                                          const MaskPlace& at) {
  visit_mask<float>(mask, type, [&](auto* g_mask) {
    using Stored = std::remove_cv_t<std::remove_reference_t<decltype(*g_mask)>>;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Stored* g_col =
          g_mask + at.offset + min(at.row + 8 * half, at.end_row - 1) * at.row_stride + at.col * at.col_stride;
      if constexpr (std::is_same_v<Stored, float>) {
        if (at.pairs) {
#pragma unroll
          for (int i = 2 * half; i < kBackwardScores; i += 4) {
            const float2 pair = *reinterpret_cast<const float2*>(g_col + i / 4 * 8);
            bias[i] = pair.x;
            bias[i + 1] = pair.y;
          }
          continue;
        }
      }
#pragma unroll
      for (int i = 2 * half; i < kBackwardScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          bias[i + e] = at.col + i / 4 * 8 + e < at.end_col ? mask_value(g_col[e * at.col_stride]) : 0.0f;
        }
        g_col += 8 * at.col_stride;
      }
    }
  });
}

// Products as they go into the exponential.
template <bool kMasked>
__device__ __forceinline__ void scale_scores(float (&x)[kBackwardScores], const ScoreFactor& factor,
                                             const float (&bias)[kBackwardScores]) {
  if (kMasked || factor.before != 1.0f) {
#pragma unroll
    for (int i = 0; i < kBackwardScores; ++i) {
      x[i] *= factor.before;
      if constexpr (kMasked) x[i] = __fadd_rn(x[i], bias[i]);  // not one multiply-add: finfo.min is not to be rounded away
    }
  }
}

// Both products of 64 queries and 64 keys, begun; x: scores as they go into the exponential, -inf where a row does not see the key.
// The tile's rows and a block's are what scores are made of, and what their gradients are made of. `open`: keys that all rows of a
// warp see. load_bias(bias) reads the mask while they are multiplied.
template <class Tile, bool kMasked, class LoadBias>
__device__ __forceinline__ ScoreFactor make_row_scores(float (&x)[kBackwardScores], float (&grads)[kBackwardScores],
                                                       float (&rest)[kBackwardScores],
                                                       const unsigned char (&s_score_rows)[2][kBackwardRows * 128],
                                                       const unsigned char (&s_grad_rows)[2][kBackwardRows * 128],
                                                       const typename Tile::Block& block, int consumer, double scale,
                                                       int exponent, const KeyRange& range, int row, int end_row, int key,
                                                       int open, LoadBias load_bias) {
  const ScoreFactor factor = score_factor<kMasked>(scale, exponent);
  float x_rest[kBackwardScores], bias[kBackwardScores];
  wgmma_fence();
  begin_scores<Tile::kE, true>(x, x_rest, s_score_rows, block.scores, consumer);
  wgmma_commit();
  const auto begin_grads = [&] {
    begin_scores<Tile::kE, true>(grads, rest, s_grad_rows, block.grads, consumer);
    wgmma_commit();
  };
  if constexpr (kMasked) {  // its registers are dP's afterwards
    load_bias(bias);
    wgmma_wait<0>();
  } else {
    begin_grads();
    wgmma_wait<1>();
  }
  end_scores<Tile::kE>(x, x_rest);
  scale_scores<kMasked>(x, factor, bias);
  if constexpr (kMasked) {
    wgmma_fence();
    begin_grads();
  }
  if (key + kBackwardBlock > open) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hide_keys(x, half, key + static_cast<int>(threadIdx.x) % 4 * 2,
                row + 8 * half < end_row ? range.end_of_row(row + 8 * half) : 0);
    }
  }
  return factor;
}

// The power of two of a row's dS, of which this thread's largest magnitude is given, the other three lanes' found here: the row's
// largest is in [2^14, 2^15) of it. `factor` takes dS there. Of zeros the power is less than any.
struct RowScale {
  int exponent;
  float factor;
  bool finite;

  __device__ __forceinline__ explicit RowScale(float own) {
    uint32_t bits = __float_as_uint(own);
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
    finite = bits < 0x7f800000u;
    const int least = max(static_cast<int>(bits >> 23), 15);  // below, a row's elements are subnormal, or next to it
    exponent = bits == 0 ? -(1 << 29) : least - 127 - 14;
    factor = __int_as_float((127 + 127 + 14 - least) << 23);
  }
};

// Stores a fragment's rows that exist: `of(i, half)` is element i.
template <int kCount, class Of>
__device__ __forceinline__ void store_fragment(const MatrixView& view, int64_t offset, int row, int64_t end_row, int64_t width,
                                               Of of) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= end_row) continue;
    float* g_row = static_cast<float*>(view.data) + offset + (row + 8 * half) * view.row_stride;
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
      const int col = i / 4 * 8 + threadIdx.x % 4 * 2;
      const float pair[2] = {of(i, half), of(i + 1, half)};
      if (view.vector && col + 1 < width) {
        *reinterpret_cast<float2*>(g_row + col) = make_float2(pair[0], pair[1]);
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (col + e < width) g_row[(col + e) * view.col_stride] = pair[e];
        }
      }
    }
  }
}

// All kernels: load() by one thread, make(consumer) by each consumer.
template <class Tile, class Load, class Make>
__device__ __forceinline__ void run_roles(typename Tile::Shared& shared, Load load, Make make) {
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  if (threadIdx.x == 0) Tile::init_rows(shared);
  init_ring(shared.full, shared.empty, 4 * kBackwardConsumers);
  mbarrier_fence_init();
  __syncthreads();
  if (warpgroup == kBackwardConsumers) {
    give_registers<504 - kBackwardConsumers * Tile::kRegisters>();       // of the 168 that each thread begins with
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform as well
    if (warp == 0 && elect_thread()) load();
  } else {
    take_registers<Tile::kRegisters>();
    make(warpgroup);
  }
}

// Maps and the launch of either kernel: `rows` and `others` of so many matrices each, terms of the tile's operands first.
template <class Tile, class Params>
cudaError_t launch_fused_backward(void (*kernel)(Params, FusedBackwardMaps), const Params& params, void* const (&terms)[4],
                                  int64_t matrices, int64_t rows, int64_t other_matrices, int64_t others, int64_t tiles,
                                  cudaStream_t stream) {
  FusedBackwardMaps maps;
  cudaError_t status = make_terms_map(maps.tile_scores, terms[0], matrices, rows, params.E, kBackwardRows);
  const auto then = [&](cudaError_t made) {
    if (status == cudaSuccess) status = made;
  };
  then(make_terms_map(maps.tile_grads, terms[1], matrices, rows, params.Ev, kBackwardRows));
  then(make_terms_map(maps.scores, terms[2], other_matrices, others, params.E, kBackwardBlock));
  then(make_terms_map(maps.grads, terms[3], other_matrices, others, params.Ev, kBackwardBlock));
  if (status != cudaSuccess) return status;
  const LaunchShape shape = {std::min(tiles, current_device_info().sms), kBackwardThreads, sizeof(typename Tile::Shared)};
  return launch_kernel(kernel, shape, stream, params, maps);
}

}  // namespace attention_ext
