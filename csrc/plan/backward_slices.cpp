// The search for slices: some cuts that fit under the cap, each with the estimated time of its launches.
#include "plan/backward_slices.h"

#include <algorithm>

#include "core/recent.h"
#include "plan/cost.h"
#include "plan/slices.h"

namespace attention_ext {
namespace {

constexpr int64_t kScoreBytes = 4;  // of P and dS
// What the allocator rounds large blocks to: whole pieces of it are not exceeded.
constexpr int64_t kAllocatorPiece = int64_t{2} << 20;
constexpr int64_t kRowGranule = 64;  // of cuts of rows where a slice holds a tile of them

// Of 128 x 256 x 64; of the two epilogues of a tile of scores, and that of gradients, in steps of 1/8. In ns.
constexpr int64_t kStepNs = 870, kScoreEpilogue = 6, kGradientEpilogue = 4, kLaunchNs = 5000, kBytesPerNs = 2700;
// That of a sum which is added to the carry, not fitted.
constexpr int64_t kCarryEpilogue = 24;
// In one launch: from the draw of a tile to its first product, and from its last one to the draw of a tile that reads it.
constexpr int64_t kHandOver = 8 * 8;
constexpr int64_t kMostTickets = int64_t{1} << 31;  // they are counted in 32 bits

int64_t pieces_of(int64_t width) { return ceil_div(width, kWgmmaTileCols); }
// Whether tiles of gradients are 192 columns wide.
bool narrow(int64_t width) { return ceil_div(width, 192) == pieces_of(width); }

// Scores of a part that no row sees.
int64_t hidden_scores(const SlicePart& part) {
  const int64_t above = std::max<int64_t>(part.key_end - part.row_begin, 0),
                below = std::max<int64_t>(part.key_end - part.row_end, 0);
  return (above * above - below * below) / 2;
}

class Planner {
 public:
  Planner(const BackwardSizes& sizes, int64_t room, int64_t sms) : sizes_(sizes), room_(room), sms_(sms) {}

  // The fastest pass that fits; none: false.
  bool find(bool of_rows, bool of_keys) {
    ns_ = -1;
    whole_matrices(of_rows, of_keys);
    if (of_rows && of_keys) {
      for_each_share(sizes_.group, [&](int64_t heads) { one_launch(heads); });
    }
    if (ns_ < 0) cut_matrices(of_rows, of_keys);
    return ns_ >= 0;
  }
  // Of as few rows and keys as there may be, whatever the room.
  void take_least(bool of_rows, bool of_keys) {
    const int64_t rows = of_keys ? kSliceTile : std::max<int64_t>(room_ / (kScoreBytes * slice_pitch(sizes_.S)), 1);
    consider(of_rows, of_keys, 1, 1, even_cuts(sizes_.L, rows), even_cuts(sizes_.S, of_keys ? kSliceTile : sizes_.S), true);
  }
  const BackwardPass& pass() const { return best_; }
  int64_t bytes() const { return bytes_; }
  int64_t ns() const { return ns_; }

 private:
  using Cuts = std::vector<int64_t>;

  static Cuts even_cuts(int64_t total, int64_t piece) {
    Cuts cuts;
    for (int64_t at = 0; at < total; at += piece) cuts.push_back(at);
    cuts.push_back(total);
    if (cuts.size() < 2) cuts.push_back(total);
    return cuts;
  }
  static Cuts even_pieces(int64_t total, int64_t pieces, int64_t tile) {
    return even_cuts(total, std::max(round_up(ceil_div(total, pieces), tile), tile));
  }
  int64_t carried_of_key() const { return (sizes_.E + sizes_.Ev) * 4; }
  // Equal parts of so many query heads, the largest first.
  template <class Visit>
  static void for_each_share(int64_t heads, const Visit& visit) {
    for (int64_t part = heads; part > 0; --part) {
      if (heads % part == 0) visit(part);
    }
  }

  // Whole groups, or equal parts of one.
  void whole_matrices(bool of_rows, bool of_keys) {
    const int64_t matrix = std::max<int64_t>(sizes_.L * slice_pitch(sizes_.S) * kScoreBytes, 1), group = sizes_.group;
    if (sizes_.S > kPartKeys && !sizes_.mask_grad && of_keys) return;
    const int64_t most = std::min(room_ / matrix, sizes_.N);
    const int64_t most_of_sum = of_keys ? kPartKeys / sizes_.L : group;  // query heads
    const Cuts rows = {0, sizes_.L}, keys = {0, sizes_.S};
    const int64_t groups = most_of_sum >= group ? most / group : 0;
    for (int64_t some = groups; some > 0 && some >= groups / 2 && some > groups - 64; --some) {
      consider(of_rows, of_keys, some * group, group, rows, keys, false);
    }
    if (ns_ >= 0 && of_rows && of_keys) {
      const int64_t batches = best_.batches;
      for_each_share(group, [&](int64_t heads) { consider(of_rows, of_keys, batches, heads, rows, keys, false); });
    }
    for (int64_t part = std::min({group - 1, most, most_of_sum}); part > 0 && ns_ < 0; --part) {
      if (group % part == 0) consider(of_rows, of_keys, part, part, rows, keys, false);
    }
  }

  // All in one launch, in which a head is so many matrices: a key head with its query heads, or an equal part of them.
  void one_launch(int64_t sum_heads) {
    const int64_t heads = sizes_.N / sum_heads;
    if (sizes_.mask_grad || (narrow(sizes_.E) && narrow(sizes_.Ev))) return;
    if (sizes_.L <= 0 || sizes_.S > kPartKeys || sum_heads > kPartKeys / sizes_.L) return;
    BackwardPass pass = {true, true, sum_heads, sizes_.N, {0, sizes_.L}, {0, sizes_.S}, 1};
    const bool in_turn = adds_in_turn(sizes_, pass);
    const SlicePart part = {0, sizes_.L, 0, sizes_.S, 0, sizes_.L, false};
    const Work head = work_of(pass, part, sum_heads);
    if (heads > kMostTickets / (head.score_tiles + head.gradient_tiles)) return;
    const Work all = work_of(pass, part, sizes_.N);
    const int64_t bytes_of_head = std::max<int64_t>(sum_heads * sizes_.L * slice_pitch(sizes_.S) * kScoreBytes, 1);
    const int64_t carried = in_turn ? round_up(sizes_.S, kSliceTile) * carried_of_key() : 0;
    const int64_t others = counter_bytes(sizes_, pass) + carried + 4 * kWorkspaceAlignment;
    const int64_t room = std::max<int64_t>(room_ - others, 0) / bytes_of_head;
    // Scores are done when their gradients are drawn, and gradients when scores are that take the place of what they read, if tiles
    // of enough key heads lie between them.
    const int64_t period = std::max<int64_t>(ceil_div(head.score_tiles * head.score_length + head.gradients, sms_), 1);
    const int64_t score_wait = head.score_length + kHandOver, gradient_wait = head.longest + kHandOver;
    const int64_t ahead = ceil_div(score_wait, period), places = ahead + 1 + ceil_div(gradient_wait, period);
    const int64_t in_memory = std::min({places, room, heads});
    if (in_memory < std::min<int64_t>(heads, 2)) return;
    pass.batches = in_memory * sum_heads;
    pass.ahead = std::min(heads, ahead);
    if (in_memory < std::min(heads, places)) pass.ahead = std::clamp<int64_t>(ahead * in_memory / places, 1, in_memory - 1);
    int64_t slowest = std::max(period, pass.ahead < heads ? ceil_div(score_wait, pass.ahead) : 0);
    if (in_memory < heads) {
      const int64_t between = in_memory - pass.ahead - 1;
      slowest = std::max(slowest, between > 0 ? ceil_div(gradient_wait, between) : gradient_wait + period);
    }
    if (in_turn) slowest = std::max(slowest, kCarryEpilogue + kHandOver);  // from one sum to the next
    const int64_t products = (all.scores + all.gradient_rounds) * slowest / period;
    keep(pass, slice_places(sizes_, pass, part).end, std::max(products * kStepNs / 8, all.bytes / kBytesPerNs) + kLaunchNs);
  }

  void cut_matrices(bool of_rows, bool of_keys) {
    const bool keys_whole = sizes_.mask_grad && of_rows;  // mask_grad wants whole rows
    const int64_t key_carry = of_keys ? carried_of_key() : 0;
    constexpr int64_t kSlack = 4 * kWorkspaceAlignment;
    const Cuts all_rows = {0, sizes_.L}, all_keys = {0, sizes_.S};
    // Rows, by themselves.
    const int64_t room_of_rows = room_ - kSlack - round_up(sizes_.S, kSliceTile) * key_carry;
    if (room_of_rows > 0 && (sizes_.S <= kPartKeys || keys_whole || !of_rows)) {
      const int64_t most = std::min(room_of_rows / (kScoreBytes * slice_pitch(sizes_.S)), kPartKeys);
      if (most > 0) {
        const int64_t tile = most >= kSliceTile ? kSliceTile : 1, pieces = ceil_div(sizes_.L, most / tile * tile);
        for (int64_t more = 0; more < 3; ++more) {
          consider(of_rows, of_keys, 1, 1, even_pieces(sizes_.L, pieces + more, tile), all_keys, false);
        }
      }
      if (sizes_.causal) consider(of_rows, of_keys, 1, 1, causal_rows(key_carry), all_keys, false);
    }
    if (keys_whole) return;
    // Keys, by themselves, and with rows.
    const int64_t carried_alone = sizes_.group > 1 ? key_carry : 0;
    const auto room_next_to = [&](int64_t rows) {  // of which dQ is carried
      const int64_t carried = of_keys ? sizes_.group * carry_floats(sizes_.L, sizes_.E) : carry_floats(rows, sizes_.E);
      return std::max<int64_t>(room_ - kSlack - (of_rows ? carried * 4 : 0), 0);
    };
    if (sizes_.causal && sizes_.L <= kPartKeys) {
      consider(of_rows, of_keys, 1, 1, all_rows, causal_keys(room_next_to(sizes_.L), carried_alone), false);
    }
    int64_t tried = 0;
    for (int64_t row_pieces = 1; row_pieces <= ceil_div(sizes_.L, kSliceTile) && tried < 12;
         row_pieces += row_pieces < 8 ? 1 : row_pieces) {
      const int64_t rows = row_pieces == 1 ? sizes_.L : round_up(ceil_div(sizes_.L, row_pieces), kSliceTile);
      if (rows > kPartKeys) continue;
      const int64_t of_key = kScoreBytes * rows + (row_pieces == 1 ? carried_alone : key_carry);
      const int64_t most = std::min(room_next_to(rows) / of_key, kPartKeys) / kSliceTile * kSliceTile;
      if (most < kSliceTile) continue;
      const int64_t tile = most >= kWgmmaTileCols ? kWgmmaTileCols : kSliceTile,
                    pieces = ceil_div(sizes_.S, most / tile * tile);
      for (int64_t more = 0; more < 2; ++more) {
        consider(of_rows, of_keys, 1, 1, even_cuts(sizes_.L, rows), even_pieces(sizes_.S, pieces + more, tile), false);
      }
      ++tried;
    }
  }

  // Of a causal call: as many rows as fit, from the last ones up, as those see the most keys.
  Cuts causal_rows(int64_t key_carry) const {
    Cuts cuts = {sizes_.L};
    for (int64_t end = sizes_.L; end > 0;) {
      const int64_t keys = end == sizes_.L ? sizes_.S : std::min(sizes_.S, round_up(end, kSliceTile));
      const int64_t room = room_ - 4 * kWorkspaceAlignment - round_up(keys, kSliceTile) * key_carry;
      const int64_t rows = std::min(std::max<int64_t>(room, 0) / (kScoreBytes * slice_pitch(keys)), kPartKeys);
      const int64_t begin = std::max<int64_t>(end - rows, 0);
      end = std::min(round_up(begin, kRowGranule), std::max<int64_t>(end - kRowGranule, 0));
      cuts.push_back(end);
    }
    std::reverse(cuts.begin(), cuts.end());
    return cuts;
  }
  // As many keys as fit, from the first ones on, which the most rows see.
  Cuts causal_keys(int64_t room, int64_t key_carry) const {
    Cuts cuts = {0};
    for (int64_t begin = 0; begin < sizes_.S;) {
      const int64_t of_key = kScoreBytes * std::max<int64_t>(sizes_.L - begin, 0) + key_carry;
      const int64_t most = std::min(of_key > 0 ? room / of_key : kPartKeys, kPartKeys) / kWgmmaTileCols * kWgmmaTileCols;
      begin = std::min(begin + std::max(most, kWgmmaTileCols), sizes_.S);
      if (begin > sizes_.L && cuts.back() < sizes_.L) begin = std::min(round_up(sizes_.L, kWgmmaTileCols), sizes_.S);
      cuts.push_back(begin);
    }
    return cuts;
  }

  void consider(bool of_rows, bool of_keys, int64_t batches, int64_t sum_heads, Cuts rows, Cuts keys, bool whatever) {
    BackwardPass pass = {of_rows, of_keys, sum_heads, batches, std::move(rows), std::move(keys)};
    int64_t bytes = 0, of_group = 0;  // ns
    const int64_t group = pass.group(sizes_), key_heads = std::max<int64_t>(batches / group, 1),
                  turns = ceil_div(group, batches);
    const bool fits = for_each_part(sizes_, pass, [&](const SlicePart& part) {
      bytes = std::max(bytes, slice_places(sizes_, pass, part).end);
      of_group += turns * slice_ns(pass, part, batches);
      return whatever || bytes <= room_;
    });
    if (!fits) return;
    const int64_t rest = batches >= group ? sizes_.N % batches : 0;
    int64_t ns = times(sizes_.N / group / key_heads, of_group);
    if (rest > 0) {
      for_each_part(sizes_, pass, [&](const SlicePart& part) {
        ns += slice_ns(pass, part, rest);
        return true;
      });
    }
    keep(pass, bytes, ns);
  }

  // The pass, if it is the fastest so far.
  void keep(const BackwardPass& pass, int64_t bytes, int64_t ns) {
    if (bytes > room_ && pass.ahead > 0) return;
    if (ns_ >= 0 && ns >= ns_) return;
    ns_ = ns;
    bytes_ = bytes;
    best_ = pass;
  }

  // Of a slice's two kernels. Lengths and sums of them in eighths of a step.
  struct Work {
    int64_t score_tiles, gradient_tiles;
    int64_t score_length, longest;    // of a tile of scores; the longest of gradients
    int64_t scores, gradient_rounds;  // of the SM that takes longest
    int64_t gradients;                // of all SMs
    int64_t bytes;                    // that memory moves
  };
  Work work_of(const BackwardPass& pass, const SlicePart& part, int64_t batches) const {
    const int64_t rows = part.row_end - part.row_begin, keys = part.key_end - part.key_begin;
    const int64_t row_tiles = ceil_div(rows, kWgmmaTileRows), key_tiles = ceil_div(keys, kWgmmaTileRows);
    const int64_t heads = pass.of_keys ? pass.sum_heads : 1, hidden = sizes_.causal ? hidden_scores(part) : 0;
    const bool in_turn = adds_in_turn(sizes_, pass);
    const int64_t seen = std::max<int64_t>(rows * keys - hidden, 1);
    Work work = {};
    work.score_tiles =
        batches * std::max<int64_t>(row_tiles * ceil_div(keys, kWgmmaTileCols) - hidden / (kWgmmaTileRows * kWgmmaTileCols), 1);
    work.score_length = 8 * (ceil_div(sizes_.E, 64) + ceil_div(sizes_.Ev, 64)) + kScoreEpilogue;
    work.scores = ceil_div(work.score_tiles, sms_) * work.score_length;
    const int64_t query_tiles = pass.of_rows ? batches * row_tiles * pieces_of(sizes_.E) : 0;
    const int64_t key_sums = pass.of_keys ? batches / heads * key_tiles * (pieces_of(sizes_.E) + pieces_of(sizes_.Ev)) : 0;
    const int64_t query_length = ceil_div(seen / rows, 8) + kGradientEpilogue,
                  key_length = heads * ceil_div(seen / keys, 8) + (in_turn ? kCarryEpilogue : kGradientEpilogue);
    work.gradient_tiles = query_tiles + key_sums;
    work.gradients = query_tiles * query_length + key_sums * key_length;
    if (pass.of_rows) work.longest = ceil_div(sizes_.causal ? std::min(keys, part.row_end - part.key_begin) : keys, 8);
    if (pass.of_keys) work.longest = std::max(work.longest, heads * ceil_div(rows, 8));
    if (in_turn) work.longest += batches / heads * kCarryEpilogue;
    work.gradient_rounds = std::max(makespan(query_tiles, query_length, key_sums, key_length, sms_), work.longest);
    if (narrow(sizes_.E) && narrow(sizes_.Ev)) work.gradient_rounds = work.gradient_rounds * 3 / 4;
    // Of 2 bytes an element: rows are read twice of query and grad_out, keys of key and once of value, and gradients are written.
    work.bytes = 10 * batches * seen + 2 * batches * rows * (3 * sizes_.E + 2 * sizes_.Ev) +
                 2 * batches / heads * keys * (3 * sizes_.E + 2 * sizes_.Ev);
    if (in_turn) work.bytes += 2 * batches / heads * keys * carried_of_key();
    return work;
  }

  int64_t slice_ns(const BackwardPass& pass, const SlicePart& part, int64_t batches) const {
    const int64_t rows = part.row_end - part.row_begin, keys = part.key_end - part.key_begin;
    if (part.hidden || rows <= 0 || keys <= 0) return kLaunchNs;
    const Work work = work_of(pass, part, batches);
    int64_t carried = 0;  // bytes, read and written
    if (carries_query(pass)) carried += 2 * batches * rows * sizes_.E * 4;
    if (carries_keys(sizes_, pass)) carried += 2 * batches / pass.sum_heads * keys * carried_of_key();
    return std::max((work.scores + work.gradient_rounds) * kStepNs / 8, work.bytes / kBytesPerNs) + carried / kBytesPerNs +
           2 * kLaunchNs;
  }

  const BackwardSizes& sizes_;
  int64_t room_, sms_;
  BackwardPass best_ = {};
  int64_t bytes_ = 0, ns_ = -1;
};

BackwardPlan search(const BackwardSizes& sizes, int64_t cap, int64_t sms);

}  // namespace

int64_t BackwardPlan::cleared(const BackwardSizes& sizes) const {
  return kWorkspaceAlignment + counter_bytes(sizes, passes.front());
}

SlicePlaces slice_places(const BackwardSizes& sizes, const BackwardPass& pass, const SlicePart& part) {
  const int64_t rows = part.row_end - part.row_begin, keys = part.key_end - part.key_begin;
  const int64_t array =
      part.hidden ? 0 : round_up(pass.batches * rows * slice_pitch(keys) * (kScoreBytes / 2), kWorkspaceAlignment);
  SlicePlaces at = {};
  at.key_carry = counter_bytes(sizes, pass);
  if (carries_query(pass)) {
    at.key_carry = round_up(pass.group(sizes) * carry_floats(part.carried_rows, sizes.E) * 4, kWorkspaceAlignment);
  }
  at.probabilities = at.key_carry;
  if (carries_keys(sizes, pass)) {
    at.probabilities += round_up(carry_floats(keys, sizes.E + sizes.Ev) * 4, kWorkspaceAlignment);
  }
  at.score_grad = at.probabilities + array;
  at.end = at.score_grad + array;
  return at;
}

BackwardPlan plan_backward_slices(const BackwardSizes& sizes, int64_t cap, int64_t sms) {
  struct Key {
    BackwardSizes sizes;
    int64_t cap, sms;
    bool operator==(const Key&) const = default;
  };
  thread_local Recent<Key, BackwardPlan> recent;
  return recent.find({sizes, cap, sms}, [&] { return search(sizes, cap, sms); });
}

namespace {

BackwardPlan search(const BackwardSizes& sizes, int64_t cap, int64_t sms) {
  BackwardPlan plan = {};
  plan.slices_at = round_up(2 * sizes.N * sizes.L * 4, kWorkspaceAlignment) + kWorkspaceAlignment;
  // Delta and norm count towards the cap, of which slices may have a quarter in any case.
  cap = std::max<int64_t>(cap, 0);
  const int64_t most_of_cap = cap - cap / 64;  // small things are allocated next to it
  const int64_t usable = most_of_cap < kAllocatorPiece ? most_of_cap : most_of_cap / kAllocatorPiece * kAllocatorPiece;
  const int64_t room = std::max(usable - plan.slices_at, cap / 4);
  int64_t most = 0;
  const auto add = [&](const Planner& planner) {
    plan.passes.push_back(planner.pass());
    most = std::max(most, planner.bytes());
    plan.ns += planner.ns();
  };
  Planner all(sizes, room, sms);
  const bool found = all.find(true, true);
  // Next to a large carry there may be room for small slices only: two passes may then be faster.
  if (found && !(all.pass().cuts_rows() && (all.pass().cuts_keys() || sizes.mask_grad))) {
    add(all);
  } else {
    Planner rows(sizes, room, sms), keys(sizes, room, sms);
    if (!rows.find(true, false)) rows.take_least(true, false);
    if (!keys.find(false, true)) keys.take_least(false, true);
    if (found && all.ns() <= rows.ns() + keys.ns()) {
      add(all);
    } else {
      add(rows);
      add(keys);
    }
  }
  plan.bytes = plan.slices_at + most;
  return plan;
}

}  // namespace
}  // namespace attention_ext
