// The column kernel of the fused backward of float32 attention by half terms (Hopper): dV = P^T dO and dK = scale * dS^T Q, where
// dS = P (dP - delta) and dP = dO V^T, without scores in memory. What P and dS take of a query is what the row kernel found.
//
// A CTA takes 128 keys, 64 for each of two consumer warpgroups, and walks over blocks of 64 queries, of all heads of the keys'
// group. Scores are multiplied with keys as rows, so that the terms of P^T and dS^T stay in registers: a result of wgmma lies there
// as a left operand of it does. P, whose sum over keys is 1, has one power of two, 2^-15: what its terms leave out of a query's
// probabilities is less than 2^-24 of their norm. dS has one for each key and block.
// Of a block S and dP begin together | S is there: P | dP is there: dS, terms | dV and dK in four parts of 32 queries, of which two
// are under way while the one before is added.
// Grid: persistent CTAs, one an SM; causal: longest first. Shared memory: FusedBackwardTile::Shared, 199 KB. Registers: 240 a
// consumer thread: 32 each of S, dP and their second parts, or of terms and two parts of dV and dK; 32 each of dV and dK.
#include "attention/sm90/split_half/fused_backward/parts.cuh"

namespace attention_ext {
namespace {

struct ColumnTile {
  int n, key_matrix;       // n: of the group's first head
  int key, begin, blocks;  // the first key; blocks of queries that see any of the keys
  KeyRange range;
};
// Tile after tile of a CTA: of all keys that there are.
template <class Visit>
__device__ __forceinline__ void for_each_column_tile(const SplitHalfFusedBackwardParams& p, Visit visit) {
  const int m_tiles = static_cast<int>((p.S + kBackwardRows - 1) / kBackwardRows);
  const int64_t heads = p.slice.batch_count / p.group;
  const unsigned tiles = static_cast<unsigned>(heads) * m_tiles;
#pragma unroll 1
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    TileIndex index = tile_of(tile, m_tiles, 1, 0);
    if (p.sequence.causal) {  // the first keys are seen by the most queries
      index = longest_first(tile, m_tiles, 1, heads);
      index.m = m_tiles - 1 - index.m;
    }
    ColumnTile at;
    at.key_matrix = static_cast<int>(index.batch);
    at.n = static_cast<int>(p.slice.batch_begin + index.batch * p.group);
    at.key = index.m * kBackwardRows;
    at.range = key_range(p.sequence, static_cast<uint32_t>(at.n), p.slice.col_count);
    at.blocks = static_cast<int>(blocks_of(p.slice.row_count));
    at.begin = min(at.range.first_row(at.key) / kBackwardBlock, at.blocks);
    visit(at);
  }
}

template <class Tile, bool kMasked>
class ColumnGrads {
 public:
  using Params = SplitHalfFusedBackwardParams;
  __device__ __forceinline__ ColumnGrads(const Params& p, typename Tile::Shared& shared, int consumer)
      : p_(p), shared_(shared), consumer_(consumer) {}

  __device__ __forceinline__ void run() {
    uint32_t parity = 0;
    for_each_column_tile(p_, [&](const ColumnTile& at) {
      const int first = at.key + consumer_ * 64;  // of the warpgroup
      const int key = first + threadIdx.x / 32 % 4 * 16 + lane() / 4;
      const int begin = min(at.range.first_row(first) / kBackwardBlock, at.blocks);
      SumPower value_power, powers[2];
      float value_grad[kOut], key_grad[kOut];
#pragma unroll
      for (int i = 0; i < kOut; ++i) value_grad[i] = key_grad[i] = 0.0f;
      if (at.begin < at.blocks) {
        mbarrier_wait(shared_address(&shared_.rows_full), parity);
        parity ^= 1;
#pragma unroll 1
        for (int head = 0; head < static_cast<int>(p_.group); ++head) {
#pragma unroll 1
          for (int block = at.begin; block < at.blocks; ++block) {
            mbarrier_wait(shared_address(&shared_.full[ring_.slot]), ring_.parity);
            if (block >= begin) add_block(at, at.n + head, key, block, value_grad, value_power, key_grad, powers);
            if (lane() == 0) mbarrier_arrive(shared_address(&shared_.empty[ring_.slot]));
            ring_.advance();
          }
        }
        if (lane() == 0) mbarrier_arrive(shared_address(&shared_.rows_empty));
      }
      const uint32_t n = static_cast<uint32_t>(at.n);
      store_fragment<kOut>(p_.grad_value, batch_offset(p_.batch, p_.grad_value, n, 0), key, p_.S, p_.Ev,
                           [&](int i, int) { return times_power_of_two(value_grad[i], value_power.top); });
      store_fragment<kOut>(p_.grad_key, batch_offset(p_.batch, p_.grad_key, n, 0), key, p_.S, p_.E, [&](int i, int half) {
        return times_power_of_two(key_grad[i] * static_cast<float>(p_.scale), powers[half].top);
      });
    });
  }

 private:
  static constexpr int kOut = Tile::kE / 2;
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void add_block(const ColumnTile& at, int n, int key, int block, float (&value_grad)[kOut],
                                            SumPower& value_power, float (&key_grad)[kOut], SumPower (&powers)[2]) {
    const int64_t query_block = (n - p_.slice.batch_begin) * blocks_of(p_.slice.row_count) + block,
                  key_block =
                      int64_t{at.key_matrix} * blocks_of(p_.slice.col_count) + (at.key + consumer_ * 64) / kBackwardBlock;
    const int query_exponent = p_.query_exponents[query_block], grad_exponent = p_.grad_out_exponents[query_block];
    const ScoreFactor factor = score_factor<kMasked>(p_.scale, query_exponent + p_.key_exponents[key_block]);
    const int value_exponent = p_.value_exponents[key_block];
    const int query = block * kBackwardBlock + lane() % 4 * 2;  // the thread's first
    const typename Tile::Block& stage = shared_.stage[ring_.slot];
    const SplitHalfQueryRecord& record = shared_.records[ring_.slot];
    float x[kBackwardScores], x_rest[kBackwardScores], grads[kBackwardScores], rest[kBackwardScores], bias[kBackwardScores];
    const auto begin_grads = [&] {
      begin_scores<Tile::kE, false>(grads, rest, shared_.grads, stage.grads, consumer_);
      wgmma_commit();
    };
    wgmma_fence();
    begin_scores<Tile::kE, false>(x, x_rest, shared_.scores, stage.scores, consumer_);
    wgmma_commit();
    if constexpr (kMasked) {  // its registers are dP's afterwards
      const int end_query = static_cast<int>(p_.slice.row_count);
      load_mask(bias, p_.mask, p_.mask_type,
                {batch_offset(p_.batch, p_.mask, static_cast<uint32_t>(n), 0), p_.mask.col_stride, p_.mask.row_stride, key,
                 at.range.keys, query, end_query, false});
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
    hide_queries(x, at.range, key, query);
#pragma unroll
    for (int i = 0; i < kBackwardScores; i += 4) {
      const float2 offset = *reinterpret_cast<const float2*>(&record.offset[i / 4 * 8 + lane() % 4 * 2]),
                   inverse = *reinterpret_cast<const float2*>(&record.inverse[i / 4 * 8 + lane() % 4 * 2]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[i + 2 * half] = exp2_approx(fmaf(x[i + 2 * half], factor.unit, offset.x)) * inverse.x;
        x[i + 2 * half + 1] = exp2_approx(fmaf(x[i + 2 * half + 1], factor.unit, offset.y)) * inverse.y;
      }
    }
    wgmma_wait<0>();
    end_scores<Tile::kE>(grads, rest);
    const float unit = grads_unit(grads, grad_exponent + value_exponent);
    float largest[2] = {};
#pragma unroll
    for (int i = 0; i < kBackwardScores; i += 4) {
      const float2 delta = *reinterpret_cast<const float2*>(&record.delta[i / 4 * 8 + lane() % 4 * 2]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int of = i + 2 * half + e;
          grads[of] = x[of] == 0.0f ? 0.0f : x[of] * fmaf(grads[of], unit, e == 0 ? -delta.x : -delta.y);
          largest[half] = maximum(largest[half], fabsf(grads[of]));
        }
      }
    }
    float before[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowScale scale(largest[half]);
      if (!scale.finite) p_.marks[n] = 1;
#pragma unroll
      for (int i = 2 * half; i < kBackwardScores; i += 4) {
        grads[i] *= scale.factor;
        grads[i + 1] *= scale.factor;
      }
      before[half] = powers[half].step(scale.exponent - kProbabilityPower + query_exponent);
    }
    const float value_before = value_power.step(grad_exponent - kProbabilityPower);
    if (__any_sync(0xffffffffu, before[0] != 1.0f || before[1] != 1.0f || value_before != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) {
        key_grad[i] *= before[i / 2 % 2];
        value_grad[i] *= value_before;
      }
    }
    uint32_t weights[2][kBackwardBlock / 4], score_grads[2][kBackwardBlock / 4];
    make_terms(x, weights);
    make_terms(grads, score_grads);

    float part[2][kOut];
    const auto begin_value = [&](float (&of)[kOut], int k) {
      begin_part<Tile::kE>(of, weights, stage.grads, k);
      wgmma_commit();
    };
    const auto begin_key = [&](float (&of)[kOut], int k) {
      begin_part<Tile::kE>(of, score_grads, stage.scores, k);
      wgmma_commit();
    };
    const auto add_value = [&](float (&of)[kOut]) {
      pin_registers(of);
#pragma unroll
      for (int i = 0; i < kOut; ++i) value_grad[i] = fmaf(of[i], value_power.factor, value_grad[i]);
    };
    const auto add_key = [&](float (&of)[kOut]) {
      pin_registers(of);
#pragma unroll
      for (int i = 0; i < kOut; ++i) key_grad[i] = fmaf(of[i], powers[i / 2 % 2].factor, key_grad[i]);
    };
    wgmma_fence();
    begin_value(part[0], 0);
    begin_value(part[1], kSplitHalfPromoted);
    wgmma_wait<1>();
    add_value(part[0]);
    wgmma_fence();
    begin_key(part[0], 0);
    wgmma_wait<1>();
    add_value(part[1]);
    wgmma_fence();
    begin_key(part[1], kSplitHalfPromoted);
    wgmma_wait<1>();
    add_key(part[0]);
    wgmma_wait<0>();
    add_key(part[1]);
  }

  // -inf where a query does not see a key. Queries that do not exist have records that say so.
  static __device__ __forceinline__ void hide_queries(float (&x)[kBackwardScores], const KeyRange& range, int key, int query) {
    const int warp_end = key - lane() / 4 + 16, block = query - lane() % 4 * 2;
    if (warp_end <= range.keys && (!range.causal || warp_end <= block + 1)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = range.first_row(key + 8 * half) - query;  // what is compared with it are constants
#pragma unroll
      for (int i = 2 * half; i < kBackwardScores; i += 4) {
        if (i / 4 * 8 < first) x[i] = negative_infinity(0.0f);
        if (i / 4 * 8 + 1 < first) x[i + 1] = negative_infinity(0.0f);
      }
    }
  }

  const Params& p_;
  typename Tile::Shared& shared_;
  const int consumer_;
  RingPlace<Tile::kStages> ring_;
};

template <class Tile, bool kMasked>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    split_half_fused_columns_kernel(const __grid_constant__ SplitHalfFusedBackwardParams p,
                                    const __grid_constant__ FusedBackwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const auto load = [&] {
    FusedBackwardLoader<Tile> loader(maps, shared);
    for_each_column_tile(p, [&](const ColumnTile& at) {
      if (at.begin == at.blocks) return;
      loader.load_rows(at.key, at.key_matrix);
#pragma unroll 1
      for (int64_t head = 0; head < p.group; ++head) {
        const int64_t matrix = at.n + head - p.slice.batch_begin;
#pragma unroll 1
        for (int block = at.begin; block < at.blocks; ++block) {
          loader.load_block(block * kBackwardBlock, matrix, p.records + matrix * at.blocks + block);
        }
      }
    });
  };
  run_roles<Tile>(shared, load, [&](int consumer) { ColumnGrads<Tile, kMasked>(p, shared, consumer).run(); });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

}  // namespace

cudaError_t launch_split_half_column_grads(const SplitHalfFusedBackwardParams& params, void* query_terms, void* key_terms,
                                           void* grad_out_terms, void* value_terms, cudaStream_t stream) {
  const Slice& slice = params.slice;
  void* const terms[4] = {key_terms, value_terms, query_terms, grad_out_terms};
  const int64_t heads = matrices_of_slice(slice, params.group);
  const auto launch = [&](auto tile, auto kernel) {
    return launch_fused_backward<decltype(tile)>(kernel, params, terms, heads, slice.col_count, slice.batch_count,
                                                 slice.row_count, heads * ceil_div(params.S, kBackwardRows), stream);
  };
  const auto of_tile = [&](auto tile) {
    using Tile = decltype(tile);
    return params.mask_type != MaskType::kNone ? launch(tile, split_half_fused_columns_kernel<Tile, true>)
                                               : launch(tile, split_half_fused_columns_kernel<Tile, false>);
  };
  return std::max(params.E, params.Ev) <= 32 ? of_tile(FusedBackwardTile<32, true>()) : of_tile(FusedBackwardTile<64, true>());
}

}  // namespace attention_ext
