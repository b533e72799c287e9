// Backward by wgmma (Hopper), before all slices: what makes the probabilities of a row with a large log-sum-exp sum to 1.
//
// P = exp(score - lse) takes lse as the forward rounded it. At |lse| = 3e5 float's spacing is 0.03, so P is off by 3 %, and a row
// of finfo.min has lost the sum's share altogether; the error is one factor for the whole row. Below kLargeLse it is less than what
// the probabilities are rounded by. Slices may cut a row's keys, so the sums are made once, by products of their own, for the few
// tiles of 128 rows that have such a row.
// 1. All threads look at the rows' lse and mark this CTA's tiles.
// 2. Of a marked tile, S = Q . K^T, 256 keys after 256, and each row's sum of exp(S - lse), in registers.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: WgmmaTile::Shared and a byte a tile.
#include "attention/sm90/pipeline/backward.h"
#include "attention/visibility/score_modifier.cuh"
#include "attention/visibility/score_place.cuh"
#include "core/arithmetic.h"
#include "core/dispatch.h"
#include "core/tensor_map.h"
#include "gemm/sm90/steps.cuh"

namespace attention_ext {
namespace {

template <class T>
using LargeLseTile = WgmmaTile<T, false>;

constexpr int64_t kMostTiles = 4096;  // of a CTA

template <class T>
struct LargeLseShared {
  typename LargeLseTile<T>::Shared tile;
  uint8_t marked[kMostTiles];
};

// A sum that is off by less is right: rounding every probability again would cost more than it mends.
template <class T>
constexpr float kTolerance = weight_scale(kDataType<T>) > 1.0f ? 1.0f / 1024 : 1.0f / 128;

struct LargeLseMaps {
  CUtensorMap query, key;
};

template <class T>
struct LargeLse {
  using Tile = LargeLseTile<T>;
  static constexpr int kPart = 64;  // columns at a time

  const LargeLseParams& p;
  int64_t first_tile;
  int tiles;  // of this launch, from the first one on

  __device__ __forceinline__ ScorePlace place(int tile, int n) const {
    const int64_t row_tiles = (p.L + Tile::kM - 1) / Tile::kM;
    int64_t matrix, m;
    divide(first_tile + tile, row_tiles, matrix, m);
    return score_place<Tile>(p.slice, p.sequence, {matrix, static_cast<int>(m), n});
  }
  static __device__ __forceinline__ bool is_large(float lse) { return fabsf(lse) >= kLargeLse && !isinf(lse); }
  __device__ __forceinline__ float lse_of(const ScorePlace& at, int row) const {
    const float* g_lse = static_cast<const float*>(p.lse.data) + batch_offset(p.batch, p.lse, at.n, at.slice_index);
    return row < at.rows ? g_lse[(at.row + row) * p.lse.row_stride] : 0.0f;
  }
  static __device__ __forceinline__ int column_tiles(const ScorePlace& at) {
    return (at.range.end_of_tile(at.row, min(Tile::kM, at.rows)) + Tile::kN - 1) / Tile::kN;
  }
  __device__ __forceinline__ int steps() const { return static_cast<int>((p.E + Tile::kK - 1) / Tile::kK); }

  // By all threads, a warp a tile.
  __device__ __forceinline__ void mark(uint8_t* marked) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = Tile::kThreads / 32;
#pragma unroll 1
    for (int i = warp; blockIdx.x + i * static_cast<int>(gridDim.x) < tiles; i += warps) {
      const ScorePlace at = place(blockIdx.x + i * gridDim.x, 0);
      bool large = false;
#pragma unroll
      for (int row = 0; row < Tile::kM; row += 32) large = large || is_large(lse_of(at, row + lane));
      large = __any_sync(0xffffffffu, large);
      if (lane == 0) marked[i] = large;
    }
  }

  // Calls visit(tile) for this CTA's marked ones.
  template <class Visit>
  __device__ __forceinline__ void for_each_marked(const uint8_t* marked, Visit visit) const {
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      if (*marked++ != 0) visit(tile);
    }
  }

  __device__ __forceinline__ void load(StepLoader<Tile>& loader, const uint8_t* marked, const LargeLseMaps& maps) const {
    for_each_marked(marked, [&](int tile) {
      const ScorePlace at = place(tile, 0);
      const int columns = column_tiles(at);
#pragma unroll 1
      for (int n = 0; n < columns; ++n) {
        TensorPosition a = {{0, at.row, 0, 0, 0}}, b = {{0, n * Tile::kN, 0, 0, 0}};
        set_batch(a, p.batch, p.query, static_cast<uint32_t>(at.n));
        set_batch(b, p.batch, p.key, static_cast<uint32_t>(at.n));
        loader.template load<false, false>(maps.query, a, maps.key, b, steps());
      }
    });
  }

  __device__ __forceinline__ void multiply(StepMultiplier<Tile>& multiplier, const uint8_t* marked, int row) const {
    for_each_marked(marked, [&](int tile) {
      const ScorePlace at = place(tile, 0);
      const int64_t mask =
          p.mask_type != MaskType::kNone ? batch_offset(p.batch, p.mask, static_cast<uint32_t>(at.n), at.slice_index) : 0;
      const float lse[2] = {lse_of(at, row), lse_of(at, row + 8)};
      float sum[2] = {0.0f, 0.0f};
      const int columns = column_tiles(at);
#pragma unroll 1
      for (int n = 0; n < columns; ++n) {
        float product[Tile::kN / 2];
        multiplier.template multiply<false, false>(product, steps());
#pragma unroll
        for (int part = 0; part < Tile::kN / kPart; ++part) {
          const int key = n * Tile::kN + part * kPart;
          if (key >= at.range.keys) break;
          float x[kPart / 2];
#pragma unroll
          for (int i = 0; i < kPart / 2; ++i) x[i] = product[part * (kPart / 2) + i];
          pin_registers(x);  // one part after another
          add(at, row, mask, key + static_cast<int>(threadIdx.x % 4 * 2), lse, x, sum);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = warp_sum<4>(sum[half]);
        if (threadIdx.x % 4 != 0 || !is_large(lse[half])) continue;
        // Written so that NaN stays NaN and an empty row stays 0.
        p.norm[at.n * p.L + at.row + row + 8 * half] =
            total == 0.0f || fabsf(total - 1.0f) <= kTolerance<T> ? 1.0f : 1.0f / total;
      }
    });
  }

  // x: products with the keys from `key` on.
  __device__ __forceinline__ void add(const ScorePlace& at, int row, int64_t mask, int key, const float (&lse)[2],
                                      float (&x)[kPart / 2], float (&sum)[2]) const {
    const auto mask_row = [&](int half) {  // of the last row for rows that do not exist
      return mask + (at.row + min(row + 8 * half, at.rows - 1)) * p.mask.row_stride;
    };
    scale_and_mask<T>(x, static_cast<float>(p.scale), p.mask, p.mask_type, mask_row, key, at.range.keys);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hide_keys(x, half, key, row + 8 * half < at.rows ? at.range.end_of_row(at.row + row + 8 * half) : 0);
    }
#pragma unroll
    for (int i = 0; i < kPart / 2; ++i) sum[i / 2 % 2] += exp2_approx((x[i] - lse[i / 2 % 2]) * kLog2E);
  }
};

template <class T>
__global__ void __launch_bounds__(LargeLseTile<T>::kThreads, 1)
    large_lse_kernel(const __grid_constant__ LargeLseParams params, const __grid_constant__ LargeLseMaps maps,
                     const __grid_constant__ int64_t first_tile, const __grid_constant__ int tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = LargeLseTile<T>;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  LargeLseShared<T>& shared = *reinterpret_cast<LargeLseShared<T>*>(s_bytes);
  const LargeLse<T> work = {params, first_tile, tiles};
  work.mark(shared.marked);  // seen by all after the barrier in run_warpgroups
  run_warpgroups<Tile>(
      shared.tile, [&](StepLoader<Tile>& loader) { work.load(loader, shared.marked, maps); },
      [&](StepMultiplier<Tile>& multiplier, uint32_t, int row) { work.multiply(multiplier, shared.marked, row); });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <class T>
cudaError_t launch_typed(const LargeLseParams& params, cudaStream_t stream) {
  using Tile = LargeLseTile<T>;
  LargeLseMaps maps;
  cudaError_t status = make_tensor_map(maps.query, params.type, params.batch, params.query, params.L, params.E, Tile::kM);
  if (status == cudaSuccess) {
    status = make_tensor_map(maps.key, params.type, params.batch, params.key, params.slice.col_count, params.E, Tile::kN);
  }
  const int64_t all = params.slice.batch_count * ceil_div(params.L, Tile::kM), most = current_device_info().sms * kMostTiles;
  for (int64_t first = 0; first < all && status == cudaSuccess; first += most) {
    const int64_t tiles = std::min(all - first, most);
    status = launch_persistent<Tile, sizeof(LargeLseShared<T>)>(large_lse_kernel<T>, tiles, stream, params, maps, first,
                                                                static_cast<int>(tiles));
  }
  return status;
}

}  // namespace

cudaError_t launch_large_lse(const LargeLseParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
