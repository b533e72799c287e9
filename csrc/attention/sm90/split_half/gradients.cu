// Backward of float32 attention by half terms (Hopper), the last kernel of a slice: dQ = scale * dS . K, dK = scale * dS^T . Q and
// dV = P^T . dO / (1 - p).
//
// The list of tiles of attention/visibility/gradient_tiles.cuh, 128 rows or keys by 128 columns, or by 64 if there are no more;
// three products of terms for each.
// dK and dV read dS and P as they lie, row after row; wgmma transposes them. A step of 64 in k has one power of two of each side,
// for the 64 rows or keys of a warpgroup: a factor of what the step adds, relative to the largest power so far. So sums are as
// exact as float, whatever the magnitudes of the steps.
// Every sum has one order, also where several CTAs have parts of it: no atomics on sums. What spans slices goes on in the gradient
// itself, which is float.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: SplitHalfWgmmaTile::Shared, Tickets. Registers: 232 a consumer
// thread: 64 sums, 64 of a part (half as many each for 64 columns), the rest addresses.
#include "attention/sm90/split_half/backward.h"
#include "attention/sm90/split_half/terms_map.h"
#include "attention/visibility/gradient_tiles.cuh"
#include "core/device_info.h"
#include "device/common/batch.cuh"
#include "gemm/sm90/steps.cuh"
#include "gemm/sm90/tickets.cuh"
#include "gemm/split_half/epilogue.cuh"

namespace attention_ext {
namespace {

// What is summed, in order: tiles of the first list in parts of their sums, all of one part before the next; then the steps of the
// other's tiles, one tile's after another's, in equal shares: a tile each, or an SM each, where tiles would leave SMs without one.
template <class Tile>
struct SplitHalfGradientLists {
  GradientTiles<Tile> parted, other;
  int parts;
  unsigned steps, share;  // the most of a tile's; of a share
  __host__ __device__ unsigned in_parts() const { return parted.all() * static_cast<unsigned>(parts); }
  __host__ __device__ unsigned other_steps() const { return other.all() * steps; }
  __host__ __device__ unsigned all() const { return in_parts() + (other_steps() + share - 1) / share; }
};

struct SplitHalfGradientsMaps {
  // Of scores' blocks boxes of 64 rows by 64 columns; grad_rows: of 128 rows.
  CUtensorMap weights, grads, grad_rows, query, key, grad_out;
};

// How parts are added to a warpgroup's rows: by the powers of two of the step's blocks, relative to the largest so far.
template <class Tile>
struct BlockPromotion {
  const int32_t *g_scores, *g_operand;             // of the step after this one
  int64_t scores_step, next_scores, next_operand;  // from step to step; and from a head's last one to the next head's first
  int steps_of_head, left_of_head, left;           // steps that have not been read
  int next;                                        // exponent of the step after this one
  int top = -(1 << 30);
  float factor;

  __device__ __forceinline__ void read_next() {
    next = kRowOfZeros;
    if (left <= 0) return;
    const int scores = *g_scores, operand = *g_operand;
    if (scores != kRowOfZeros && operand != kRowOfZeros) next = scores + operand;
    g_scores += scores_step;
    ++g_operand;
    --left;
    if (--left_of_head == 0) {
      left_of_head = steps_of_head;
      g_scores += next_scores;
      g_operand += next_operand;
    }
  }
  __device__ __forceinline__ void begin_step(int, float (&product)[Tile::kN / 2]) {
    if (next == kRowOfZeros) {
      factor = 0.0f;
    } else {
      if (next > top) {
        const float before = relative_to_largest(top, next);
#pragma unroll
        for (int i = 0; i < Tile::kN / 2; ++i) product[i] *= before;
        top = next;
      }
      factor = relative_to_largest(next, top);
    }
    read_next();
  }
  __device__ __forceinline__ void add(float (&product)[Tile::kN / 2], const float (&part)[Tile::kN / 2]) const {
#pragma unroll
    for (int i = 0; i < Tile::kN / 2; ++i) product[i] = fmaf(part[i], factor, product[i]);
  }
};

template <class Tile>
struct SplitHalfGradients {
  struct Place : GradientTiles<Tile>::Place {
    unsigned tile;    // of its list
    int part, parts;  // of its sum
  };
  static constexpr int kBlock = kSplitHalfBlock;
  static_assert(Tile::kK == kBlock && Tile::kM == 2 * kBlock, "a step, and a warpgroup's rows, have one exponent");

  const SplitHalfGradientsParams& p;
  const SplitHalfGradientLists<Tile>& lists;

  __device__ __forceinline__ int64_t end_key() const { return min(p.slice.col_begin + p.slice.col_count, p.keys); }
  // Query heads that a key head's sum goes over.
  __device__ __forceinline__ int heads() const { return static_cast<int>(min(p.group, p.slice.batch_count)); }

  // visit(place) for the part or share of that number.
  template <class Visit>
  __device__ __forceinline__ void for_each_place(unsigned number, Visit visit) const {
    const bool in_share = number >= lists.in_parts();
    const GradientTiles<Tile>& list = in_share ? lists.other : lists.parted;
    const unsigned steps = lists.steps, share = lists.share;
    unsigned begin = 0, end = 0, tile = in_share ? 0 : number % list.all();
    if (in_share) {
      begin = (number - lists.in_parts()) * share;
      end = min(begin + share, lists.other_steps());
      tile = (end - 1) / steps;
    }
    // A share's last tile first: the next share, which ends with the rest of that tile, finds its beginning added.
#pragma unroll 1
    for (;; --tile) {
      Place at;
      static_cast<typename GradientTiles<Tile>::Place&>(at) = list.place(tile, p.slice, p.sequence, end_key());
      at.tile = tile;
      int first, last;  // of its steps, which may be fewer than the most
      const unsigned tile_begin = tile * steps;
      if (in_share) {
        at.part = static_cast<int>(begin / share - tile_begin / share);
        at.parts = static_cast<int>((tile_begin + steps - 1) / share - tile_begin / share) + 1;
        first = static_cast<int>(max(begin, tile_begin) - tile_begin);
        last = static_cast<int>(min(end, tile_begin + steps) - tile_begin);
      } else {
        at.part = static_cast<int>(number / list.all());
        at.parts = lists.parts;
        const int most = (at.steps + at.parts - 1) / at.parts;
        first = at.part * most;
        last = first + most;
      }
      first = min(first, at.steps);
      at.k_begin += first * Tile::kK;
      at.steps = min(last, at.steps) - first;
      visit(at);
      if (!in_share || tile_begin <= begin) return;
    }
  }
  __device__ __forceinline__ int64_t row_blocks() const { return (p.slice.row_count + kBlock - 1) / kBlock; }
  __device__ __forceinline__ int col_blocks() const { return static_cast<int>(p.pitch / kBlock); }

  __device__ __forceinline__ void load(StepLoader<Tile>& loader, const SplitHalfGradientsMaps& maps, unsigned number) const {
    const int first_block = static_cast<int>(p.slice.col_begin) / kBlock;
    for_each_place(number, [&](const Place& at) {
      if (at.steps == 0) return;
      if (at.of == kGradQuery) {
        TensorPosition a = {{0, at.m, 0, first_block + at.k_begin / kBlock, static_cast<int>(at.slice_index)}};
        TensorPosition b = {{at.col, at.k_begin, 0, static_cast<int>(matrix_of_slice(at.n, p.slice, p.group)), 0}};
        loader.template load<false, true, true>(maps.grad_rows, a, maps.key, b, at.steps);
        return;
      }
      const bool is_value = at.of == kGradValue;
      const CUtensorMap& map_a = is_value ? maps.weights : maps.grads;
      const CUtensorMap& map_b = is_value ? maps.grad_out : maps.query;
#pragma unroll 1
      for (int head = 0; head < heads(); ++head) {
        const int matrix = static_cast<int>(at.slice_index) + head;
        TensorPosition a = {{0, at.k_begin, 0, first_block + at.m / kBlock, matrix}};
        TensorPosition b = {{at.col, at.k_begin, 0, matrix, 0}};
        loader.template load<true, true, true>(map_a, a, map_b, b, at.steps);
      }
    });
  }

  __device__ __forceinline__ void multiply(StepMultiplier<Tile>& multiplier, unsigned number, int row) const {
    for_each_place(number, [&](const Place& at) {
      float product[Tile::kN / 2];
#pragma unroll
      for (int i = 0; i < Tile::kN / 2; ++i) product[i] = 0.0f;
      int top = 0;
      if (at.steps == 0) {
        multiplier.let_follow();
      } else {
        BlockPromotion<Tile> promotion = promotion_of(at, row);
        promotion.read_next();
        if (at.of == kGradQuery) {
          multiplier.template multiply_terms<false, true>(product, at.steps, promotion);
        } else {
          multiplier.template multiply_terms<true, true>(product, at.steps * heads(), promotion);
        }
        top = promotion.top;
      }
      wait_for_part_before(at, row);
      if (at.steps > 0 || is_first(at)) store(at, row, top, product);
      end_part(at, row);
    });
  }

  // Of a tile and a warpgroup: parts that have been added to the gradient; 0 before the launch and after it.
  __device__ __forceinline__ unsigned* parts_done(const Place& at, int row) const {
    return p.parts_done + 2 * at.tile + row / kBlock;
  }
  __device__ __forceinline__ void wait_for_part_before(const Place& at, int row) const {
    if (at.part == 0) return;
    const volatile unsigned* g_done = parts_done(at, row);
    while (*g_done != static_cast<unsigned>(at.part)) {
    }
    __threadfence();  // what it added is seen
  }
  __device__ __forceinline__ void end_part(const Place& at, int row) const {
    if (at.parts == 1) return;
    barrier_sync(kBarrierRows + row / kBlock, 128);  // the warpgroup has added its part
    if (threadIdx.x % 128 != 0) return;
    __threadfence();
    *static_cast<volatile unsigned*>(parts_done(at, row)) = at.part + 1 == at.parts ? 0u : static_cast<unsigned>(at.part + 1);
  }

  __device__ __forceinline__ BlockPromotion<Tile> promotion_of(const Place& at, int row) const {
    const bool is_row = at.of == kGradQuery;
    const int64_t rows = row_blocks();
    const int cols = col_blocks(), first_block = static_cast<int>(p.slice.col_begin) / kBlock;
    const int own = (at.m + row) / kBlock + (is_row ? 0 : first_block), k = at.k_begin / kBlock;  // blocks of rows or keys
    const int64_t of_head = (at.slice_index * rows + (is_row ? own : k)) * cols + (is_row ? first_block + k : own);
    BlockPromotion<Tile> promotion;
    promotion.g_scores = (at.of == kGradValue ? p.weight_exponents : p.grad_exponents) + of_head;
    promotion.scores_step = is_row ? 1 : cols;
    promotion.next_scores = (rows - at.steps) * cols;
    promotion.next_operand = rows - at.steps;
    promotion.steps_of_head = promotion.left_of_head = at.steps;
    promotion.left = is_row ? at.steps : at.steps * heads();
    if (own >= (is_row ? rows : cols)) promotion.left = 0;  // a warpgroup of rows or keys that do not exist
    if (is_row) {
      const int64_t key_blocks = (end_key() - p.slice.col_begin + kBlock - 1) / kBlock;
      promotion.g_operand = p.key_exponents + matrix_of_slice(at.n, p.slice, p.group) * key_blocks + k;
    } else {
      promotion.g_operand = (at.of == kGradValue ? p.grad_out_exponents : p.query_exponents) + at.slice_index * rows + k;
    }
    return promotion;
  }

  // Whether nothing has been added to the tile's sums yet.
  __device__ __forceinline__ bool is_first(const Place& at) const {
    if (at.part > 0) return false;
    if (at.of == kGradQuery) return p.slice.col_begin == 0;
    // A causal slice of rows has all keys that they see: those from its first row on, no earlier row sees.
    const bool first_rows = p.slice.row_begin == 0 || (p.sequence.causal && p.slice.col_begin + at.m >= p.slice.row_begin);
    return first_rows && at.n % p.group == 0;
  }

  __device__ __forceinline__ void store(const Place& at, int row, int top, const float (&product)[Tile::kN / 2]) const {
    const SplitHalfGradientOf& gradient = p.of[at.of];
    const MatrixView& out = gradient.out;
    const float factor = static_cast<float>(gradient.factor);
    const int64_t first_m = at.m + row + (at.of == kGradQuery ? p.slice.row_begin : p.slice.col_begin);
    float* g_out = static_cast<float*>(out.data) + batch_offset(p.batch, out, at.n, 0) + first_m * out.row_stride;
    const bool first = is_first(at);
#pragma unroll
    for (int i = 0; i < Tile::kN / 2; i += 2) {
      const int down = i / 2 % 2 * 8, col = at.col + i / 4 * 8 + static_cast<int>(threadIdx.x % 4 * 2);
      const int cols = at.col + at.cols;
      if (row + down >= at.ms || col >= cols) continue;
      float x[2] = {times_power_of_two(product[i] * factor, top), times_power_of_two(product[i + 1] * factor, top)};
      float* g_pair = g_out + down * out.row_stride + col * out.col_stride;
      if (out.vector && col + 1 < cols) {
        float2& pair = *reinterpret_cast<float2*>(g_pair);
        if (!first) {
          x[0] += pair.x;
          x[1] += pair.y;
        }
        pair = make_float2(x[0], x[1]);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (col + e < cols) g_pair[e * out.col_stride] = first ? x[e] : g_pair[e * out.col_stride] + x[e];
      }
    }
  }
};

template <class Tile>
using SplitHalfGradientsShared = SharedWithTickets<Tile, Ticket>;

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    split_half_gradients_kernel(const __grid_constant__ SplitHalfGradientsParams params,
                                const __grid_constant__ SplitHalfGradientsMaps maps,
                                const __grid_constant__ SplitHalfGradientLists<Tile> lists) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  const SplitHalfGradients<Tile> work = {params, lists};
  run_by_tickets<Tile>(
      *reinterpret_cast<SplitHalfGradientsShared<Tile>*>(s_bytes), params.ticket, lists.all(), true, [](Ticket&) {},
      [&](StepLoader<Tile>& loader, Ticket& ticket) {
        work.load(loader, maps, ticket.tile);
        loader.expect(0);
      },
      [&](StepMultiplier<Tile>& multiplier, const Ticket& ticket, uint32_t, int row) {
        work.multiply(multiplier, ticket.tile, row);
      });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

// Of P or dS: columns of a block, rows, terms, blocks, matrices.
cudaError_t make_blocks_map(CUtensorMap& map, void* terms, int64_t matrices, int64_t rows, int64_t pitch, int box_rows) {
  const int64_t block = kSplitHalfBlock;
  const BatchDims dims = {{matrices, pitch / block, 2}, 3};
  MatrixView view = {};
  view.data = terms;
  view.row_stride = 2 * pitch;
  view.batch_stride[0] = rows * view.row_stride;
  view.batch_stride[1] = 2 * block;
  view.batch_stride[2] = block;
  view.col_stride = view.group = 1;
  return make_tensor_map(map, DataType::kHalf, dims, view, rows, block, box_rows);
}

template <int kN>
cudaError_t launch(const SplitHalfGradientsParams& params, void* query_terms, void* key_terms, void* grad_out_terms,
                   cudaStream_t stream) {
  using Tile = SplitHalfWgmmaTile<true, kSplitHalfPromoted, kN>;
  const Slice& slice = params.slice;
  const int64_t E = params.of[kGradKey].width, Ev = params.of[kGradValue].width, matrices = slice.batch_count,
                rows = slice.row_count;
  const int64_t keys = std::min(slice.col_begin + slice.col_count, params.keys) - slice.col_begin;
  SplitHalfGradientsMaps maps;
  cudaError_t status = make_blocks_map(maps.weights, params.weights, matrices, rows, params.pitch, Tile::kK);
  const auto then = [&](cudaError_t made) {
    if (status == cudaSuccess) status = made;
  };
  then(make_blocks_map(maps.grads, params.grads, matrices, rows, params.pitch, Tile::kK));
  then(make_blocks_map(maps.grad_rows, params.grads, matrices, rows, params.pitch, Tile::kM));
  then(make_terms_map(maps.query, query_terms, matrices, rows, E, Tile::kK));
  then(make_terms_map(maps.grad_out, grad_out_terms, matrices, rows, Ev, Tile::kK));
  then(make_terms_map(maps.key, key_terms, matrices_of_slice(slice, params.group), std::max<int64_t>(keys, 1), E, Tile::kK));
  if (status != cudaSuccess) return status;
  const SplitHalfGradientParts& parts = params.parts;
  const auto list = [&](bool of_rows, bool of_keys) {
    return GradientTiles<Tile>(slice, params.sequence.causal, params.group, E, Ev, of_rows, of_keys);
  };
  SplitHalfGradientLists<Tile> lists = {list(parts.of_rows, parts.of_keys), list(!parts.of_rows, !parts.of_keys),
                                        static_cast<int>(parts.count), 0, 0};
  lists.share = lists.steps = static_cast<unsigned>(ceil_div(std::max(rows, slice.col_count), Tile::kK));
  if (parts.in_shares) {
    constexpr int64_t kLeast = 4;  // steps
    lists.share = static_cast<unsigned>(std::max(ceil_div(lists.other_steps(), current_device_info().sms), kLeast));
  }
  return launch_persistent<Tile, sizeof(SplitHalfGradientsShared<Tile>)>(split_half_gradients_kernel<Tile>, lists.all(), stream,
                                                                         params, maps, lists);
}

}  // namespace

cudaError_t launch_split_half_gradients(const SplitHalfGradientsParams& params, void* query_terms, void* key_terms,
                                        void* grad_out_terms, cudaStream_t stream) {
  const bool narrow = params.of[kGradKey].width <= 64 && params.of[kGradValue].width <= 64;
  return (narrow ? launch<64> : launch<128>)(params, query_terms, key_terms, grad_out_terms, stream);
}

}  // namespace attention_ext
