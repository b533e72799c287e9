// A tile of the row kernel in shared memory, and its loading side: a thread for keys and values, one for queries with their
// gradients. Under a mask the first one's warp looks for the blocks that are not hidden.
#pragma once

#include "attention/sm90/rows/mark.cuh"
#include "attention/sm90/rows_backward/parts.cuh"
#include "attention/sm90/rows_backward/shown_blocks.cuh"
#include "attention/visibility/key_range.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/warpgroup.cuh"

namespace attention_ext {

// kGeneral_: there is a mask or dropout.
template <class T_, int kClass, bool kGeneral_>
struct RowGradTile {
  using T = T_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr RowsBackwardShape kShape = rows_backward_shape(kClass, kGeneral);
  static constexpr int kM = kRowsBackwardTile;  // queries
  static constexpr int kRecords = kM / QueryRecord::kQueries;
  static constexpr int kN = kShape.row_keys;
  static constexpr int kStep = 64;  // of E or Ev: a row of 128 bytes, the widest swizzle
  static constexpr int kSteps = kShape.steps;
  static constexpr int kPlaces = kShape.row_places, kKeys = kShape.row_key_slots, kValues = kShape.row_value_slots;
  static constexpr bool kAhead = kShape.row_ahead;
  static constexpr bool kWideProducer = kGeneral && kSteps == 3;  // which 24 registers do not hold; at 4 the consumers need 240
  static constexpr bool kOwnStrips = kSteps <= 2;                 // else a gradient leaves through the place of its queries
  static constexpr int kMarkedKeys = kShape.marked_keys();
  static_assert(kM % kMarkedRows == 0 && kN % kMarkedKeys == 0, "a block is whole cells of the marks");

  // What a tile is. It stays in shared memory, as registers are scarce.
  struct Work {
    uint32_t n;          // flat batch index of the head
    int row, keys;       // the first query; the keys that any of them sees
    int64_t query_grad;  // where the first one lies
  };
  static constexpr int kWorks = kPlaces + 1;  // the consumers may still be in the tile before

  // Tiles lie on 1024-byte boundaries, where the swizzle's pattern begins.
  struct Shared {
    alignas(1024) T query[kPlaces][kSteps][kM * kStep];
    alignas(1024) T grad_out[kPlaces][kSteps][kM * kStep];
    alignas(1024) T key[kKeys][kSteps][kN * kStep];      // of a block, until dQ is there
    alignas(1024) T value[kValues][kSteps][kN * kStep];  // until dP is there
    alignas(1024) T strip[kOwnStrips ? kRowsBackwardConsumers * 4 : 1][kOwnStrips ? 16 * kStep : 8];  // of each warp
    QueryRecord records[kPlaces][kRecords];                                                           // of a tile's queries
    Work work[kWorks];
    uint64_t query_full[kPlaces];   // TMA arrives with the bytes of queries, gradients and records; the consumers wait
    uint64_t query_empty[kPlaces];  // the consumers' threads arrive; the producer waits
    uint64_t key_full[kKeys];       // TMA arrives with the bytes of keys; the consumers wait
    uint64_t key_empty[kKeys];      // the consumers' warps arrive; the producer waits
    uint64_t value_full[kValues], value_empty[kValues];  // the same of values
    // Of the general instance: of a slot of keys, what ShownBlocks says of the block; -1 after the tile's last one.
    int taken[kGeneral ? kKeys : 1];
    TensorPosition boxes[kGeneral ? 2 : 1];
  };
  static_assert(sizeof(Shared) <= 227 * 1024, "an SM gives a CTA 227 KB of shared memory");
};

// A RingPlace in one register: a producer has few.
template <int kSlots>
struct PackedRingPlace {
  uint32_t at = 0;  // of twice around
  __device__ __forceinline__ uint32_t slot() const { return at % kSlots; }
  __device__ __forceinline__ uint32_t parity() const { return at / kSlots; }
  __device__ __forceinline__ void advance() { at = at + 1 == 2 * kSlots ? 0 : at + 1; }
};

// What a tile of the order is.
template <class Tile>
struct RowGradPlace {
  uint32_t n;
  int row, keys;

  __device__ __forceinline__ RowGradPlace(const RowsBackwardParams& p, const RowsBackwardOrder& order, uint32_t place) {
    const auto at = order.at(place);
    n = at.head;
    row = static_cast<int>(order.tiles_of_head - 1 - at.tile) * Tile::kM;
    keys = key_range(p.sequence, n, p.S).end_of_tile(row, min(Tile::kM, static_cast<int>(p.L) - row));
  }
};

// Loads keys and values. One thread; of the general instance a warp.
template <class Tile>
__device__ __forceinline__ void load_keys(const RowsBackwardParams& p, const RowsBackwardMaps& maps, const RowsMarks& marks,
                                          typename Tile::Shared& shared, const RowsBackwardOrder& order) {
  PackedRingPlace<Tile::kKeys> key_slot;
  PackedRingPlace<Tile::kValues> value_slot;
  RowsPlaces places(order.tiles);
#pragma unroll 1
  while (places.next()) {
    const RowGradPlace<Tile> at(p, order, places.place());
    TensorPosition of_tile[Tile::kGeneral ? 1 : 2];  // of the general instance in shared memory: registers are scarce
    TensorPosition& key = Tile::kGeneral ? shared.boxes[0] : of_tile[0];
    TensorPosition& value = Tile::kGeneral ? shared.boxes[1] : of_tile[Tile::kGeneral ? 0 : 1];
    if (!Tile::kGeneral || elect_thread()) {
      set_batch(key, p.batch, p.key, at.n);
      set_batch(value, p.batch, p.value, at.n);
    }
    const auto load = [&](auto& to, uint64_t& full, const CUtensorMap& map, TensorPosition box, int block) {
      const uint32_t s_full = shared_address(&full);
      mbarrier_arrive_expect_bytes(s_full, sizeof(to));
      box.at[1] = block * Tile::kN;
#pragma unroll
      for (int step = 0; step < Tile::kSteps; ++step) {
        box.at[0] = step * Tile::kStep;
        tma_load(shared_address(to[step]), &map, box, s_full);
      }
    };
    const auto wait_key = [&] { mbarrier_wait(shared_address(&shared.key_empty[key_slot.slot()]), key_slot.parity() ^ 1); };
    const auto load_key = [&](int block) {
      load(shared.key[key_slot.slot()], shared.key_full[key_slot.slot()], maps.key, key, block);
    };
    const auto load_value = [&](int block) {
      mbarrier_wait(shared_address(&shared.value_empty[value_slot.slot()]), value_slot.parity() ^ 1);
      load(shared.value[value_slot.slot()], shared.value_full[value_slot.slot()], maps.value, value, block);
    };
    const int blocks = (at.keys + Tile::kN - 1) / Tile::kN;
    if constexpr (Tile::kGeneral) {
      const uint32_t cells = static_cast<uint32_t>(cells_of(marks, p.batch, at.n));
      const auto look = [&](int block) -> int {
        if (marks.data == nullptr) return kSomeShown;
        return shown<Tile::kM / kMarkedRows, Tile::kN / Tile::kMarkedKeys>(marks, cells, at.row / kMarkedRows,
                                                                           block * (Tile::kN / Tile::kMarkedKeys));
      };
      ShownBlocks found;
      found.begin_at(blocks);
#pragma unroll 1
      while (found.find(0, look)) {
        const int taken = found.take();
        if (elect_thread()) {
          wait_key();
          shared.taken[key_slot.slot()] = taken;
          load_key(taken / 2);
          load_value(taken / 2);
        }
        key_slot.advance();
        value_slot.advance();
      }
      if (elect_thread()) {  // the end of the tile takes a slot of keys
        wait_key();
        shared.taken[key_slot.slot()] = -1;
        mbarrier_arrive(shared_address(&shared.key_full[key_slot.slot()]));
      }
      key_slot.advance();
    } else {
#pragma unroll 1
      for (int block = blocks - 1; block >= 0; --block) {
        wait_key();
        load_key(block);
        load_value(block);
        key_slot.advance();
        value_slot.advance();
      }
    }
  }
}

// Loads queries with their gradients and records, and says what a tile is. One thread.
template <class Tile>
__device__ __forceinline__ void load_queries(const RowsBackwardParams& p, const RowsBackwardMaps& maps,
                                             typename Tile::Shared& shared, const RowsBackwardOrder& order) {
  RowsPlaces places(order.tiles);
#pragma unroll 1
  while (places.next()) {
    const RowGradPlace<Tile> at(p, order, places.place());
    const uint32_t place = places.template query<Tile::kPlaces>();
    const int64_t query_grad = batch_offset(p.batch, p.grad_query, at.n, 0) + at.row * p.grad_query.row_stride;
    TensorPosition query, grad_out;
    set_batch(query, p.batch, p.query, at.n);
    set_batch(grad_out, p.batch, p.grad_out, at.n);
    mbarrier_wait(shared_address(&shared.query_empty[place]), places.template parity<Tile::kPlaces>() ^ 1);
    shared.work[places.round() % Tile::kWorks] = {at.n, at.row, at.keys, query_grad};
    const uint32_t s_full = shared_address(&shared.query_full[place]);
    mbarrier_arrive_expect_bytes(s_full, sizeof(shared.query[0]) + sizeof(shared.grad_out[0]) + sizeof(shared.records[0]));
    const auto load = [&](auto& to, const CUtensorMap& map, TensorPosition& box) {
      box.at[1] = at.row;
#pragma unroll 1
      for (int step = 0; step < Tile::kSteps; ++step) {
        box.at[0] = step * Tile::kStep;
        tma_load(shared_address(to[step]), &map, box, s_full);
      }
    };
    load(shared.query[place], maps.query, query);
    load(shared.grad_out[place], maps.grad_out, grad_out);
    const QueryRecord* g_records = p.records + static_cast<int64_t>(at.n) * p.records_of_head;
    bulk_load(shared_address(shared.records[place]), g_records + at.row / QueryRecord::kQueries, sizeof(shared.records[0]),
              s_full);
  }
}

}  // namespace attention_ext
