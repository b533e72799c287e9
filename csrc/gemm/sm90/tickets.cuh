// Tiles for persistent CTAs as they get free. Of each CTA one thread draws a tile's number, finds its place and waits for what it
// needs, while the tile before is loaded; the thread that loads and the warps that multiply read what it found from shared memory.
// So neither the way to a counter in L2 nor divisions come between two tiles. For lists whose tiles differ in length, the longest
// first. Which CTA makes a tile is left to chance, what it makes is not.
#pragma once

#include "device/sm80/cp_async.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/warpgroup.cuh"
#include "gemm/sm90/steps.cuh"

namespace attention_ext {

// Tiles that are known at once: one that warps write, the one that is multiplied, the one that is loaded, the next.
constexpr int kTicketSlots = 4;

// What is known of every tile: its number, and how many this CTA had before it.
struct Ticket {
  unsigned tile, count;
};

// In shared memory. Plan: a Ticket and more.
template <class Plan>
struct Tickets {
  Plan plan[kTicketSlots];
  uint64_t full[kTicketSlots];   // the thread that plans arrives; the others wait
  uint64_t empty[kTicketSlots];  // the others arrive: every warp, and the thread that loads

  // For those who read: tile number `count` of this CTA; by one thread of each, after all have read, that they have.
  __device__ __forceinline__ Plan& wait(unsigned count) {
    mbarrier_wait(shared_address(&full[count % kTicketSlots]), count / kTicketSlots % 2);
    return plan[count % kTicketSlots];
  }
  __device__ __forceinline__ void release(unsigned count) { mbarrier_arrive(shared_address(&empty[count % kTicketSlots])); }
};

// Of a CTA that takes its tiles so.
template <class Tile, class Plan>
struct SharedWithTickets {
  typename Tile::Shared tile;
  Tickets<Plan> tickets;
};

// By one thread: numbers, until there is no tile of that number. make_plan(plan): the rest of what is known of tile plan.tile.
template <class Tile, class Plan, class MakePlan>
__device__ __forceinline__ void plan_by_tickets(SharedWithTickets<Tile, Plan>& shared, unsigned* g_next, unsigned tiles,
                                                bool all_drawn, const MakePlan& make_plan) {
  Tickets<Plan>& tickets = shared.tickets;
#pragma unroll 1
  for (unsigned count = 0;;) {
    const unsigned end = forget(tiles), given = all_drawn ? 0 : ctas_of_grid();  // tiles that are not drawn
    const unsigned tile = count == 0 && !all_drawn ? blockIdx.x : given + atomicInc(g_next, ctas_of_grid() + end - given - 1);
    const unsigned slot = count % kTicketSlots;
    mbarrier_wait(shared_address(&tickets.empty[slot]), (count / kTicketSlots + 1) % 2);
    Plan& plan = tickets.plan[slot];
    plan.tile = tile;
    plan.count = count;
    if (tile < end) make_plan(plan);
    count = plan.count;  // which no register held
    mbarrier_arrive(shared_address(&tickets.full[count % kTicketSlots]));
    if (plan.tile >= forget(tiles)) return;
    mbarrier_wait(shared_address(&shared.tile.wanted), count % 2);
    ++count;
  }
}

// run_warpgroups (steps.cuh) over the tiles that a CTA takes: plan(plan), load(loader, plan), multiply(multiplier, plan, s_strip,
// row). load calls loader.expect(steps) once. g_next is 0 before the launch and after it: it wraps with the last draw. all_drawn:
// no tile is a CTA's from the beginning, so that whoever holds one runs, and a tile may wait for one with a lower number: whoever
// holds two makes the lower one first.
template <class Tile, class Plan, class MakePlan, class Load, class Multiply>
__device__ __forceinline__ void run_by_tickets(SharedWithTickets<Tile, Plan>& shared, unsigned* g_next, unsigned tiles,
                                               bool all_drawn, const MakePlan& make_plan, const Load& load,
                                               const Multiply& multiply) {
  Tickets<Plan>& tickets = shared.tickets;
  init_ring(tickets.full, tickets.empty, 4 * Tile::kConsumers + 1);
  if (threadIdx.x == 0) mbarrier_init(shared_address(&shared.tile.wanted), 1);
  run_warpgroups<Tile>(
      shared.tile,
      [&](StepLoader<Tile>& loader) {
#pragma unroll 1
        for (unsigned count = 0;;) {
          Plan& plan = tickets.wait(count);
          if (plan.tile >= forget(tiles)) return;
          load(loader, plan);
          count = plan.count;  // which no register held
          tickets.release(count++);
        }
      },
      [&](StepMultiplier<Tile>& multiplier, uint32_t s_strip, int row) {
#pragma unroll 1
        for (unsigned count = 0;;) {
          const Plan& plan = tickets.wait(count);
          if (__shfl_sync(0xffffffffu, plan.tile, 0) >= tiles) break;
          multiply(multiplier, plan, s_strip, row);
          count = plan.count;
          __syncwarp();  // every lane has read
          if (threadIdx.x % 32 == 0) tickets.release(count);
          ++count;
        }
      },
      [&] { plan_by_tickets(shared, g_next, tiles, all_drawn, make_plan); });
}

}  // namespace attention_ext
