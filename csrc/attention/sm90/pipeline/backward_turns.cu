// Backward by wgmma (Hopper) of whole matrices in one launch: P and dS (score_gradients.cuh), and the gradients (gradients.cuh).
//
// One list of tiles, which CTAs draw from in order: scores of `ahead` heads, then in turn scores of one more and gradients of the
// first that has none. A head's P and dS are read soon after they are written, and so are its Q, K and dO for the second time: from
// L2. A head is a key head with its query heads or, where these are many and their matrices too, with an equal part of them.
//
// A tile waits for tiles before it in the list only. As tiles are drawn in order by CTAs that run, the first one that is not done
// never waits, so none waits for ever:
// - gradients, for all scores of their head. A warp counts when it has written its rows.
// - scores, for all gradients of the head that had their place in P and dS. The first warpgroup counts a tile when its products are
//   done: then all that the tile reads has arrived in shared memory.
// - dK and dV of a part of a key head's query heads, with their products done, for the part before it: warp for warp.
// But for these only the thread that loads waits. The warps that write P and dS do so after they have seen what that thread loaded
// later, which the stages' full barriers order.
// Grid: persistent CTAs, one an SM; 384 threads. Shared memory: WgmmaTile::Shared, Tickets. Registers: 240 a consumer thread.
#include "attention/sm90/pipeline/gradients.cuh"
#include "attention/sm90/pipeline/score_gradients.cuh"
#include "device/sm90/global_counter.cuh"
#include "gemm/sm90/tickets.cuh"

namespace attention_ext {

// The list. Of a head: so many tiles of scores and of gradients.
struct BackwardTurnsList {
  struct Turn {
    bool is_scores;
    unsigned head;
    unsigned tile;  // of scores, counted from the first head's; of gradients, of the head
  };

  unsigned heads, ahead, scores, gradients;
  unsigned all;  // kept: what is read from the params takes no register

  BackwardTurnsList(int64_t heads, int64_t ahead, unsigned scores, unsigned gradients)
      : heads(static_cast<unsigned>(heads)),
        ahead(static_cast<unsigned>(ahead)),
        scores(scores),
        gradients(gradients),
        all(static_cast<unsigned>(heads) * (scores + gradients)) {}
  __device__ __forceinline__ Turn at(unsigned ticket) const {
    const unsigned first = ahead * scores, both = scores + gradients, in_turn = (heads - ahead) * both;
    const bool before = ticket < first, after = ticket - first >= in_turn;
    // Three lists, of scores, of both, and of gradients; a divisor that is forgotten takes no register between tiles.
    ticket -= before ? 0 : after ? first + in_turn : first;
    const unsigned of_head = forget(before ? scores : after ? gradients : both);
    unsigned head = ticket / of_head, in_head = ticket - head * of_head;
    if (before || (!after && in_head < scores)) {
      if (!before) head += ahead;
      return {true, head, head * scores + in_head};
    }
    return {false, after ? heads - ahead + head : head, after ? in_head : in_head - scores};
  }
};

namespace {

template <class T>
struct BackwardTurnsWork {
  BackwardTurnsParams p;
  ScoreGradientsMaps score_maps;
  GradientsMaps gradient_maps;
  BackwardTurnsList turns;
  ScoreTiles<ScoreGradientsTile<T>, true> score_tiles;
  GradientTiles<ScoreGradientsTile<T>> gradient_tiles;
};

template <class Tile>
struct BackwardTurnsPlan : Ticket {
  BackwardTurnsList::Turn turn;
  union {
    ScorePlan scores;
    GradientPlan<Tile> gradients;
  };
};

template <class T>
using BackwardTurnsShared = SharedWithTickets<ScoreGradientsTile<T>, BackwardTurnsPlan<ScoreGradientsTile<T>>>;

template <class T, bool kModified>
struct BackwardTurns {
  using Tile = ScoreGradientsTile<T>;
  using Plan = BackwardTurnsPlan<Tile>;

  const BackwardTurnsWork<T>& work;

  __device__ __forceinline__ ScoreGradients<T, kModified> scores() const { return {work.p.scores, work.score_tiles}; }
  __device__ __forceinline__ Gradients<Tile> gradients() const { return {work.p.gradients, work.gradient_tiles}; }
  __device__ __forceinline__ unsigned* scores_done(unsigned head) const { return work.p.counters + head; }
  __device__ __forceinline__ unsigned* gradients_done(unsigned head) const { return scores_done(work.turns.heads + head); }

  // Where the next tile lies; then the wait for what it needs.
  __device__ __forceinline__ void make_plan(Plan& plan) const {
    const BackwardTurnsList::Turn turn = work.turns.at(plan.tile);
    plan.turn = turn;
    const unsigned sum_heads = static_cast<unsigned>(work.p.gradients.sum_heads);
    if (turn.is_scores) {
      scores().make_plan(plan.scores, turn.tile);
      const unsigned places = static_cast<unsigned>(work.p.scores.places) / sum_heads;
      if (turn.head >= places) wait_until(gradients_done(turn.head - places), work.turns.gradients);
    } else {
      gradients().make_plan(plan.gradients, turn.tile, static_cast<int64_t>(turn.head) * sum_heads);
      wait_until(scores_done(turn.head), work.turns.scores * 4 * Tile::kConsumers);
    }
  }
  static __device__ __forceinline__ void wait_until(const unsigned* g_counter, unsigned count) {
    while (read_acquired(g_counter) < count) __nanosleep(32);
    fence_async_proxy_global();
  }

  __device__ __forceinline__ void load(StepLoader<Tile>& loader, Plan& plan) const {
    fence_async_proxy_global();  // by who copies as well
    if (plan.turn.is_scores) {
      scores().load(loader, work.score_maps, plan.scores);
    } else {
      gradients().load(loader, work.gradient_maps, plan.gradients);
    }
  }

  __device__ __forceinline__ void multiply(StepMultiplier<Tile>& multiplier, typename Tile::Shared& shared,
                                           const Plan& plan) const {
    if (plan.turn.is_scores) {
      if (!scores().multiply(multiplier, shared, plan.scores)) multiplier.let_follow();
      fence_async_proxy_global();
      __syncwarp();  // every lane has written
      if (threadIdx.x % 32 == 0) count_released(scores_done(plan.turn.head));
    } else {
      float product[Tile::kN / 2];
      gradients().multiply(multiplier, plan.gradients.at, product);
      if (forget(threadIdx.x) == 0) count_relaxed(gradients_done(plan.turn.head));
      gradients().write(plan.gradients, row_anew(), product);
    }
  }
};

template <class T, bool kModified>
__global__ void __launch_bounds__(ScoreGradientsTile<T>::kThreads, 1)
    backward_turns_kernel(const __grid_constant__ BackwardTurnsWork<T> work) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Turns = BackwardTurns<T, kModified>;
  using Tile = typename Turns::Tile;
  using Plan = typename Turns::Plan;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& shared = *reinterpret_cast<BackwardTurnsShared<T>*>(s_bytes);
  run_by_tickets<Tile>(
      shared, work.p.gradients.ticket, work.turns.all, true, [&](Plan& plan) { Turns{forget_object(work)}.make_plan(plan); },
      [&](StepLoader<Tile>& loader, Plan& plan) { Turns{forget_object(work)}.load(loader, plan); },
      [&](StepMultiplier<Tile>& multiplier, const Plan& plan, uint32_t, int) {
        Turns{work}.multiply(multiplier, shared.tile, plan);
      });
#else
  __trap();  // never launched: an image for another card must not return what nobody wrote
#endif
}

template <class T>
cudaError_t launch_typed(const BackwardTurnsParams& params, cudaStream_t stream) {
  using Tile = ScoreGradientsTile<T>;
  const GradientsParams& gradients = params.gradients;
  const ScoreTiles<Tile, true> score_tiles = score_gradients_tiles<T>(params.scores);
  Slice head = gradients.slice;  // any: tiles of a head are counted from its own first one
  head.batch_count = gradients.sum_heads;
  const GradientTiles<Tile> gradient_tiles(head, gradients.sequence.causal, gradients.sum_heads, gradients.of[kGradKey].width,
                                           gradients.of[kGradValue].width, true, true);
  const int64_t heads = gradients.slice.batch_count / gradients.sum_heads;
  const BackwardTurnsList turns(heads, params.ahead, static_cast<unsigned>(gradients.sum_heads) * score_tiles.of_matrix(),
                                gradient_tiles.all());
  BackwardTurnsWork<T> work = {params, {}, {}, turns, score_tiles, gradient_tiles};
  cudaError_t status = make_score_gradients_maps<T>(work.score_maps, params.scores);
  if (status == cudaSuccess) status = make_gradients_maps<Tile>(work.gradient_maps, gradients);
  if (status != cudaSuccess) return status;
  const auto kernel = modified(params.scores) ? backward_turns_kernel<T, true> : backward_turns_kernel<T, false>;
  return launch_persistent<Tile, sizeof(BackwardTurnsShared<T>)>(kernel, turns.all, stream, work);
}

}  // namespace

cudaError_t launch_backward_turns(const BackwardTurnsParams& params, cudaStream_t stream) {
  return dispatch_half_type(params.scores.type, [&](auto element) { return launch_typed<decltype(element)>(params, stream); });
}

}  // namespace attention_ext
