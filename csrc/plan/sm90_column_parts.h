// How the row kernels' backward on Hopper cuts the walk of a tile of keys over the queries of its group, where keys are few and
// queries many. Its driver and its estimates read it here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/arithmetic.h"
#include "plan/cost.h"
#include "plan/sm90_rows_backward.h"

namespace attention_ext {

struct ColumnSizes {
  int64_t key_heads, group;  // query heads of a key head
  int64_t L, S;              // S: keys that some query sees
  int64_t E, Ev;
  bool causal, general;

  constexpr RowsBackwardShape shape() const { return rows_backward_shape(rows_backward_class(E, Ev), general); }
};

// The group's heads are cut first, then the blocks of a head. Each part leaves dK and dV in float; a small kernel adds them.
struct ColumnParts {
  int64_t heads = 1, blocks = 1;  // parts of the group, and of a head's blocks
  int64_t heads_of_part = 1;      // query heads; of the last one maybe fewer
  int64_t pitch = 0;              // floats of a key that a part leaves: of dK, then of dV, whole quads
  int64_t key_heads = 0;          // of a launch
  int64_t head_bytes = 0;         // that the parts of a key head take
  int64_t bytes = 0;              // and those of a launch
  int64_t left_ns = 0;            // estimated, of adding them, in all launches

  constexpr int64_t count() const { return heads * blocks; }
};

// An estimate, by which parts are chosen and kernels compared; the times of a block are in the table of classes.
constexpr int64_t kColumnTileNs = 3000;  // beginning and end of a tile

// of_launch: key heads.
constexpr ColumnParts cut_columns(const ColumnSizes& s, int64_t count, int64_t of_launch) {
  constexpr int64_t kLaunchNs = 2500, kBytesPerNs = 2500;
  ColumnParts parts;
  parts.heads_of_part = ceil_div(s.group, count);
  parts.heads = ceil_div(s.group, parts.heads_of_part);
  parts.blocks = std::min(std::max<int64_t>(count / parts.heads, 1), ceil_div(s.L, s.shape().col_queries));
  parts.pitch = round_up(s.E, 4) + round_up(s.Ev, 4);
  parts.key_heads = of_launch;
  if (parts.count() > 1) {
    parts.head_bytes = times(parts.count(), s.S, 4 * parts.pitch);
    parts.bytes = times(of_launch, parts.head_bytes);
    const int64_t launches = 2 * ceil_div(s.key_heads, of_launch) - 1;  // besides the first of the column kernel
    parts.left_ns = launches * kLaunchNs + 2 * times(s.key_heads, parts.head_bytes) / kBytesPerNs;  // in L2 for the most part
  }
  return parts;
}

// Of the column kernel, and of adding what parts leave.
constexpr int64_t column_parts_ns(const ColumnSizes& s, const ColumnParts& parts, int64_t block_ns, int64_t sms) {
  const RowsBackwardShape shape = s.shape();
  const int64_t walked = times(parts.heads_of_part, ceil_div(ceil_div(s.L, shape.col_queries), parts.blocks));
  const int64_t longest = kColumnTileNs + times(walked, block_ns);
  const auto launch_ns = [&](int64_t key_heads) {
    const int64_t items = times(key_heads, parts.count(), ceil_div(s.S, shape.col_keys));
    if (!s.causal) return times(ceil_div(items, sms), longest);
    const int64_t seen = times(key_heads, s.group, visible_blocks(s.L, s.S, shape.col_queries, shape.col_keys, true));
    return std::max(longest, (times(items, kColumnTileNs) + times(seen, block_ns)) / sms);
  };
  const int64_t before = ceil_div(s.key_heads, parts.key_heads) - 1;  // launches before the last one
  return times(before, launch_ns(parts.key_heads)) + launch_ns(s.key_heads - before * parts.key_heads) + parts.left_ns;
}

// Where cuts are decides the bits of dK and dV. So it follows from the lengths, the group and the head dims alone: it is what would
// be fastest with 64 query heads, and no fewer than 16 key heads, on a card of 132 SMs, whatever there is, unless that costs any
// larger number of heads half as much again; and more parts where these cost an eighth at most, and 8 query heads, or one key head,
// still do not fill the card. Where `room` holds the parts of some key heads, the others come after them; where these would not
// fill the card, nothing is cut, as many launches of few CTAs take longer than one of whole tiles.
constexpr ColumnParts plan_column_parts(const ColumnSizes& sizes, int64_t room) {
  constexpr int64_t kSms = 132, kMany = 64, kFew = 8, kFull = 1024, kMostParts = 64, kLeastBlocks = 8;
  const int64_t blocks = times(sizes.group, ceil_div(sizes.L, sizes.shape().col_queries));
  const auto ns = [&](int64_t heads, int64_t count) {
    ColumnSizes of = sizes;
    of.key_heads = heads;
    return column_parts_ns(of, cut_columns(of, count, heads), sizes.shape().col_block_ns, kSms);
  };
  int64_t count = 1;
  const int64_t many = std::max<int64_t>(kMany / sizes.group, 16), few = std::max<int64_t>(kFew / sizes.group, 1);
  const auto may = [&](int64_t eighths) {  // kFull: so many that SMs are never idle
    return 2 * count <= kMostParts && blocks >= 2 * count * kLeastBlocks && ns(kFull, 2 * count) / eighths < ns(kFull, 1) / 8;
  };
  while (may(12) && ns(many, 2 * count) / 7 < ns(many, count) / 8) count *= 2;
  const int64_t tiles = ceil_div(sizes.S, sizes.shape().col_keys);
  while (may(9) && times(few, tiles, 2 * count) <= kSms) count *= 2;
  const ColumnParts parts = cut_columns(sizes, count, sizes.key_heads);
  if (parts.head_bytes == 0) return parts;
  const int64_t held = std::min(sizes.key_heads, std::max<int64_t>(room, 0) / parts.head_bytes);
  const bool fills = held == sizes.key_heads || times(held, parts.count(), tiles) >= kSms;
  return fills ? cut_columns(sizes, count, held) : cut_columns(sizes, 1, sizes.key_heads);
}

}  // namespace attention_ext
