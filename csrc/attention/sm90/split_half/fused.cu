// float32 attention by half terms in one kernel (Hopper), for head dims up to 128: out = softmax(scale * Q K^T + mask) V over one
// slice of whole matrices, without scores in memory.
//
// A CTA takes 128 query rows, 64 for each of two consumer warpgroups, and walks over segments of 64 keys. A warpgroup alone does
// all of its rows: S = Q K^T, three products of terms in parts of 32 of k, summed in float; weights, whose terms stay in registers,
// where a result of wgmma lies as an operand of it does; P V likewise, each part brought to the row's power of two as it is added.
// While one warpgroup waits for a part or makes weights, the other multiplies. One thread of a third warpgroup loads: terms of the
// query's rows, then of keys and values in one ring.
// Grid: persistent CTAs, one an SM; causal: longest first. Shared memory: SplitHalfFusedTile::Shared. Registers: 232.
#include "attention/sm90/split_half/row_promotion.cuh"
#include "attention/sm90/split_half/segment_weights.cuh"
#include "attention/sm90/split_half/terms_map.h"
#include "core/device_info.h"
#include "core/launch.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/warpgroup.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/tile_order.cuh"

namespace attention_ext {
namespace {

template <int kE_>
struct SplitHalfFusedTile {
  static constexpr int kE = kE_;  // that E and Ev are taken for
  static constexpr int kSteps = kE / 64, kM = 128, kConsumers = 2, kThreads = 128 * (kConsumers + 1);
  static constexpr int kSlots = kE == 128 ? 5 : 10;  // of 32 or 16 KB
  static constexpr int kBoxBytes = kSegment * 128;

  struct Slot {
    alignas(1024) unsigned char terms[2][kSteps][kBoxBytes];  // of 64 keys or values, in boxes of 64 columns
  };
  struct Shared {
    alignas(1024) unsigned char query[2][kSteps][kM * 128];
    Slot slot[kSlots];
    uint64_t query_full, query_empty, full[kSlots], empty[kSlots];
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

struct FusedMaps {
  CUtensorMap query, key, value;
};

// Tile after tile of a CTA, for its producer and its consumers alike.
struct FusedPlace {
  int64_t n, slice_index, key_matrix, value_matrix;
  int row, segments;  // the first row; segments that any of the rows sees
  KeyRange range;
};
template <class Tile, class Visit>
__device__ __forceinline__ void for_each_tile(const SplitHalfScoresParams& p, Visit visit) {
  const int m_tiles = static_cast<int>((p.L + Tile::kM - 1) / Tile::kM);
  const unsigned tiles = static_cast<unsigned>(p.slice.batch_count) * m_tiles;
#pragma unroll 1
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TileIndex index =
        p.sequence.causal ? longest_first(tile, m_tiles, 1, p.slice.batch_count) : tile_of(tile, m_tiles, 1, 0);
    FusedPlace at;
    at.slice_index = index.batch;
    at.n = p.slice.batch_begin + index.batch;
    at.key_matrix = matrix_of_slice(at.n, p.slice, p.key_group);
    at.value_matrix = matrix_of_slice(at.n, p.slice, p.value_group);
    at.row = index.m * Tile::kM;
    at.range = key_range(p.sequence, at.n, p.slice.col_count);
    at.segments = (at.range.end_of_tile(at.row, Tile::kM) + kSegment - 1) / kSegment;
    visit(at);
  }
}

template <class Tile>
__device__ __forceinline__ void load_fused(const SplitHalfScoresParams& p, const FusedMaps& maps,
                                           typename Tile::Shared& shared) {
  RingPlace<Tile::kSlots> ring;
  uint32_t query_parity = 0;
  const auto load = [&](unsigned char* s_terms, int box_bytes, const CUtensorMap& map, int row, int64_t matrix, uint32_t full) {
#pragma unroll
    for (int term = 0; term < 2; ++term) {
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
        const TensorPosition box = {{step * 64, row, term, static_cast<int>(matrix), 0}};
        tma_load(shared_address(s_terms) + (term * Tile::kSteps + step) * box_bytes, &map, box, full);
      }
    }
  };
  for_each_tile<Tile>(p, [&](const FusedPlace& at) {
    mbarrier_wait(shared_address(&shared.query_empty), query_parity ^ 1);
    query_parity ^= 1;
    const uint32_t query_full = shared_address(&shared.query_full);
    mbarrier_arrive_expect_bytes(query_full, sizeof(shared.query));
    load(shared.query[0][0], Tile::kM * 128, maps.query, at.row, at.slice_index, query_full);
#pragma unroll 1
    for (int i = 0; i < 2 * at.segments; ++i) {
      mbarrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
      const uint32_t full = shared_address(&shared.full[ring.slot]);
      mbarrier_arrive_expect_bytes(full, sizeof(typename Tile::Slot));
      const bool values = i % 2 != 0;
      load(shared.slot[ring.slot].terms[0][0], Tile::kBoxBytes, values ? maps.value : maps.key, i / 2 * kSegment,
           values ? at.value_matrix : at.key_matrix, full);
      ring.advance();
    }
  });
}

template <class Tile, bool kMasked>
__device__ __forceinline__ void attend(const SplitHalfScoresParams& p, typename Tile::Shared& shared, int consumer) {
  constexpr int kPart = kSplitHalfPromoted;
  const int lane = threadIdx.x % 32, tile_row = consumer * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int64_t row_blocks = (p.L + kSplitHalfBlock - 1) / kSplitHalfBlock,
                key_blocks = (p.slice.col_count + kSplitHalfBlock - 1) / kSplitHalfBlock;
  RingPlace<Tile::kSlots> ring;
  uint32_t query_parity = 0;
  const auto wait_slot = [&] { mbarrier_wait(shared_address(&shared.full[ring.slot]), ring.parity); };
  const auto release_slot = [&] {
    if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[ring.slot]));
    ring.advance();
  };
  uint64_t query[2];
#pragma unroll
  for (int term = 0; term < 2; ++term)
    query[term] = matrix_descriptor(shared_address(shared.query[term][0]) + consumer * 64 * 128, 1024, 0);

  for_each_tile<Tile>(p, [&](const FusedPlace& at) {
    const int row = at.row + tile_row;
    const int end_row = static_cast<int>(p.L);
    SegmentPlace place = {
        at.n, kMasked ? batch_offset(p.batch, p.mask, static_cast<uint32_t>(at.n), 0) : 0, at.range, row, end_row, 0, 0};
    place.open = open_keys(at.range, row, end_row);
    const int block = (at.row + consumer * 64) / kSplitHalfBlock;
    const int query_exponent = block < row_blocks ? p.query_exponents[at.slice_index * row_blocks + block] : kRowOfZeros;
    const int32_t* g_key_exponent = p.key_exponents + at.key_matrix * key_blocks;
    const int32_t* g_value_exponent = p.value_exponents + at.value_matrix * key_blocks;
    RowPromotion rows[2];
    rows[0].state = rows[1].state = no_keys_yet();
    float out[Tile::kE / 2];
#pragma unroll
    for (int i = 0; i < Tile::kE / 2; ++i) out[i] = 0.0f;
    bool too_large = false;
    mbarrier_wait(shared_address(&shared.query_full), query_parity);
    query_parity ^= 1;
#pragma unroll 1
    for (int segment = 0; segment < at.segments; ++segment) {
      const int exponent = query_exponent + g_key_exponent[segment], value_exponent = g_value_exponent[segment];
      float x[kSegment / 2];
#pragma unroll
      for (int i = 0; i < kSegment / 2; ++i) x[i] = 0.0f;
      wait_slot();
      const uint32_t s_key = shared_address(shared.slot[ring.slot].terms[0][0]);
#pragma unroll
      for (int k = 0; k < Tile::kE; k += kPart) {
        float part[kSegment / 2];
        const auto multiply = [&](int term_a, int term_b, bool fresh) {
          const uint64_t b = matrix_descriptor(s_key + (term_b * Tile::kSteps + k / 64) * Tile::kBoxBytes, 1024, 0);
#pragma unroll
          for (int i = 0; i < kPart; i += 16) {
            const int offset = (k % 64 + i) * 2 / 16;
            wgmma<__half, false>(part, query[term_a] + k / 64 * Tile::kM * 128 / 16 + offset, b + offset, fresh && i == 0);
          }
        };
        wgmma_fence();
        multiply(1, 0, true);  // the small ones first, while there is little to truncate
        multiply(0, 1, false);
        multiply(0, 0, false);
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(part);
#pragma unroll
        for (int i = 0; i < kSegment / 2; ++i) x[i] += part[i];
      }
      release_slot();

      SplitHalfSegment of_rows[2];
      place.key = segment * kSegment;
      too_large = make_segment_weights<kMasked, 15>(x, p, place, exponent, of_rows) || too_large;
      uint32_t weights[2][kSegment / 4];
      take_term(x, weights[0]);
#pragma unroll
      for (int i = 0; i < kSegment / 4; ++i) weights[1][i] = pack_pair<__half>(x[2 * i], x[2 * i + 1]);
      const float before[2] = {rows[0].step(of_rows[0], value_exponent), rows[1].step(of_rows[1], value_exponent)};
      if (__any_sync(0xffffffffu, before[0] != 1.0f || before[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < Tile::kE / 2; ++i) out[i] *= before[i / 2 % 2];
      }

      wait_slot();
      const uint32_t s_value = shared_address(shared.slot[ring.slot].terms[0][0]);
#pragma unroll
      for (int k = 0; k < kSegment; k += kPart) {
        float part[Tile::kE / 2];
        const auto multiply = [&](int term_a, int term_b, bool fresh) {
          const uint64_t b = matrix_descriptor(s_value + term_b * Tile::kSteps * Tile::kBoxBytes, 1024, Tile::kBoxBytes);
#pragma unroll
          for (int i = k; i < k + kPart; i += 16) {
            const uint32_t (&a)[4] = *reinterpret_cast<const uint32_t (*)[4]>(&weights[term_a][i / 4]);
            wgmma_from_registers<__half>(part, a, b + i * 128 / 16, fresh && i == k);
          }
        };
        wgmma_fence();
        multiply(1, 0, true);
        multiply(0, 1, false);
        multiply(0, 0, false);
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(part);
#pragma unroll
        for (int i = 0; i < Tile::kE / 2; ++i) out[i] = fmaf(part[i], rows[i / 2 % 2].factor, out[i]);
      }
      release_slot();
    }
    if (lane == 0) mbarrier_arrive(shared_address(&shared.query_empty));

    if (too_large && row < end_row) p.marks[at.n * ceil_div(p.L, kExactRows) + row / kExactRows] = 1;
    float* g_out = static_cast<float*>(p.out.data) + batch_offset(p.batch, p.out, static_cast<uint32_t>(at.n), 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = row + 8 * half;
      if (of >= end_row) continue;
      const RowResult result(rows[half].state, static_cast<float>(p.factor));
      if (lane % 4 == 0) store_row_result(p, p.lse, at.n, of, rows[half].state);
      float* g_row = g_out + of * p.out.row_stride;
#pragma unroll
      for (int i = 2 * half; i < Tile::kE / 2; i += 4) {
        const int col = i / 4 * 8 + lane % 4 * 2;
        const float pair[2] = {result.of(out[i]), result.of(out[i + 1])};
        if (p.out.vector && col + 1 < p.Ev) {
          *reinterpret_cast<float2*>(g_row + col) = make_float2(pair[0], pair[1]);
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (col + e < p.Ev) g_row[(col + e) * p.out.col_stride] = pair[e];
          }
        }
      }
    }
  });
}

template <class Tile, bool kMasked>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    split_half_fused_kernel(const __grid_constant__ SplitHalfScoresParams p, const __grid_constant__ FusedMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  launch_dependents();
  constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&shared.query_full), 1);
    mbarrier_init(shared_address(&shared.query_empty), 4 * Tile::kConsumers);
  }
  init_ring(shared.full, shared.empty, 4 * Tile::kConsumers);
  mbarrier_fence_init();
  wait_for_prerequisites();  // all threads: each that touches global memory must have waited itself
  __syncthreads();
  if (warpgroup == Tile::kConsumers) {
    give_registers<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform as well
    if (warp == 0 && elect_thread()) load_fused<Tile>(p, maps, shared);
  } else {
    take_registers<kConsumerRegisters>();
    attend<Tile, kMasked>(p, shared, warpgroup);
  }
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <class Tile, bool kMasked>
cudaError_t launch_tile(const SplitHalfScoresParams& params, const FusedMaps& maps, cudaStream_t stream) {
  const int64_t tiles = params.slice.batch_count * ceil_div(params.L, Tile::kM), sms = current_device_info().sms;
  LaunchShape shape = {std::min(tiles, sms), Tile::kThreads, sizeof(typename Tile::Shared)};
  shape.early = true;
  return launch_kernel(split_half_fused_kernel<Tile, kMasked>, shape, stream, params, maps);
}

}  // namespace

cudaError_t launch_split_half_fused(const SplitHalfScoresParams& params, void* query_terms, void* key_terms, void* value_terms,
                                    cudaStream_t stream) {
  const Slice& slice = params.slice;
  FusedMaps maps;
  cudaError_t status = make_terms_map(maps.query, query_terms, slice.batch_count, slice.row_count, params.E, 128);
  if (status == cudaSuccess) {
    status =
        make_terms_map(maps.key, key_terms, matrices_of_slice(slice, params.key_group), slice.col_count, params.E, kSegment);
  }
  if (status == cudaSuccess) {
    status = make_terms_map(maps.value, value_terms, matrices_of_slice(slice, params.value_group), slice.col_count, params.Ev,
                            kSegment);
  }
  if (status != cudaSuccess) return status;
  const bool masked = params.mask_type != MaskType::kNone;
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    return masked ? launch_tile<Tile, true>(params, maps, stream) : launch_tile<Tile, false>(params, maps, stream);
  };
  return std::max(params.E, params.Ev) <= 64 ? launch(SplitHalfFusedTile<64>()) : launch(SplitHalfFusedTile<128>());
}

}  // namespace attention_ext
