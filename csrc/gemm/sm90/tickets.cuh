// Tiles for persistent CTAs as they get free: the thread that loads draws a number and hands it to the warps that multiply. For
// lists whose tiles differ in length, the longest first. Which CTA makes a tile is left to chance, what it makes is not.
#pragma once

#include "device/sm80/cp_async.cuh"
#include "device/sm90/mbarrier.cuh"

namespace attention_ext {

constexpr int kTicketSlots = 2;

// In shared memory.
struct Tickets {
  unsigned tile[kTicketSlots];
  uint64_t full[kTicketSlots];   // the thread that draws arrives; the warps wait
  uint64_t empty[kTicketSlots];  // every warp arrives; the thread that draws waits
};

// Of a CTA that takes its tiles so.
template <class Tile>
struct SharedWithTickets {
  typename Tile::Shared tile;
  Tickets tickets;
};

// By one thread, before the CTA's first __syncthreads.
__device__ __forceinline__ void init_tickets(Tickets& tickets, int warps) {
  for (int slot = 0; slot < kTicketSlots; ++slot) {
    mbarrier_init(shared_address(&tickets.full[slot]), 1);
    mbarrier_init(shared_address(&tickets.empty[slot]), warps);
  }
  mbarrier_fence_init();
}

class TicketDrawer {
 public:
  // g_next is 0 before the launch and after it: it wraps with the last draw. all_drawn: no tile is a CTA's from the beginning, so
  // that whoever holds one runs, and a tile may wait for one with a lower number.
  __device__ __forceinline__ TicketDrawer(Tickets& tickets, unsigned* g_next, unsigned tiles, bool all_drawn = false)
      : tickets_(tickets),
        g_next_(g_next),
        given_(all_drawn ? 0 : gridDim.x),
        last_(tiles + gridDim.x - given_ - 1),
        first_(!all_drawn) {}

  // The next tile; `tiles` or more: there is none, and it is not to be called again. To be called as late as may be: who draws
  // ahead takes tiles that others could begin sooner.
  __device__ __forceinline__ unsigned draw() {
    const unsigned tile = first_ ? blockIdx.x : given_ + atomicInc(g_next_, last_);
    first_ = false;
    mbarrier_wait(shared_address(&tickets_.empty[ring_.slot]), ring_.parity ^ 1);
    tickets_.tile[ring_.slot] = tile;
    mbarrier_arrive(shared_address(&tickets_.full[ring_.slot]));
    ring_.advance();
    return tile;
  }

 private:
  Tickets& tickets_;
  unsigned* g_next_;
  unsigned given_, last_;  // tiles that are not drawn; the number of the last draw
  bool first_;
  RingPlace<kTicketSlots> ring_;
};

class TicketReader {
 public:
  __device__ __forceinline__ explicit TicketReader(Tickets& tickets) : tickets_(tickets) {}

  // By whole warps.
  __device__ __forceinline__ unsigned next() {
    mbarrier_wait(shared_address(&tickets_.full[ring_.slot]), ring_.parity);
    const unsigned tile = *static_cast<volatile unsigned*>(&tickets_.tile[ring_.slot]);
    __syncwarp();  // every lane has read
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&tickets_.empty[ring_.slot]));
    ring_.advance();
    return tile;
  }

 private:
  Tickets& tickets_;
  RingPlace<kTicketSlots> ring_;
};

}  // namespace attention_ext
