// The gradient of a mask that is added to scores, in the fused backward of float32 attention by half terms (Hopper): dS summed over
// the matrices that share a matrix of the mask, each made anew from the operands' terms and what the row kernel found of its rows.
//
// A CTA takes 128 rows by 64 keys of a matrix of the mask, 64 rows for each of two consumer warpgroups, and walks over the matrices
// of the slice that share it, in their order: S and dP as the row kernel makes them, to the same bits, and dS, which is added in
// registers. Sums that span slices are carried in the gradient itself. No atomics: the same bits every time. Of a head that two
// terms are not enough for, dS is made in float on CUDA cores: rare, so this is short, not fast.
// One thread of a third warpgroup loads: terms of all four operands of a matrix, and what the matrix is.
// Grid: persistent CTAs, one an SM. Shared memory: BiasGradTile::Shared, 193 KB. Registers: 216 a consumer thread: 32 each of S,
// dP, their second parts, the mask and the sums.
#include "attention/sm90/split_half/exact_heads.cuh"
#include "attention/sm90/split_half/fused_backward/parts.cuh"

namespace attention_ext {

template <int kE_>
struct BiasGradTile {
  static constexpr int kE = kE_, kStages = 2, kRegisters = 216;  // the loader divides
  using Block = FusedBackwardBlock;
  struct Stage {  // of a matrix
    alignas(1024) unsigned char scores[2][kBackwardRows * 128], grads[2][kBackwardRows * 128];
    Block block;
  };
  struct Matrix {
    int n;
    bool exact;
  };
  struct Shared {
    Stage stage[kStages];
    Matrix matrix[kStages];
    uint64_t full[kStages], empty[kStages];
  };
  static __device__ __forceinline__ void init_rows(Shared&) {}
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

// Whether any row of so many sees any of the keys.
__device__ __forceinline__ bool sees_any(const SplitHalfBiasGradParams& p, int row, int rows, int key) {
  return row < p.slice.row_count && key < p.slice.col_count && (!p.sequence.causal || key < row + rows);
}

namespace {

struct BiasTile {
  int64_t kept;        // number of the mask's matrix
  int64_t begin, end;  // of those that share it, the slice's
  int row, key;
};
// Tile after tile of a CTA, of all matrices of the mask that some of the slice share.
template <class Visit>
__device__ __forceinline__ void for_each_bias_tile(const SplitHalfBiasGradParams& p, Visit visit) {
  const unsigned col_tiles = static_cast<unsigned>(blocks_of(p.S)),
                 of_matrix = col_tiles * static_cast<unsigned>((p.slice.row_count + kBackwardRows - 1) / kBackwardRows);
  unsigned next = blockIdx.x;  // this CTA's next tile, from the matrix's first on
#pragma unroll 1
  for (int64_t kept = 0; kept < p.matrices; ++kept) {
    // The number grows with that of the matrix.
    const auto numbers_before = [&](int64_t n) {
      int64_t begin = 0, end = p.sharing;
#pragma unroll 1
      while (begin < end) {
        const int64_t middle = (begin + end) / 2;
        if (shared_matrix(p.batch, p.mask_grad, kept, middle) < n) {
          begin = middle + 1;
        } else {
          end = middle;
        }
      }
      return begin;
    };
    BiasTile at = {kept, numbers_before(p.slice.batch_begin), numbers_before(p.slice.batch_begin + p.slice.batch_count), 0, 0};
    if (at.begin == at.end) continue;
#pragma unroll 1
    for (; next < of_matrix; next += gridDim.x) {
      at.row = static_cast<int>(next / col_tiles) * kBackwardRows;
      at.key = static_cast<int>(next % col_tiles) * kBackwardBlock;
      visit(at);
    }
    next -= of_matrix;
  }
}

template <class Tile>
__device__ __forceinline__ void load_matrices_of_mask(const SplitHalfBiasGradParams& p, const FusedBackwardMaps& maps,
                                                      typename Tile::Shared& shared) {
  RingPlace<Tile::kStages> ring;
  for_each_bias_tile(p, [&](const BiasTile& at) {
    if (!sees_any(p, at.row, kBackwardRows, at.key)) return;
#pragma unroll 1
    for (int64_t number = at.begin; number < at.end; ++number) {
      const int64_t n = shared_matrix(p.batch, p.mask_grad, at.kept, number), matrix = n - p.slice.batch_begin,
                    key_matrix = matrix_of_slice(n, p.slice, p.group);
      mbarrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
      typename Tile::Stage& stage = shared.stage[ring.slot];
      const uint32_t full = shared_address(&shared.full[ring.slot]);
      load_terms(stage.scores, maps.tile_scores, at.row, matrix, full);
      load_terms(stage.block.scores, maps.scores, at.key, key_matrix, full);
      load_terms(stage.grads, maps.tile_grads, at.row, matrix, full);
      load_terms(stage.block.grads, maps.grads, at.key, key_matrix, full);
      shared.matrix[ring.slot] = {static_cast<int>(n), any_needs_exact(p.exact, n / p.group)};
      mbarrier_arrive_expect_bytes(full, sizeof(typename Tile::Stage));  // after what it says of the matrix
      ring.advance();
    }
  });
}

// What is summed of a warpgroup's 64 rows by 64 keys.
template <class Tile>
class BiasGrads {
 public:
  __device__ __forceinline__ BiasGrads(const SplitHalfBiasGradParams& p, typename Tile::Shared& shared, int consumer)
      : p_(p), shared_(shared), consumer_(consumer) {}

  __device__ __forceinline__ void run() {
    for_each_bias_tile(p_, [&](const BiasTile& at) {
      const int first = at.row + consumer_ * 64, end_row = static_cast<int>(p_.slice.row_count);  // first: of the warpgroup
      const int row = first + threadIdx.x / 32 % 4 * 16 + lane() / 4, key = at.key + lane() % 4 * 2;
      const int64_t n = shared_matrix(p_.batch, p_.mask_grad, at.kept, int64_t{0});
      float sums[kBackwardScores], bias[kBackwardScores];
#pragma unroll
      for (int i = 0; i < kBackwardScores; ++i) sums[i] = 0.0f;
      if (sees_any(p_, at.row, kBackwardRows, at.key)) {
        load_mask(
            bias, p_.mask, p_.mask_type,
            {batch_offset(p_.batch, p_.mask, static_cast<uint32_t>(n), 0), p_.mask.row_stride, p_.mask.col_stride, row, end_row,
             key, static_cast<int>(p_.slice.col_count), p_.mask.vector && at.key + kBackwardBlock <= p_.slice.col_count});
#pragma unroll 1
        for (int64_t number = at.begin; number < at.end; ++number) {
          mbarrier_wait(shared_address(&shared_.full[ring_.slot]), ring_.parity);
          if (sees_any(p_, first, 64, at.key)) {
            const typename Tile::Matrix matrix = shared_.matrix[ring_.slot];
            if (matrix.exact) {
              add_exact(matrix.n, row, key, sums);
            } else {
              add_matrix(matrix.n, row, at.key, bias, sums);
            }
          }
          if (lane() == 0) mbarrier_arrive(shared_address(&shared_.empty[ring_.slot]));
          ring_.advance();
        }
      }
      const int64_t offset = batch_offset(p_.batch, p_.mask_grad, static_cast<uint32_t>(n), 0);
      store(offset, row, at.key, at.begin > 0, sums);
    });
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void add_matrix(int n, int row, int key, const float (&mask)[kBackwardScores],
                                             float (&sums)[kBackwardScores]) const {
    const typename Tile::Stage& stage = shared_.stage[ring_.slot];
    const int64_t query_block = (n - p_.slice.batch_begin) * blocks_of(p_.slice.row_count) + row / kBackwardBlock,
                  key_block = matrix_of_slice(n, p_.slice, p_.group) * blocks_of(p_.slice.col_count) + key / kBackwardBlock;
    const int exponent = p_.query_exponents[query_block] + p_.key_exponents[key_block],
              grad_exponent = p_.grad_out_exponents[query_block] + p_.value_exponents[key_block];
    const KeyRange range = key_range(p_.sequence, static_cast<uint32_t>(n), p_.slice.col_count);
    const SplitHalfQueryRecord& record = p_.records[query_block];
    float offset[2], inverse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = row % kBackwardBlock + 8 * half;
      offset[half] = record.offset[place];
      inverse[half] = record.inverse[place] * (1.0f / (1 << kProbabilityPower));
      delta[half] = record.delta[place];
    }
    const int end_row = static_cast<int>(p_.slice.row_count);
    float x[kBackwardScores], grads[kBackwardScores], rest[kBackwardScores];
    const ScoreFactor factor = make_row_scores<Tile, true>(x, grads, rest, stage.scores, stage.grads, stage.block, consumer_,
                                                           p_.scale, exponent, range, row, end_row, key,
                                                           open_keys(range, row, end_row), [&](float (&bias)[kBackwardScores]) {
#pragma unroll
                                                             for (int i = 0; i < kBackwardScores; ++i) bias[i] = mask[i];
                                                           });
#pragma unroll
    for (int i = 0; i < kBackwardScores; ++i) {
      x[i] = exp2_approx(fmaf(x[i], factor.unit, offset[i / 2 % 2])) * inverse[i / 2 % 2];
    }
    wgmma_wait<0>();
    end_scores<Tile::kE>(grads, rest);
    const float unit = grads_unit(grads, grad_exponent);
#pragma unroll
    for (int i = 0; i < kBackwardScores; ++i) {
      sums[i] += x[i] == 0.0f ? 0.0f : x[i] * fmaf(grads[i], unit, -delta[i / 2 % 2]);
    }
  }

  // key: the thread's first.
  __device__ __forceinline__ void add_exact(int n, int row, int key, float (&sums)[kBackwardScores]) const {
    const BackwardParams& call = p_.exact.call;
    const ExactHead head(call, n);
#pragma unroll 1
    for (int i = 0; i < kBackwardScores; ++i) {
      const int at_row = row + i / 2 % 2 * 8, at_key = key + i / 4 * 8 + i % 2;
      float grad = 0.0f;
      if (at_row < call.L && at_key < head.range.end_of_row(at_row)) {
        const auto product = [&](const MatrixView& rows, const MatrixView& keys, int64_t width) {
          const ExactRows a = head.rows_of(rows, at_row, call.L), b = head.rows_of(keys, at_key, call.S);
          float sum = 0.0f;
#pragma unroll 1
          for (int col = 0; col < width; col += kExactChunk) {
            float part = 0.0f;
#pragma unroll 1
            for (int k = col; k < min(col + kExactChunk, static_cast<int>(width)); ++k)
              part = fmaf(a.at(0, k), b.at(0, k), part);
            sum += part;
          }
          return sum;
        };
        const SplitHalfRowValues of_row = p_.exact.row_values[n * call.L + at_row];
        const float weight =
            exact_probability(head.score(product(call.query, call.key, call.E), at_row, at_key), of_row.reference, of_row.sum);
        if (weight != 0.0f) grad = weight * (product(call.grad_out, call.value, call.Ev) - of_row.delta);
      }
#pragma unroll
      for (int of = 0; of < kBackwardScores; ++of) sums[of] += of == i ? grad : 0.0f;  // an index would take memory
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store(int64_t offset, int row, int key, bool carried,
                                        const float (&sums)[kBackwardScores]) const {
    const MatrixView& view = p_.mask_grad;
    float* g_first = static_cast<float*>(view.data) + offset + key * view.col_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= p_.slice.row_count) continue;
      float* g_row = g_first + (row + 8 * half) * view.row_stride;
#pragma unroll
      for (int i = 2 * half; i < kBackwardScores; i += 4) {
        const int col = i / 4 * 8 + lane() % 4 * 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (key + col + e >= p_.S) continue;
          float& stored = g_row[(col + e) * view.col_stride];
          stored = carried ? stored + sums[i + e] : sums[i + e];
        }
      }
    }
  }

  const SplitHalfBiasGradParams& p_;
  typename Tile::Shared& shared_;
  const int consumer_;
  RingPlace<Tile::kStages> ring_;
};

template <class Tile>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    split_half_fused_mask_kernel(const __grid_constant__ SplitHalfBiasGradParams p,
                                 const __grid_constant__ FusedBackwardMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  run_roles<Tile>(
      shared, [&] { load_matrices_of_mask<Tile>(p, maps, shared); },
      [&](int consumer) { BiasGrads<Tile>(p, shared, consumer).run(); });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

}  // namespace

cudaError_t launch_split_half_bias_grads(const SplitHalfBiasGradParams& params, void* query_terms, void* key_terms,
                                         void* grad_out_terms, void* value_terms, cudaStream_t stream) {
  const Slice& slice = params.slice;
  void* const terms[4] = {query_terms, grad_out_terms, key_terms, value_terms};
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    const int64_t tiles = std::min(params.matrices, slice.batch_count) * ceil_div(slice.row_count, kBackwardRows) *
                          ceil_div(params.S, kBackwardBlock);
    return launch_fused_backward<Tile>(split_half_fused_mask_kernel<Tile>, params, terms, slice.batch_count, slice.row_count,
                                       matrices_of_slice(slice, params.group), slice.col_count, tiles, stream);
  };
  return std::max(params.E, params.Ev) <= 32 ? launch(BiasGradTile<32>()) : launch(BiasGradTile<64>());
}

}  // namespace attention_ext
