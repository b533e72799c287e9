// Tiles for persistent CTAs as they get free: the thread that loads draws a number and hands it to the warps that multiply. For
// lists whose tiles differ in length, the longest first. Which CTA makes a tile is left to chance, what it makes is not.
#pragma once

#include "device/sm80/cp_async.cuh"
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
  uint64_t full[kTicketSlots];   // the thread that draws arrives; the warps wait
  uint64_t empty[kTicketSlots];  // every warp arrives; the thread that draws waits
  TicketPlace drawn;             // of the thread that draws, which may be short of registers
};

// Of a CTA that takes its tiles so.
template <class Tile>
struct SharedWithTickets {
  typename Tile::Shared tile;
  Tickets tickets;
};

class TicketDrawer {
 public:
  __device__ __forceinline__ TicketDrawer(Tickets& tickets, unsigned* g_next, unsigned tiles, bool all_drawn)
      : tickets_(tickets), g_next_(g_next), given_(all_drawn ? 0 : gridDim.x), tiles_(tiles), first_(!all_drawn) {}

  // The next tile; `tiles` or more: there is none, and it is not to be called again. To be called as late as may be: who draws
  // ahead takes tiles that others could begin sooner.
  __device__ __forceinline__ unsigned draw() {
    const unsigned tile = first_ ? blockIdx.x : given_ + atomicInc(g_next_, ctas_of_grid() + tiles_ - given_ - 1);
    first_ = false;
    const TicketPlace place = tickets_.drawn;
    mbarrier_wait(shared_address(&tickets_.empty[place.slot()]), place.parity() ^ 1);
    tickets_.tile[place.slot()] = tile;
    mbarrier_arrive(shared_address(&tickets_.full[place.slot()]));
    tickets_.drawn = {place.count + 1};
    return tile;
  }

 private:
  Tickets& tickets_;
  unsigned* g_next_;
  unsigned given_, tiles_;  // tiles that are not drawn; all
  bool first_;
};

class TicketReader {
 public:
  __device__ __forceinline__ explicit TicketReader(Tickets& tickets) : tickets_(tickets) {}

  // By whole warps.
  __device__ __forceinline__ unsigned next() {
    mbarrier_wait(shared_address(&tickets_.full[place_.slot()]), place_.parity());
    unsigned tile = 0;
    if (threadIdx.x % 32 == 0) {  // who reads is who arrives
      tile = *static_cast<volatile unsigned*>(&tickets_.tile[place_.slot()]);
      mbarrier_arrive(shared_address(&tickets_.empty[place_.slot()]));
    }
    ++place_.count;
    return __shfl_sync(0xffffffffu, tile, 0);
  }

 private:
  Tickets& tickets_;
  TicketPlace place_;
};

// run_warpgroups (steps.cuh) over the tiles that a CTA takes: load(loader, tile), multiply(multiplier, tile, s_strip, row). g_next
// is 0 before the launch and after it: it wraps with the last draw. all_drawn: no tile is a CTA's from the beginning, so that
// whoever holds one runs, and a tile may wait for one with a lower number.
template <class Tile, class Load, class Multiply>
__device__ __forceinline__ void run_by_tickets(SharedWithTickets<Tile>& shared, unsigned* g_next, unsigned tiles,
                                               bool all_drawn, Load load, Multiply multiply) {
  Tickets& tickets = shared.tickets;
  init_ring(tickets.full, tickets.empty, 4 * Tile::kConsumers);
  if (threadIdx.x == 0) tickets.drawn = {0};
  run_warpgroups<Tile>(
      shared.tile,
      [&](StepLoader<Tile>& loader) {
        const unsigned end = forget(tiles);
        TicketDrawer drawer(tickets, g_next, end, all_drawn);
#pragma unroll 1
        for (unsigned tile = drawer.draw(); tile < end; tile = drawer.draw()) load(loader, tile);
      },
      [&](StepMultiplier<Tile>& multiplier, uint32_t s_strip, int row) {
        TicketReader reader(tickets);
#pragma unroll 1
        for (unsigned tile = reader.next(); tile < tiles; tile = reader.next()) multiply(multiplier, tile, s_strip, row);
      });
}

}  // namespace attention_ext
