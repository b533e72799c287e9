// Backward by wgmma (Hopper), first part: P = exp(scale * Q . K^T + mask - lse) and dS = P * (dP - delta), where
// dP = keep / (1 - p) * dO . V^T. What a CTA does with one tile.
//
// It makes both of a tile of 128 queries by 256 keys, one after the other in the same accumulators:
// 1. S = Q . K^T. Epilogue: probabilities, rounded, to memory and, packed in pairs, in registers.
// 2. dP = dO . V^T. Epilogue: dS, to memory.
// Nothing is read back. The two warpgroups are two steps apart, so that the epilogues of one meet products of the other.
// P and dS lie row after row as (matrix, row, key): TMA reads such a matrix for wgmma along keys and along rows alike.
// Registers: 240 a consumer thread: 128 sums, 64 pairs of P, the rest addresses.
#pragma once

#include "attention/sm90/pipeline/backward.h"
#include "attention/visibility/dropout.cuh"
#include "attention/visibility/score_modifier.cuh"
#include "attention/visibility/score_place.cuh"
#include "core/dispatch.h"
#include "core/tensor_map.h"
#include "device/sm80/positive_pair.cuh"
#include "gemm/sm90/steps.cuh"

namespace attention_ext {

template <class T>
using ScoreGradientsTile = WgmmaTile<T, false, 256, 240>;

struct ScoreGradientsMaps {
  CUtensorMap query, key, grad_out, value;
};

// What is known of a tile before it is loaded, in shared memory.
struct ScorePlan {
  ScorePlace at;
  int64_t lse, mask, out;                      // offsets of its matrix; of its first element in P and dS
  TensorPosition query, key, grad_out, value;  // the first boxes
};

// kModified: there is a mask or dropout.
template <class T, bool kModified>
struct ScoreGradients {
  using Tile = ScoreGradientsTile<T>;
  static constexpr int kPart = 64, kParts = Tile::kN / kPart;  // columns at a time, as many as a strip has
  static constexpr float kWeightScale = weight_scale(kDataType<T>);

  const ScoreGradientsParams& p;
  const ScoreTiles<Tile, true>& tiles;

  static __device__ __forceinline__ int steps_of(int64_t width) { return static_cast<int>((width + Tile::kK - 1) / Tile::kK); }
  __device__ __forceinline__ void make_plan(ScorePlan& plan, unsigned tile) const {
    plan.at = score_place<Tile, uint32_t>(p.slice, p.sequence, tiles.at(tile));
    const ScorePlace& at = plan.at;
    const uint32_t n = static_cast<uint32_t>(at.n),
                   place = static_cast<uint32_t>(at.slice_index) % static_cast<uint32_t>(p.places);
    plan.lse = batch_offset(p.batch, p.lse, n, at.slice_index);
    plan.mask = kModified && p.mask_type != MaskType::kNone ? batch_offset(p.batch, p.mask, n, at.slice_index) : 0;
    plan.out = place * p.probabilities.slice_stride + at.slice_row * p.probabilities.row_stride + at.slice_col;
    plan.query = box(at.row, p.query, n);
    plan.key = box(at.col, p.key, n);
    plan.grad_out = box(at.row, p.grad_out, n);
    plan.value = box(at.col, p.value, n);
  }
  __device__ __forceinline__ TensorPosition box(int row, const MatrixView& view, uint32_t n) const {
    keep_order();  // one after the other: what they read takes registers
    TensorPosition box = {{0, row, 0, 0, 0}};
    set_batch(box, p.batch, view, n);
    return box;
  }

  // The operands of a tile.
  __device__ __forceinline__ void load(StepLoader<Tile>& loader, const ScoreGradientsMaps& maps, ScorePlan& plan) const {
    const int of_scores = plan.at.hidden ? 0 : steps_of(p.E), of_weights = plan.at.hidden ? 0 : steps_of(p.Ev);
    loader.expect(of_scores + of_weights);
    loader.template load<false, false>(maps.query, plan.query, maps.key, plan.key, of_scores);
    loader.template load<false, false>(maps.grad_out, plan.grad_out, maps.value, plan.value, of_weights);
  }

  // What a thread needs of its two rows.
  struct Rows {
    float lse[2];  // +inf where there is no such row, or it sees no key: a probability of 0
  };

  // A tile's P and dS; false: no row sees any of it, and nothing is done.
  __device__ __forceinline__ bool multiply(StepMultiplier<Tile>& multiplier, typename Tile::Shared& shared,
                                           const ScorePlan& plan) const {
    const ScorePlace& at = plan.at;
    if (at.hidden) return false;
    float delta[2];
    uint32_t weights[Tile::kN / 4];
    float product[Tile::kN / 2];
    const Rows rows = fetch(plan);
    multiplier.template multiply<false, false>(product, steps_of(p.E));
    const bool large = !(fabsf(rows.lse[0]) < kLargeLse && fabsf(rows.lse[1]) < kLargeLse);
    const bool plain = !kModified && wholly_visible<Tile>(at) && scales_exponents(static_cast<float>(p.scale)) &&
                       !__any_sync(0xffffffffu, large);
    if (plain) {
      make_probabilities<true>(plan, rows, product, weights, shared);
    } else {
      make_probabilities<false>(plan, rows, product, weights, shared);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // read only now: the epilogue has no registers for them
      const int of = row_anew() + 8 * half;
      delta[half] = of < at.rows ? p.delta[at.n * p.L + at.row + of] : 0.0f;
    }
    multiplier.template multiply<false, false>(product, steps_of(p.Ev));
    if (plain) {
      make_score_grad<true>(plan, delta, product, weights, shared);
    } else {
      make_score_grad<false>(plan, delta, product, weights, shared);
    }
    return true;
  }

  __device__ __forceinline__ Rows fetch(const ScorePlan& plan) const {
    const ScorePlace& at = plan.at;
    const int row = row_anew();
    const float* g_lse = static_cast<const float*>(p.lse.data) + plan.lse;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = row + 8 * half;
      const bool exists = of < at.rows;
      const float lse = exists ? g_lse[(at.row + of) * p.lse.row_stride] : negative_infinity(0.0f);
      rows.lse[half] = !isinf(lse) ? lse : lse < 0.0f ? -lse : lse - lse;  // of a score of +inf: NaN
    }
    return rows;
  }

  // From products of query and key: the probabilities as they are rounded, those that dropout drops with the sign. kPlain: all
  // rows and keys exist and are visible, and no row's log-sum-exp is large.
  template <bool kPlain>
  __device__ __forceinline__ void make_probabilities(const ScorePlan& plan, const Rows& rows,
                                                     const float (&product)[Tile::kN / 2], uint32_t (&weights)[Tile::kN / 4],
                                                     typename Tile::Shared& shared) const {
    const ScorePlace& at = plan.at;
    const int row = row_anew();
    const float scale = static_cast<float>(p.scale);
    // Without a mask exponents are made of products, by one multiply-add.
    const bool products = (!kModified || p.mask_type == MaskType::kNone) && scales_exponents(scale);
    const float before = products ? 1.0f : scale, after = products ? scale : 1.0f, unit = after * kLog2E;
    constexpr float kShift = kWeightScale == 1.0f ? 0.0f : 8.0f;
    static_assert(kWeightScale == 1.0f || kWeightScale == 256.0f, "2 to the power of kShift");
    float offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offset[half] = kShift - rows.lse[half] * kLog2E;
      if (kPlain || fabsf(rows.lse[half]) < kLargeLse) continue;
      const bool seen = rows.lse[half] != -negative_infinity(0.0f);
      offset[half] = kShift + (seen ? log2f(p.norm[at.n * p.L + at.row + row + 8 * half]) : 0.0f);
    }
    store_parts<kPlain>(plan, p.probabilities, shared, [&](int part, uint32_t (&pairs)[kPart / 4]) {
      float x[kPart / 2];
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) x[i] = product[part * (kPart / 2) + i];
      pin_registers(x);  // one part after another
      if constexpr (!kPlain) to_scores(at, row_anew(), plan.mask, before, at.col + part * kPart, x);
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) {
        const int half = i / 2 % 2;
        // A score as large as its log-sum-exp: the difference first. It is exact, and nothing of it is lost in the factor.
        const bool usual = kPlain || fabsf(rows.lse[half]) < kLargeLse;
        x[i] = exp2_approx(fmaf(usual ? x[i] : __fmul_rn(after, x[i]) - rows.lse[half], usual ? unit : kLog2E, offset[half]));
      }
#pragma unroll
      for (int i = 0; i < kPart / 4; ++i) pairs[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
      pin_registers(pairs);
      const bool dropping = kModified && forget_object(p).dropout.seed != nullptr;
      if (dropping) mark_dropped(at, row_anew(), part, pairs);
#pragma unroll
      for (int i = 0; i < kPart / 4; ++i) weights[part * (kPart / 4) + i] = pairs[i];
      if (dropping) {
#pragma unroll
        for (int i = 0; i < kPart / 4; ++i) pairs[i] = positive_pair<T>(pairs[i]);
      }
    });
  }

  // x: products with the keys from `first_key` on, in; times `factor`, with the mask, -inf where a row does not see a key, out.
  __device__ __forceinline__ void to_scores(const ScorePlace& at, int row, int64_t mask, float factor, int first_key,
                                            float (&x)[kPart / 2]) const {
    const int key = first_key + static_cast<int>(threadIdx.x % 4 * 2);
    const auto mask_row = [&](int half) {  // of the last row for rows that do not exist
      return mask + (at.row + min(row + 8 * half, at.rows - 1)) * p.mask.row_stride;
    };
    scale_and_mask<T>(x, factor, p.mask, kModified ? p.mask_type : MaskType::kNone, mask_row, key, at.range.keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hide_keys(x, half, key, row + 8 * half < at.rows ? at.range.end_of_row(at.row + row + 8 * half) : 0);
    }
  }

  // The sign for those of a part's probabilities that dropout drops. Slices may begin at any row.
  __device__ __forceinline__ void mark_dropped(const ScorePlace& at, int row, int part, uint32_t (&pairs)[kPart / 4]) const {
    const int first = at.row + row, key = at.col + part * kPart;
    const auto mark = [&](int i, bool kept) {
      if (!kept) pairs[i / 2] ^= i % 2 == 0 ? 0x8000u : 0x80000000u;
    };
    if (at.row % 16 == 0) {
      visit_kept<kPart / 2>(p.dropout, at.n, first, key, mark);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) visit_kept_of_row<kPart / 2>(half, p.dropout, at.n, first + 8 * half, key, mark);
    }
  }

  // From products of grad_out and value: dS.
  template <bool kPlain>
  __device__ __forceinline__ void make_score_grad(const ScorePlan& plan, const float (&delta)[2],
                                                  const float (&product)[Tile::kN / 2], const uint32_t (&weights)[Tile::kN / 4],
                                                  typename Tile::Shared& shared) const {
    constexpr float kUnscale = 1.0f / kWeightScale;
    const bool dropping = kModified && p.dropout.seed != nullptr;
    const float factor = dropping ? static_cast<float>(p.dropout.keep_scale) * kUnscale : kUnscale;
    const float offset[2] = {-delta[0] * kUnscale, -delta[1] * kUnscale};
    store_parts<kPlain>(plan, p.score_grad, shared, [&](int part, uint32_t (&pairs)[kPart / 4]) {
#pragma unroll
      for (int i = 0; i < kPart / 4; ++i) {
        const float2 weight = unpack_pair(weights[part * (kPart / 4) + i], static_cast<const T*>(nullptr));
        const float* of_weights = &product[part * (kPart / 2) + 2 * i];
        float grad[2] = {fmaf(of_weights[0], factor, offset[i % 2]), fmaf(of_weights[1], factor, offset[i % 2])};
        if (dropping && weight.x < 0.0f) grad[0] = offset[i % 2];
        if (dropping && weight.y < 0.0f) grad[1] = offset[i % 2];
        float x[2] = {fabsf(weight.x) * grad[0], fabsf(weight.y) * grad[1]};
        if constexpr (!kPlain) {  // whatever a key that is not seen holds
          if (weight.x == 0.0f) x[0] = 0.0f;
          if (weight.y == 0.0f) x[1] = 0.0f;
        }
        pairs[i] = pack_pair<T>(x[0], x[1]);
      }
    });
  }

  // What follows from it is not held during products.
  static __device__ __forceinline__ int lane_anew() { return static_cast<int>(forget(threadIdx.x)) % 32; }
  static __device__ __forceinline__ int warp_row_anew() { return static_cast<int>(forget(threadIdx.x)) / 32 * 16; }
  // The tile's parts, one after another as make(part, pairs) makes them.
  template <bool kWhole, class Make>
  __device__ __forceinline__ void store_parts(const ScorePlan& plan, const MatrixView& view, typename Tile::Shared& shared,
                                              const Make& make) const {
    const ScorePlace& at = plan.at;
    // Where this lane's chunks begin.
    T* g_out =
        static_cast<T*>(view.data) + plan.out + (warp_row_anew() + lane_anew() / 8) * view.row_stride + lane_anew() % 8 * 8;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part * kPart >= at.cols) break;
      uint32_t pairs[kPart / 4];
      make(part, pairs);
      const int lane = lane_anew(), warp_row = warp_row_anew();
      for_each_chunk<T, 4>(
          pairs, strip_anew<Tile>(shared),
          [&](int chunk_row, int chunk_col, const T* chunk) {
            // A chunk that begins at an existing key may end after the last one, still inside the row's pitch: zeros.
            if (kWhole || (warp_row + chunk_row < at.rows && part * kPart + chunk_col < at.cols)) {
              *reinterpret_cast<uint4*>(g_out + part * kPart + (chunk_row - lane / 8) * view.row_stride) =
                  *reinterpret_cast<const uint4*>(chunk);
            }
          },
          lane);
    }
  }
};

template <class T>
cudaError_t make_score_gradients_maps(ScoreGradientsMaps& maps, const ScoreGradientsParams& params) {
  using Tile = ScoreGradientsTile<T>;
  const Slice& slice = params.slice;
  const int64_t rows = slice.row_begin + slice.row_count, keys = slice.col_begin + slice.col_count;
  const auto map = [&](CUtensorMap& to, const MatrixView& view, int64_t lines, int64_t width, int box) {
    return make_tensor_map(to, params.type, params.batch, view, lines, width, box);
  };
  cudaError_t status = map(maps.query, params.query, rows, params.E, Tile::kM);
  if (status == cudaSuccess) status = map(maps.key, params.key, keys, params.E, Tile::kN);
  if (status == cudaSuccess) status = map(maps.grad_out, params.grad_out, rows, params.Ev, Tile::kM);
  if (status == cudaSuccess) status = map(maps.value, params.value, keys, params.Ev, Tile::kN);
  return status;
}

template <class T>
ScoreTiles<ScoreGradientsTile<T>, true> score_gradients_tiles(const ScoreGradientsParams& params) {
  Slice from_keys = params.slice;  // every row of a causal slice sees its first key, from which tiles may as well be counted
  from_keys.row_begin -= from_keys.col_begin;
  from_keys.col_begin = 0;
  return {from_keys, params.sequence.causal};
}

inline bool modified(const ScoreGradientsParams& params) {
  return params.mask_type != MaskType::kNone || params.dropout.seed != nullptr;
}

}  // namespace attention_ext
