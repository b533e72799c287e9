// The row kernel of the fused backward of float32 attention by half terms (Hopper): dQ = scale * dS K, where dS = P (dP - delta),
// P = softmax(scale Q K^T + mask) and dP = dO V^T, without scores in memory.
//
// A CTA takes 128 query rows, 64 for each of two consumer warpgroups, and walks over the segments of 64 keys twice.
// 1. S and dP: of each row the reference of its weights, their sum and delta = sum of P dP - grad_lse, as an online softmax whose
//    references are whole numbers, so that weights come to another one exactly. They go to the column kernel, too.
// 2. S and dP again, to the same bits: dS as two half terms with a power of two for each row, which stay in registers, where a
//    result of wgmma lies as an operand of it does; dQ grows by parts of 32 keys, relative to the row's largest power so far.
// While S is there, dP is still multiplied; what a warpgroup makes of both runs under the products of the other one, too.
// Grid: persistent CTAs, one an SM; causal: longest first. Shared memory: FusedBackwardTile::Shared, 225 KB. Registers: 240 a
// consumer thread: 32 each of S, dP and their second parts, and of dQ (half as many up to head dim 32).
#include "attention/sm90/split_half/fused_backward/parts.cuh"
#include "attention/sm90/split_half/fused_backward/row_sums.cuh"

namespace attention_ext {
namespace {

struct RowTile {
  int64_t n, slice_index, key_matrix;
  int row, segments;  // the first row; segments that any of the rows sees
  KeyRange range;
};
// Tile after tile of a CTA.
template <class Visit>
__device__ __forceinline__ void for_each_row_tile(const SplitHalfFusedBackwardParams& p, Visit visit) {
  const int m_tiles = static_cast<int>((p.slice.row_count + kBackwardRows - 1) / kBackwardRows);
  const unsigned tiles = static_cast<unsigned>(p.slice.batch_count) * m_tiles;
#pragma unroll 1
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TileIndex index =
        p.sequence.causal ? longest_first(tile, m_tiles, 1, p.slice.batch_count) : tile_of(tile, m_tiles, 1, 0);
    RowTile at;
    at.slice_index = index.batch;
    at.n = p.slice.batch_begin + index.batch;
    at.key_matrix = matrix_of_slice(at.n, p.slice, p.group);
    at.row = index.m * kBackwardRows;
    at.range = key_range(p.sequence, at.n, p.slice.col_count);
    at.segments = (at.range.end_of_tile(at.row, kBackwardRows) + kSegment - 1) / kSegment;
    visit(at);
  }
}

template <class Tile, bool kMasked>
class RowGrads {
 public:
  using Params = SplitHalfFusedBackwardParams;
  __device__ __forceinline__ RowGrads(const Params& p, typename Tile::Shared& shared, int consumer)
      : p_(p), shared_(shared), consumer_(consumer) {}

  __device__ __forceinline__ void run() {
    uint32_t parity = 0;
    const int thread_row = consumer_ * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    for_each_row_tile(p_, [&](const RowTile& at) {
      const int end_row = static_cast<int>(p_.slice.row_count), row = at.row + thread_row;
      const int first = at.row + consumer_ * 64;  // of the warpgroup
      const int segments = first >= end_row ? 0 : (at.range.end_of_tile(first, 64) + kSegment - 1) / kSegment;
      const int open = open_keys(at.range, row, end_row);
      mbarrier_wait(shared_address(&shared_.rows_full), parity);
      parity ^= 1;
      float offset[2], inverse[2], delta[2];
      find_rows(at, row, segments, open, offset, inverse, delta);
      __syncwarp();  // some lanes stored
      make_grads(at, row, segments, open, offset, inverse, delta);
    });
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ void wait_stage() { mbarrier_wait(shared_address(&shared_.full[ring_.slot]), ring_.parity); }
  __device__ __forceinline__ void release_stage() {
    if (lane() == 0) mbarrier_arrive(shared_address(&shared_.empty[ring_.slot]));
    ring_.advance();
  }
  // Of the warpgroup's rows and a segment: of products for scores, for their gradients, and of the keys alone. Read before the
  // products, as they would wait for it.
  struct Exponents {
    int scores, grads, keys;
  };
  __device__ __forceinline__ Exponents exponents_of(const RowTile& at, int segment) const {
    const int64_t block = at.slice_index * blocks_of(p_.slice.row_count) + (at.row + consumer_ * 64) / kBackwardBlock,
                  key_block = at.key_matrix * blocks_of(p_.slice.col_count) + segment;
    const int keys = p_.key_exponents[key_block];
    return {p_.query_exponents[block] + keys, p_.grad_out_exponents[block] + p_.value_exponents[key_block], keys};
  }

  __device__ __forceinline__ ScoreFactor make_scores(const RowTile& at, int row, int segment, int open, int exponent,
                                                     float (&x)[kBackwardScores], float (&grads)[kBackwardScores],
                                                     float (&rest)[kBackwardScores]) {
    const int key = segment * kSegment, end_row = static_cast<int>(p_.slice.row_count);
    wait_stage();
    return make_row_scores<Tile, kMasked>(
        x, grads, rest, shared_.scores, shared_.grads, shared_.stage[ring_.slot], consumer_, p_.scale, exponent, at.range, row,
        end_row, key, open, [&](float (&bias)[kBackwardScores]) {
          load_mask(bias, p_.mask, p_.mask_type,
                    {batch_offset(p_.batch, p_.mask, static_cast<uint32_t>(at.n), 0), p_.mask.row_stride, p_.mask.col_stride,
                     row, end_row, key + lane() % 4 * 2, at.range.keys, p_.mask.vector && key + kSegment <= at.range.keys});
        });
  }
  // Ends the second one; returns the unit of the gradients.
  static __device__ __forceinline__ float end_grads(float (&grads)[kBackwardScores], float (&rest)[kBackwardScores],
                                                    int exponent) {
    wgmma_wait<0>();
    end_scores<Tile::kE>(grads, rest);
    return grads_unit(grads, exponent);
  }

  // The first walk.
  __device__ __forceinline__ void find_rows(const RowTile& at, int row, int segments, int open, float (&offset)[2],
                                            float (&inverse)[2], float (&delta)[2]) {
    RowSums rows[2];
    float largest_grad = 0.0f;  // whose weight is not 0
    bool marked = false;
#pragma unroll 1
    for (int segment = 0; segment < at.segments; ++segment) {
      if (segment >= segments) {  // the other warpgroup's last ones
        wait_stage();
        release_stage();
        continue;
      }
      float x[kBackwardScores], grads[kBackwardScores], rest[kBackwardScores];
      const Exponents exponents = exponents_of(at, segment);
      const ScoreFactor factor = make_scores(at, row, segment, open, exponents.scores, x, grads, rest);
      marked = marked || factor.too_large;
      bool single[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = negative_infinity(0.0f);
#pragma unroll
        for (int i = 2 * half; i < kBackwardScores; i += 4) largest = maximum(largest, maximum(x[i], x[i + 1]));
        largest = warp_max<4>(largest);
        single[half] = segment == 0 && at.range.end_of_row(row + 8 * half) == 1;
        if constexpr (kMasked) {
          float keys = 0.0f;
#pragma unroll
          for (int i = 2 * half; i < kBackwardScores; i += 4) {
#pragma unroll
            for (int e = 0; e < 2; ++e) keys += x[i + e] != negative_infinity(0.0f) ? 1.0f : 0.0f;
          }
          keys = warp_sum<4>(keys);
          single[half] = keys == 1.0f && rows[half].keys == 0.0f;
          rows[half].keys += keys;
        }
        const float of_segment = rows[half].step(largest, factor.unit);
        float sum = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < kBackwardScores; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            x[i + e] = exp2_approx(fmaf(x[i + e], factor.unit, of_segment));
            sum += x[i + e];
          }
        }
        rows[half].sum.add(sum);
      }
      const float unit = end_grads(grads, rest, exponents.grads);
      release_stage();
      float of_segment = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < kBackwardScores; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (x[i + e] == 0.0f) continue;
            part = fmaf(x[i + e], grads[i + e], part);
            of_segment = maximum(of_segment, fabsf(grads[i + e]));
          }
        }
        rows[half].delta.add(part * unit);
      }
      largest_grad = maximum(largest_grad, of_segment * unit);
      if (__any_sync(0xffffffffu, single[0] || single[1])) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float of_key = 0.0f;
#pragma unroll
          for (int i = 2 * half; i < kBackwardScores; i += 4) {
#pragma unroll
            for (int e = 0; e < 2; ++e) of_key += x[i + e] == 0.0f ? 0.0f : grads[i + e] * unit;
          }
          of_key = warp_sum<4>(of_key);
          if (single[half]) rows[half].single = of_key;
        }
      }
    }
    end_rows(at, row, rows, marked, largest_grad, offset, inverse, delta);
  }

  // What the rows have come to, for the second walk and for the column kernel.
  __device__ __forceinline__ void end_rows(const RowTile& at, int row, const RowSums (&rows)[2], bool marked,
                                           float largest_grad, float (&offset)[2], float (&inverse)[2],
                                           float (&delta)[2]) const {
    const int end_row = static_cast<int>(p_.slice.row_count);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowSums& of = rows[half];
      const int at_row = row + 8 * half;
      const bool exists = at_row < end_row, none = of.reference == negative_infinity(0.0f);
      const bool single = kMasked ? of.keys == 1.0f : at.range.end_of_row(at_row) == 1;
      const double sum = of.sum.of_row(), of_keys = of.delta.of_row();
      offset[half] = none ? of.reference : -of.reference;
      inverse[half] = none || sum == 0.0 ? 0.0f : static_cast<float>(1.0 / sum);
      delta[half] = none ? 0.0f : single ? of.single : static_cast<float>(of_keys / sum);
      if (p_.grad_lse.data != nullptr && exists && !none) {
        delta[half] -= (static_cast<const float*>(p_.grad_lse.data) +
                        batch_offset(p_.batch, p_.grad_lse, static_cast<uint32_t>(at.n), 0))[at_row * p_.grad_lse.row_stride];
      }
      const bool far =
          of.reference < kFarBelow + 256.0f || (of.reference > kFarAbove && of.reference < -negative_infinity(0.0f));
      // Of NaN alone there is no reference.
      marked = marked || (!none && far) || !isfinite(sum) || !isfinite(delta[half]);
    }
    if (row - static_cast<int>(lane() / 4) >= end_row) marked = false;
    if (marked) p_.marks[at.n] = 1;
    const uint32_t largest = __reduce_max_sync(0xffffffffu, __float_as_uint(largest_grad));
    uint32_t& of_matrix = p_.largest_grads[at.n];
    if (lane() == 0 && largest > of_matrix) atomicMax(&of_matrix, largest);

    const int block = row / kBackwardBlock;
    const int64_t blocks = blocks_of(p_.slice.row_count);
    if (lane() % 4 != 0 || block >= blocks) return;
    SplitHalfQueryRecord& record = p_.records[at.slice_index * blocks + block];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = row % kBackwardBlock + 8 * half;
      record.offset[place] = offset[half];
      record.inverse[place] = inverse[half] * static_cast<float>(1 << kProbabilityPower);
      record.delta[place] = delta[half];
    }
  }

  // The second walk.
  __device__ __forceinline__ void make_grads(const RowTile& at, int row, int segments, int open, const float (&offset)[2],
                                             const float (&inverse)[2], const float (&delta)[2]) {
    constexpr int kOut = Tile::kE / 2;
    SumPower powers[2];
    float out[kOut];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] = 0.0f;
#pragma unroll 1
    for (int segment = 0; segment < at.segments; ++segment) {
      if (segment >= segments) {
        wait_stage();
        release_stage();
        continue;
      }
      float x[kBackwardScores], grads[kBackwardScores], rest[kBackwardScores];
      const Exponents exponents = exponents_of(at, segment);
      const ScoreFactor factor = make_scores(at, row, segment, open, exponents.scores, x, grads, rest);
#pragma unroll
      for (int i = 0; i < kBackwardScores; ++i) {
        x[i] = exp2_approx(fmaf(x[i], factor.unit, offset[i / 2 % 2])) * inverse[i / 2 % 2];
      }
      const float unit = end_grads(grads, rest, exponents.grads);
      float before[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 2 * half; i < kBackwardScores; i += 4) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            x[i + e] = x[i + e] == 0.0f ? 0.0f : x[i + e] * fmaf(grads[i + e], unit, -delta[half]);
            largest = maximum(largest, fabsf(x[i + e]));
          }
        }
        const RowScale scale(largest);
        finite = finite && scale.finite;
#pragma unroll
        for (int i = 2 * half; i < kBackwardScores; i += 4) {
          x[i] *= scale.factor;
          x[i + 1] *= scale.factor;
        }
        before[half] = powers[half].step(scale.exponent + exponents.keys);
      }
      uint32_t terms[2][kBackwardBlock / 4];
      make_terms(x, terms);
      if (__any_sync(0xffffffffu, before[0] != 1.0f || before[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) out[i] *= before[i / 2 % 2];
      }
      const auto& s_key = shared_.stage[ring_.slot].scores;
      float part[2][kOut];
      wgmma_fence();
      begin_part<Tile::kE>(part[0], terms, s_key, 0);
      wgmma_commit();
      begin_part<Tile::kE>(part[1], terms, s_key, kSplitHalfPromoted);
      wgmma_commit();
      wgmma_wait<1>();
      pin_registers(part[0]);
#pragma unroll
      for (int i = 0; i < kOut; ++i) out[i] = fmaf(part[0][i], powers[i / 2 % 2].factor, out[i]);
      wgmma_wait<0>();
      pin_registers(part[1]);
      release_stage();
#pragma unroll
      for (int i = 0; i < kOut; ++i) out[i] = fmaf(part[1][i], powers[i / 2 % 2].factor, out[i]);
    }
    if (lane() == 0) mbarrier_arrive(shared_address(&shared_.rows_empty));
    if (!finite) p_.marks[at.n] = 1;
    store_fragment<kOut>(
        p_.grad_query, batch_offset(p_.batch, p_.grad_query, static_cast<uint32_t>(at.n), 0), row, p_.slice.row_count, p_.E,
        [&](int i, int half) { return times_power_of_two(out[i] * static_cast<float>(p_.scale), powers[half].top); });
  }

  const Params& p_;
  typename Tile::Shared& shared_;
  const int consumer_;
  RingPlace<Tile::kStages> ring_;
};

template <class Tile, bool kMasked>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    split_half_fused_rows_kernel(const __grid_constant__ SplitHalfFusedBackwardParams p,
                                 const __grid_constant__ FusedBackwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const auto load = [&] {
    FusedBackwardLoader<Tile> loader(maps, shared);
    for_each_row_tile(p, [&](const RowTile& at) {
      loader.load_rows(at.row, at.slice_index);
#pragma unroll 1
      for (int walk = 0; walk < 2; ++walk) {
#pragma unroll 1
        for (int segment = 0; segment < at.segments; ++segment) {
          loader.load_block(segment * kSegment, at.key_matrix, nullptr);
        }
      }
    });
  };
  run_roles<Tile>(shared, load, [&](int consumer) { RowGrads<Tile, kMasked>(p, shared, consumer).run(); });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

}  // namespace

cudaError_t launch_split_half_row_grads(const SplitHalfFusedBackwardParams& params, void* query_terms, void* key_terms,
                                        void* grad_out_terms, void* value_terms, cudaStream_t stream) {
  const Slice& slice = params.slice;
  void* const terms[4] = {query_terms, grad_out_terms, key_terms, value_terms};
  const auto launch = [&](auto tile, auto kernel) {
    return launch_fused_backward<decltype(tile)>(kernel, params, terms, slice.batch_count, slice.row_count,
                                                 matrices_of_slice(slice, params.group), slice.col_count,
                                                 slice.batch_count * ceil_div(slice.row_count, kBackwardRows), stream);
  };
  const auto of_tile = [&](auto tile) {
    using Tile = decltype(tile);
    return params.mask_type != MaskType::kNone ? launch(tile, split_half_fused_rows_kernel<Tile, true>)
                                               : launch(tile, split_half_fused_rows_kernel<Tile, false>);
  };
  return std::max(params.E, params.Ev) <= 32 ? of_tile(FusedBackwardTile<32, false>())
                                             : of_tile(FusedBackwardTile<64, false>());
}

}  // namespace attention_ext
