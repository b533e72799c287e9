// Tiles for persistent CTAs as they get free: the thread that loads draws a number and hands it to the warps that multiply. For
// lists whose tiles differ in length, the longest first. Which CTA makes a tile is left to chance, what it makes is not.
// A cluster takes its tiles together: its first CTA draws and writes the number into the shared memory of all, whose barriers count
// the four bytes.
#pragma once

#include <cstddef>

#include "device/sm80/cp_async.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/warpgroup.cuh"
#include "gemm/sm90/steps.cuh"

namespace attention_ext {

constexpr int kTicketSlots = 2;

// As RingPlace, in one register.
struct TicketPlace {
  static_assert(kTicketSlots == 2, "a bit of the count each");
  unsigned count = 0;
  __device__ __forceinline__ unsigned slot() const { return count % 2; }
  __device__ __forceinline__ uint32_t parity() const { return count / 2 % 2; }
};

// In shared memory.
struct Tickets {
  unsigned tile[kTicketSlots];
  uint64_t full[kTicketSlots];  // the first thread that loads arrives; the warps wait, and threads that load but do not draw
  // Of the CTA that draws: every warp of the cluster arrives, and every other thread that loads; the thread that draws waits.
  uint64_t empty[kTicketSlots];
  TicketPlace drawn[2];  // of the threads that load, which may be short of registers
};

// Of a CTA that takes its tiles so.
template <class Tile>
struct SharedWithTickets {
  typename Tile::Shared tile;
  Tickets tickets;
};

// Of the threads that load: one of them draws, and all go by what it drew.
template <class Tile>
class TicketDrawer {
  static constexpr int kCtas = Tile::kCtas;

 public:
  __device__ __forceinline__ TicketDrawer(SharedWithTickets<Tile>& shared, unsigned* g_next, bool all_drawn)
      : shared_(shared), g_next_(g_next), all_drawn_(all_drawn) {}

  // The next tile; tiles() or more: there is none, and it is not to be called again. To be called as late as may be: who draws
  // ahead takes tiles that others could begin sooner.
  template <class Tiles>
  __device__ __forceinline__ unsigned draw(const Tiles& tiles) {
    if constexpr (kCtas == 1) {
      Tickets& tickets = shared_.tickets;
      const TicketPlace place = tickets.drawn[0];
      const unsigned tile = next(place.count == 0, tiles());
      mbarrier_wait(shared_address(&tickets.empty[place.slot()]), place.parity() ^ 1);
      tickets.tile[place.slot()] = tile;
      mbarrier_arrive(shared_address(&tickets.full[place.slot()]));
      tickets.drawn[0] = {place.count + 1};
      return tile;
    } else {
      const bool is_first = StepLoader<Tile>::loads_a();
      // From the one address that is held anyway.
      const uint32_t s_tickets = forget(shared_address(&shared_)) + offsetof(SharedWithTickets<Tile>, tickets);
      const uint32_t s_drawn = s_tickets + offsetof(Tickets, drawn) + (is_first ? 0 : sizeof(TicketPlace));
      const TicketPlace place = {load_shared_word(s_drawn)};
      store_shared_word(s_drawn, place.count + 1);
      const uint32_t s_tile = s_tickets + offsetof(Tickets, tile) + place.slot() * sizeof(unsigned);
      const uint32_t s_full = s_tickets + offsetof(Tickets, full) + place.slot() * sizeof(uint64_t);
      const uint32_t s_empty = s_tickets + offsetof(Tickets, empty) + place.slot() * sizeof(uint64_t);
      unsigned tile;
      if (is_first && cluster_rank() == 0) {
        tile = next(place.count == 0, tiles());
        mbarrier_wait(s_empty, place.parity() ^ 1);  // all have seen the number that was there
        mbarrier_arrive_expect_bytes(s_full, sizeof(tile));
#pragma unroll
        for (unsigned rank = 0; rank < kCtas; ++rank) {
          store_in_cluster(address_in_cluster(s_tile, rank), tile, address_in_cluster(s_full, rank));
        }
      } else {
        if (is_first) mbarrier_arrive_expect_bytes(s_full, sizeof(tile));
        mbarrier_wait(s_full, place.parity());
        tile = load_shared_word(s_tile);
        mbarrier_arrive_in_cluster(address_in_cluster(s_empty, 0));
      }
      return tile;
    }
  }

 private:
  __device__ __forceinline__ unsigned next(bool first, unsigned tiles) {
    const unsigned clusters = ctas_of_grid() / kCtas, given = all_drawn_ ? 0 : clusters;
    return first && !all_drawn_ ? cta_of_grid() / kCtas : given + atomicInc(g_next_, clusters + tiles - given - 1);
  }

  SharedWithTickets<Tile>& shared_;
  unsigned* g_next_;
  bool all_drawn_;  // else every cluster has a first tile of its own
};

template <int kCtas>
class TicketReader {
 public:
  __device__ __forceinline__ explicit TicketReader(Tickets& tickets) : tickets_(tickets) {}

  // By whole warps.
  __device__ __forceinline__ unsigned next() {
    mbarrier_wait(shared_address(&tickets_.full[place_.slot()]), place_.parity());
    unsigned tile = 0;
    if (threadIdx.x % 32 == 0) tile = *static_cast<volatile unsigned*>(&tickets_.tile[place_.slot()]);
    tile = __shfl_sync(0xffffffffu, tile, 0);
    if (threadIdx.x % 32 == 0) {  // who has read is who arrives
      const uint32_t empty = shared_address(&tickets_.empty[place_.slot()]);
      if constexpr (kCtas == 1) {
        mbarrier_arrive(empty);
      } else {
        mbarrier_arrive_in_cluster(address_in_cluster(empty, 0));
      }
    }
    ++place_.count;
    return tile;
  }

 private:
  Tickets& tickets_;
  TicketPlace place_;
};

// run_warpgroups (steps.cuh) over the tiles that a cluster takes: load(loader, tile), multiply(multiplier, tile, s_strip, row).
// g_next is 0 before the launch and after it: it wraps with the last draw. all_drawn: no tile is a cluster's from the
// beginning, so that whoever holds one runs, and a tile may wait for one with a lower number. tiles(): how many there are.
template <class Tile, class Tiles, class Load, class Multiply>
__device__ __forceinline__ void run_by_tickets(SharedWithTickets<Tile>& shared, unsigned* g_next, Tiles tiles, bool all_drawn,
                                               Load load, Multiply multiply) {
  Tickets& tickets = shared.tickets;
  init_ring(tickets.full, tickets.empty, (4 * Tile::kConsumers + Tile::kLoaders) * Tile::kCtas - 1);
  if (threadIdx.x < 2) tickets.drawn[threadIdx.x] = {0};
  run_warpgroups<Tile>(
      shared.tile,
      [&](StepLoader<Tile>& loader) {
        TicketDrawer<Tile> drawer(shared, g_next, all_drawn);
#pragma unroll 1
        for (unsigned tile = drawer.draw(tiles); tile < tiles(); tile = drawer.draw(tiles)) load(loader, tile);
      },
      [&](StepMultiplier<Tile>& multiplier, uint32_t s_strip, int row) {
        TicketReader<Tile::kCtas> reader(tickets);
#pragma unroll 1
        for (unsigned tile = reader.next(); tile < tiles(); tile = reader.next()) multiply(multiplier, tile, s_strip, row);
      });
}

}  // namespace attention_ext
