// The column kernel of the backward: dV = P^T dO and dK = scale * dS^T Q, where dS = P (dP - delta) and dP = dO V^T.
//
// A CTA takes 128 keys, 64 for each of two consumer warpgroups, and walks over blocks of queries, of all query heads of the keys'
// group, from the last block to the first one that sees them. Scores are multiplied with keys as rows, so that P^T and dS^T never
// leave registers: a result of wgmma lies there as a left operand of it does. Of block j, after block j + 1:
//   dV += P_{j+1} dO_{j+1}, dK += dS_{j+1} Q_{j+1} and S_j = K Q_j^T | dP_j = V dO_j^T begins; P_j | dP_j is there: dS_j
// or, up to head dim 64, where registers hold P_{j+1} and dS_{j+1} next to dP_j,
//   S_j, dP_j, dV and dK begin together | S_j is there: P_j | dP_j is there: dS_j | dV and dK are there: packed
// Packed, P_j and dS_j are the next operands. What a warpgroup makes of scores runs under the products of the other one, too.
// Above head dim 128 a tile is 64 keys, and the consumers have roles (column_roles.cuh).
// A thread of a third warpgroup loads: keys with values, a tile at a time, and in a ring queries with their gradients and records
// (QueryRecord); two of its warps clear keys that no query sees (unseen_keys.cuh). CTAs stay and take tile after tile. Blocks that
// the tile's keys are all hidden from are left out (shown_blocks.cuh).
// Shared memory: ColumnGradTile::Shared. Registers: 240 a consumer thread (dK and dV 64 or 128, S and dP 96 or 64, P and dS 48 or
// 32, which lie where dP does while that is not there).
#pragma once

#include "attention/sm90/rows/mark.cuh"
#include "attention/sm90/rows_backward/column_general.cuh"
#include "attention/sm90/rows_backward/column_roles.cuh"
#include "attention/sm90/rows_backward/column_tile.cuh"
#include "attention/sm90/rows_backward/shown_blocks.cuh"
#include "attention/sm90/rows_backward/unseen_keys.cuh"
#include "attention/visibility/key_range.cuh"
#include "device/sm90/tma.cuh"

namespace attention_ext {

// Loads. One thread, which waits for nothing but room; of the general instance a warp.
template <class Tile>
class ColumnProducer {
 public:
  using T = typename Tile::T;
  using TileBoxes = typename Tile::Boxes;
  using Head = typename Tile::Head;

  __device__ __forceinline__ ColumnProducer(const RowsBackwardParams& p, const RowsBackwardMaps& maps, const RowsMarks& marks,
                                            typename Tile::Shared& shared)
      : p_(p), maps_(maps), marks_(marks), shared_(shared) {}

  __device__ __forceinline__ void run(const RowsBackwardOrder& order) {
    RowsPlaces places(order.tiles);
#pragma unroll 1
    while (places.next()) {
      const uint32_t place = places.template query<Tile::kPlaces>();
      const auto at = order.at(places.place());
      const auto& cut = p_.cut;
      const uint32_t parts = cut.heads * cut.blocks, part = at.head % parts, group = static_cast<uint32_t>(p_.key_group);
      const uint32_t first = part % cut.heads * cut.heads_of_part, heads = min(cut.heads_of_part, group - first);
      const uint32_t n = (cut.first + at.head / parts) * group + first;
      const int key = static_cast<int>(at.tile) * Tile::kN, keys = key_range(p_.sequence, n, p_.S).keys;
      const int all = static_cast<int>((p_.L + Tile::kM - 1) / Tile::kM), blocks = static_cast<int>(cut.blocks);
      int begin = key >= keys ? all : p_.sequence.causal ? min(key / Tile::kM, all) : 0;
      const int share = (all - begin + blocks - 1) / blocks;
      begin = min(begin + static_cast<int>(part / cut.heads) * share, all);
      const int end = min(begin + share, all);
      if constexpr (Tile::kGeneral) {
        load_shown(places, at.head, n, heads, key, keys, begin, end);
      } else {
        TileBoxes boxes;
        begin_tile(boxes, place, places, at.head, n, heads, key, keys, begin, end);
        end_tile(places, begin < end);
#pragma unroll 1
        for (uint32_t head = n; head < n + heads; ++head) load_head(head, begin, end);
      }
    }
  }

 private:
  template <int kElements>
  __device__ __forceinline__ void load(T (&to)[Tile::kSteps][kElements], const CUtensorMap& map, TensorPosition box, int row,
                                       uint32_t s_full) const {
    box.at[1] = row;
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      box.at[0] = step * Tile::kStep;
      tma_load(shared_address(to[step]), &map, box, s_full);
    }
  }

  // What the tile is, and its keys with values where some query sees them. The phase lasts until end_tile. number: of the order's
  // heads, by which a part's sums are placed. All that divides comes before the place is waited for.
  __device__ __forceinline__ void begin_tile(TileBoxes& boxes, uint32_t place, const RowsPlaces& places, uint32_t number,
                                             uint32_t n, uint32_t heads, int key, int keys, int begin, int end) const {
    auto& work = work_of(places);
    work.n = n;
    work.heads = heads;
    work.key = key;
    work.keys = keys;
    work.begin = begin;
    work.end = end;
    work.key_grad = batch_offset(p_.batch, p_.grad_key, n, number) + key * p_.grad_key.row_stride;
    work.value_grad = batch_offset(p_.batch, p_.grad_value, n, number) + key * p_.grad_value.row_stride;
    set_batch(boxes.key, p_.batch, p_.key, n);
    set_batch(boxes.value, p_.batch, p_.value, n);
    mbarrier_wait(shared_address(&shared_.key_empty[place]), places.template parity<Tile::kPlaces>() ^ 1);
    if (work.begin == work.end) return;
    const uint32_t s_full = shared_address(&shared_.key_full[place]);
    load(shared_.key[place], maps_.key, boxes.key, work.key, s_full);
    load(shared_.value[place], maps_.value, boxes.value, work.key, s_full);
  }
  __device__ __forceinline__ typename Tile::Work& work_of(const RowsPlaces& places) const {
    return shared_.work[places.round() % Tile::kWorks];
  }
  __device__ __forceinline__ void end_tile(const RowsPlaces& places, bool loaded) const {
    mbarrier_arrive_expect_bytes(shared_address(&shared_.key_full[places.template query<Tile::kPlaces>()]),
                                 loaded ? sizeof(shared_.key[0]) + sizeof(shared_.value[0]) : 0);
  }

  // What divides is found before the head's blocks: it takes as long as a block.
  __device__ __forceinline__ void begin_head(Head& head, uint32_t n) const {
    set_batch(head.query_box, p_.batch, p_.query, n);
    set_batch(head.grad_box, p_.batch, p_.grad_out, n);
    head.n = n;
    head.g_records = p_.records + static_cast<int64_t>(n) * p_.records_of_head;
  }
  // Blocks of a head's queries, from the last one to the first.
  __device__ __forceinline__ void load_head(uint32_t n, int begin, int end) {
    Head head;
    begin_head(head, n);
#pragma unroll 1
    for (int block = end - 1; block >= begin; --block) {
      load_block(head, block);
      stage_.advance();
    }
  }
  __device__ __forceinline__ void load_block(const Head& head, int block) const {
    const int slot = stage_.slot;
    mbarrier_wait(shared_address(&shared_.empty[slot]), stage_.parity ^ 1);
    // By roles the one consumer begins with queries, the other one with gradients.
    const uint32_t s_full = shared_address(&shared_.full[slot]);
    const uint32_t s_grad_full = Tile::kRoles ? shared_address(&shared_.grad_full[slot]) : s_full;
    if constexpr (!Tile::kGeneral) arrive();
    load(shared_.query[slot], maps_.query, head.query_box, block * Tile::kM, s_full);
    bulk_load(shared_address(shared_.records[slot]), head.g_records + block * Tile::kRecords, sizeof(shared_.records[0]),
              s_full);
    if constexpr (Tile::kRoles) mbarrier_arrive_expect_bytes(s_grad_full, sizeof(shared_.grad_out[0]));
    load(shared_.grad_out[slot], maps_.grad_out, head.grad_box, block * Tile::kM, s_grad_full);
  }
  __device__ __forceinline__ void arrive() const {
    mbarrier_arrive_expect_bytes(
        shared_address(&shared_.full[stage_.slot]),
        sizeof(shared_.query[0]) + sizeof(shared_.records[0]) + (Tile::kRoles ? 0 : sizeof(shared_.grad_out[0])));
  }

  // A tile, and of all heads of the group the blocks that some of its keys are shown to. A stage is full when the next block has
  // been looked for, as the consumers want to know which is the tile's last one. By a warp.
  __device__ __forceinline__ void load_shown(const RowsPlaces& places, uint32_t number, uint32_t n, uint32_t heads, int key,
                                             int keys, int begin, int end) {
    if (elect_thread()) {
      begin_tile(shared_.boxes, places.template query<Tile::kPlaces>(), places, number, n, heads, key, keys, begin, end);
    }
    __syncwarp();  // the tile's work is there: all lanes read it again and again, as registers are scarce
    const auto& work = work_of(places);
    uint32_t next_head = n, cells = static_cast<uint32_t>(cells_of(marks_, p_.batch, n));
    const auto look = [&](int block) -> int {
      if (marks_.data == nullptr) return kSomeShown;
      return shown<1, Tile::kN / Tile::kMarkedKeys>(marks_, cells, block, work.key / Tile::kMarkedKeys);
    };
    ShownBlocks blocks;
    blocks.begin_at(work.end);
    const auto find = [&] {
#pragma unroll 1
      while (!blocks.find(work.begin, look)) {
        if (++next_head == work.n + work.heads) return false;
        cells = static_cast<uint32_t>(cells_of(marks_, p_.batch, next_head));
        blocks.begin_at(work.end);
      }
      return true;
    };
    bool more = find();
    if (elect_thread()) {
      const bool loaded = work.begin < work.end;
      if (more) {
        begin_head(shared_.head, next_head);
      } else {
        work_of(places).end = work.begin;
      }
      end_tile(places, loaded);
    }
#pragma unroll 1
    while (more) {
      const int taken = blocks.take();
      if (elect_thread()) {
        if (shared_.head.n != next_head) begin_head(shared_.head, next_head);
        load_block(shared_.head, taken >> 1);
        shared_.marked[stage_.slot] = taken & 1 ? kShownWhole : 0;
      }
      more = find();
      if (elect_thread()) {
        if (!more) shared_.marked[stage_.slot] |= kLastOfTile;
        arrive();
      }
      stage_.advance();
    }
  }

  const RowsBackwardParams& p_;
  const RowsBackwardMaps& maps_;
  const RowsMarks& marks_;
  typename Tile::Shared& shared_;
  RingPlace<Tile::kStages> stage_;
};

// One consumer warpgroup.
template <class Tile>
class ColumnConsumer {
 public:
  using T = typename Tile::T;

  __device__ __forceinline__ ColumnConsumer(const RowsBackwardParams& p, typename Tile::Shared& shared, int consumer)
      : p_(p), shared_(shared), turns_{consumer}, consumer_(consumer) {}

  __device__ __forceinline__ void run(const RowsBackwardOrder& order) {
    turns_.begin();
    RowsPlaces places(order.tiles);
#pragma unroll 1
    while (places.next()) {
      place_ = places.template query<Tile::kPlaces>();
      mbarrier_wait(shared_address(&shared_.key_full[place_]), places.template parity<Tile::kPlaces>());
      const auto& work = shared_.work[places.round() % Tile::kWorks];
      work_ = &work;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 32 * kPartSteps; ++i) key_grad_[part][i] = value_grad_[part][i] = 0.0f;
      }
      int left = (work.end - work.begin) * static_cast<int>(work.heads);
      const bool any = left > 0;
      if (any) {
        step<true>();
#pragma unroll 1
        while (Tile::kGeneral ? !is_last(before()) : --left > 0) step<false>();
      }
      mbarrier_arrive(shared_address(&shared_.key_empty[place_]));
      if (any) {
        wgmma_fence();
        add_grads();
        wgmma_wait<0>();
        end_grads();
      }
      finish(work);
    }
  }

 private:
  static constexpr int kScores = Tile::kM / 2;
  static constexpr int kSlices = Tile::kM / 16;  // of a block, each the k of one product with queries or their gradients
  static constexpr int kPartSteps = Tile::kSteps % 2 == 1 ? 1 : 2, kParts = Tile::kSteps / kPartSteps;  // of dK, by instruction
  // As in ColumnRole.
  __device__ __forceinline__ bool is_last(int slot) const { return (shared_.marked[slot] & kLastOfTile) != 0; }
  // Stage of the block before. Registers are scarce: it is found, not kept.
  __device__ __forceinline__ int before() const { return stage_.slot == 0 ? Tile::kStages - 1 : stage_.slot - 1; }
  __device__ __forceinline__ void pin_grads() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      pin_registers(value_grad_[part]);
      pin_registers(key_grad_[part]);
    }
  }
  // dV and dK of the block before, begun.
  __device__ __forceinline__ void add_grads() {
    add_product<T>(value_grad_, weights_, shared_address(shared_.grad_out[before()][0]));
    add_product<T>(key_grad_, score_grads_, shared_address(shared_.query[before()][0]));
  }
  // They are there.
  __device__ __forceinline__ void end_grads() {
    pin_grads();
    mbarrier_arrive(shared_address(&shared_.empty[before()]));
  }
  // S and dP of a block, begun. s_rows: where the consumer's keys and their values begin in their boxes.
  __device__ __forceinline__ void multiply_keys(int slot, uint32_t s_rows) {
    multiply_rows<T, Tile::kSteps, Tile::kN, Tile::kM>(scores_, shared_address(shared_.key[place_][0]) + s_rows,
                                                       shared_address(shared_.query[slot][0]));
  }
  __device__ __forceinline__ void multiply_values(int slot, uint32_t s_rows) {
    multiply_rows<T, Tile::kSteps, Tile::kN, Tile::kM>(weight_grads_, shared_address(shared_.value[place_][0]) + s_rows,
                                                       shared_address(shared_.grad_out[slot][0]));
  }

  // A block of queries. kFirst: of the tile's. An operand in registers is made while no product is under way: ptxas would wait for
  // each product on its own.
  template <bool kFirst>
  __device__ __forceinline__ void step() {
    const int slot = stage_.slot;
    mbarrier_wait(shared_address(&shared_.full[slot]), stage_.parity);
    const QueryRecord* records = shared_.records[slot];
    const uint32_t s_rows = consumer_ * 64 * 128;
    bool careful = false;  // found out under the products
    turns_.take();
    wgmma_fence();
    if constexpr (Tile::kAhead) {
      multiply_keys(slot, s_rows);
      multiply_values(slot, s_rows);
      if constexpr (!kFirst) add_grads();
      turns_.pass();
      careful = column_careful<Tile>(p_, records, *work_, consumer_ * 64);
      wgmma_wait<kFirst ? 1 : 3>();
      pin_registers(scores_);
    } else {
      if constexpr (!kFirst) add_grads();
      multiply_keys(slot, s_rows);
      turns_.pass();
      careful = column_careful<Tile>(p_, records, *work_, consumer_ * 64);
      wgmma_wait<0>();  // of all three, as dP takes the registers of their operands
      pin_registers(scores_);
      if constexpr (!kFirst) end_grads();
      wgmma_fence();
      multiply_values(slot, s_rows);
    }
    float factor = Exponents<T>::kUnscale;
    make_column_weights<Tile>(scores_, p_, records, *work_, consumer_ * 64, careful, Tile::kGeneral ? shared_.marked[slot] : 0);
    if constexpr (Tile::kGeneral) {
      if (p_.dropout.seed != nullptr) mark_dropped_columns<Tile>(scores_, p_, records, *work_, consumer_ * 64);
      factor *= p_.keep_factor;
    }
    wgmma_wait<Tile::kAhead && !kFirst ? 2 : 0>();
    pin_registers(weight_grads_);
    column_score_grads(weight_grads_, scores_, records, careful, Tile::kGeneral && p_.dropout.seed != nullptr, factor);
    if constexpr (Tile::kAhead && !kFirst) {
      wgmma_wait<0>();
      end_grads();
    }
    pack<T, Tile::kGeneral>(weights_, scores_);
    pack<T>(score_grads_, weight_grads_);
    stage_.advance();
  }

  __device__ __forceinline__ void finish(const typename Tile::Work& work) const {
    const int warp_row = forget(threadIdx.x / 32 * 16);  // of the tile's keys; not kept in registers through the tile
    const int rows = static_cast<int>(p_.S) - work.key - warp_row, seen = work.keys - work.key - warp_row;
    const uint32_t s_strip = shared_address(shared_.strip[threadIdx.x / 32]);
    store_grad<T>(key_grad_, p_.scale_factor, p_.grad_key, work.key_grad + warp_row * p_.grad_key.row_stride, rows, seen,
                  static_cast<int>(p_.E), p_.wide_grads, s_strip);
    store_grad<T>(value_grad_, Tile::kGeneral ? Exponents<T>::kUnscale * p_.keep_factor : Exponents<T>::kUnscale, p_.grad_value,
                  work.value_grad + warp_row * p_.grad_value.row_stride, rows, seen, static_cast<int>(p_.Ev), p_.wide_grads,
                  s_strip);
  }

  const RowsBackwardParams& p_;
  typename Tile::Shared& shared_;
  const Turns<Tile::kShape.turns> turns_;
  const int consumer_;
  RingPlace<Tile::kStages> stage_;
  uint32_t place_;                   // of the tile's keys and values
  const typename Tile::Work* work_;  // of this tile
  float key_grad_[kParts][32 * kPartSteps], value_grad_[kParts][32 * kPartSteps];
  float scores_[kScores], weight_grads_[kScores];
  uint32_t weights_[kSlices][4], score_grads_[kSlices][4];
};

template <class Tile>
__global__ void __launch_bounds__(kRowsBackwardThreads, 1)
    column_grads_kernel(const __grid_constant__ RowsBackwardParams p, const __grid_constant__ RowsBackwardMaps maps,
                        const __grid_constant__ RowsBackwardOrder order, const __grid_constant__ RowsMarks marks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  typename Tile::Shared& shared = *reinterpret_cast<typename Tile::Shared*>(s_bytes);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, as the compiler should know
  constexpr int kArrivals = 128 * kRowsBackwardConsumers;
  init_ring(shared.full, shared.empty, kArrivals);
  init_ring(shared.key_full, shared.key_empty, kArrivals);
  if constexpr (Tile::kRoles) {
    if (threadIdx.x < Tile::kStages) mbarrier_init(shared_address(&shared.grad_full[threadIdx.x]), 1);
    init_ring(shared.weights_full, shared.weights_empty, 32, 32);
  }
  mbarrier_fence_init();
  __syncthreads();
  if (warpgroup == kRowsBackwardConsumers) {
    give_registers<rows_backward_producer_registers(Tile::kRoles)>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform as well
    if (warp == 0) {
      if (Tile::kGeneral || elect_thread()) ColumnProducer<Tile>(p, maps, marks, shared).run(order);
    } else if (warp >= 2) {
      clear_unseen(p, warp);
    }
  } else {
    take_registers<rows_backward_consumer_registers(Tile::kRoles)>();
    if constexpr (!Tile::kRoles) {
      ColumnConsumer<Tile>(p, shared, warpgroup).run(order);
    } else if (warpgroup == 0) {
      ColumnRole<Tile, false>(p, shared).run(order);
    } else {
      ColumnRole<Tile, true>(p, shared).run(order);
    }
  }
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

}  // namespace attention_ext
