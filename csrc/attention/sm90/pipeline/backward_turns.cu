// Backward by wgmma (Hopper) of whole matrices in one launch: P and dS (score_gradients.cuh), and the gradients (gradients.cuh).
//
// One list of tiles, which CTAs draw from in order: scores of `ahead` key heads, then scores of one more and gradients of the first,
// and so on. A key head's P and dS are read soon after they are written, and so are its Q, K and dO for the second time: from L2.
//
// A tile waits for tiles before it in the list only. As tiles are drawn in order by CTAs that run, the first one that is not done
// never waits, so none waits for ever:
// - gradients, for all scores of their key head. A warp counts when it has written its rows.
// - scores, for all gradients of the key head that had their place in P and dS. The first warpgroup counts a tile when its products
//   are done: then all that the tile reads has arrived in shared memory.
// Only the thread that loads waits. The warps that write P and dS do so after they have seen what that thread loaded later, which
// the stages' full barriers order.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: WgmmaTile::Shared, Tickets. Registers: 240 a consumer thread.
#include "attention/sm90/pipeline/gradients.cuh"
#include "attention/sm90/pipeline/score_gradients.cuh"
#include "device/sm90/global_counter.cuh"
#include "gemm/sm90/tickets.cuh"

namespace attention_ext {
namespace {

// The list. Of a key head: so many tiles of scores and of gradients.
struct Turns {
  struct Turn {
    bool is_scores;
    unsigned head;
    unsigned tile;  // of scores, counted from the first key head's; of gradients, of the key head
  };

  unsigned heads, ahead, scores, gradients;

  __host__ __device__ unsigned all() const { return heads * (scores + gradients); }
  __device__ __forceinline__ Turn at(unsigned ticket) const {
    const unsigned first = ahead * scores, both = scores + gradients, in_turn = (heads - ahead) * both;
    if (ticket < first) return {true, ticket / scores, ticket};
    ticket -= first;
    if (ticket >= in_turn) {
      const unsigned head = (ticket - in_turn) / gradients;
      return {false, heads - ahead + head, ticket - in_turn - head * gradients};
    }
    const unsigned head = ticket / both, in_head = ticket - head * both;
    if (in_head < scores) return {true, head + ahead, (head + ahead) * scores + in_head};
    return {false, head, in_head - scores};
  }
};

struct BackwardTurnsMaps {
  ScoreGradientsMaps scores;
  GradientsMaps gradients;
};

template <class T, bool kModified>
struct BackwardTurns {
  using Tile = ScoreGradientsTile<T>;

  const BackwardTurnsParams& p;
  const Turns& turns;
  const ScoreGradients<T, kModified> scores;
  const Gradients<Tile> gradients;

  __device__ __forceinline__ unsigned* scores_done(unsigned head) const { return p.counters + head; }
  __device__ __forceinline__ unsigned* gradients_done(unsigned head) const { return p.counters + turns.heads + head; }
  __device__ __forceinline__ int64_t first_matrix(unsigned head) const { return head * p.gradients.group; }

  __device__ __forceinline__ void load(StepLoader<Tile>& loader, Tickets& tickets, const BackwardTurnsMaps& maps) const {
    const unsigned end = turns.all(), places = static_cast<unsigned>(p.scores.places / p.gradients.group);
    TicketDrawer drawer(tickets, p.gradients.ticket, end, true);
#pragma unroll 1
    for (unsigned ticket = drawer.draw(); ticket < end; ticket = drawer.draw()) {
      const Turns::Turn turn = turns.at(ticket);
      if (turn.is_scores) {
        const ScorePlace at = scores.place(turn.tile);
        if (at.hidden) continue;
        if (turn.head >= places) wait_until(gradients_done(turn.head - places), turns.gradients);
        scores.load(loader, maps.scores, at);
      } else {
        const auto at = gradients.place(turn.tile, first_matrix(turn.head));
        if (at.steps == 0) continue;
        wait_until(scores_done(turn.head), turns.scores * 4 * Tile::kConsumers);
        gradients.load(loader, maps.gradients, at);
      }
    }
  }
  static __device__ __forceinline__ void wait_until(const unsigned* g_counter, unsigned count) {
    while (read_acquired(g_counter) < count) __nanosleep(32);
    fence_async_proxy_global();
  }

  __device__ __forceinline__ void multiply(StepMultiplier<Tile>& multiplier, Tickets& tickets, uint32_t s_strip,
                                           int row) const {
    const unsigned end = turns.all();
    TicketReader reader(tickets);
#pragma unroll 1
    for (unsigned ticket = reader.next(); ticket < end; ticket = reader.next()) {
      const Turns::Turn turn = turns.at(ticket);
      if (turn.is_scores) {
        if (!scores.multiply(multiplier, turn.tile, s_strip, row)) multiplier.let_follow();
        fence_async_proxy_global();
        __syncwarp();  // every lane has written
        if (threadIdx.x % 32 == 0) count_released(scores_done(turns.at(forget(ticket)).head));
      } else {
        const auto at = gradients.place(turn.tile, first_matrix(turn.head));
        float product[Tile::kN / 2];
        gradients.multiply(multiplier, at, product);
        if (threadIdx.x == 0) count_relaxed(gradients_done(turns.at(forget(ticket)).head));
        gradients.write(at, row, product, s_strip);
      }
    }
  }
};

template <class T, bool kModified>
__global__ void __launch_bounds__(ScoreGradientsTile<T>::kThreads, 1)
    backward_turns_kernel(const __grid_constant__ BackwardTurnsParams params, const __grid_constant__ BackwardTurnsMaps maps,
                          const __grid_constant__ Turns turns,
                          const __grid_constant__ ScoreTiles<ScoreGradientsTile<T>, true> tiles,
                          const __grid_constant__ GradientTiles<ScoreGradientsTile<T>> list) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = ScoreGradientsTile<T>;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  SharedWithTickets<Tile>& shared = *reinterpret_cast<SharedWithTickets<Tile>*>(s_bytes);
  if (threadIdx.x == 0) init_tickets(shared.tickets, 4 * Tile::kConsumers);
  const BackwardTurns<T, kModified> work = {params, turns, {params.scores, tiles}, {params.gradients, list}};
  run_warpgroups<Tile>(
      shared.tile, [&](StepLoader<Tile>& loader) { work.load(loader, shared.tickets, maps); },
      [&](StepMultiplier<Tile>& multiplier, uint32_t s_strip, int row) {
        work.multiply(multiplier, shared.tickets, s_strip, row);
      });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <class T>
cudaError_t launch_typed(const BackwardTurnsParams& params, cudaStream_t stream) {
  using Tile = ScoreGradientsTile<T>;
  const GradientsParams& gradients = params.gradients;
  BackwardTurnsMaps maps;
  cudaError_t status = make_score_gradients_maps<T>(maps.scores, params.scores);
  if (status == cudaSuccess) status = make_gradients_maps<Tile>(maps.gradients, gradients);
  if (status != cudaSuccess) return status;
  const ScoreTiles<Tile, true> tiles = score_gradients_tiles<T>(params.scores);
  Slice head = gradients.slice;  // any: tiles of a key head are counted from its own first one
  head.batch_count = gradients.group;
  const GradientTiles<Tile> list(head, gradients.sequence.causal, gradients.group, gradients.of[kGradKey].width,
                                 gradients.of[kGradValue].width, true, true);
  const Turns turns = {static_cast<unsigned>(gradients.slice.batch_count / gradients.group),
                       static_cast<unsigned>(params.ahead), static_cast<unsigned>(gradients.group) * tiles.of_matrix(),
                       list.all()};
  return launch_persistent<Tile, sizeof(SharedWithTickets<Tile>)>(
      modified(params.scores) ? backward_turns_kernel<T, true> : backward_turns_kernel<T, false>, turns.all(), stream, params,
      maps, turns, tiles, list);
}

}  // namespace

cudaError_t launch_backward_turns(const BackwardTurnsParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.scores.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
