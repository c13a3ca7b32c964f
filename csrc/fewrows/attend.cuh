// A GQA layer's attention over few rows, after the projection: head norms, RoPE, cache write, attention under the one law
// (kernels/attention.py), merge.
//
// Positions come in tiles of 64, counted from 0, and are dealt to ranks in pairs (dealing.cuh): the even tile to warps 0 to 3 of 8,
// the odd one to warps 4 to 7, 16 positions a warp. A warp folds its positions in ascending order; the partials of warps, then of
// 8 ranks, then of those in long tables are merged in ascending order. All of that follows from a query's own position, so
// neither the rows beside it nor the shape of its tree nor the size of the launch change a bit: whoever has no position of a query
// adds nothing to it, and may as well be missing.
// The four warps of a side (even or odd) fetch their own tiles, in long tables by copies that one of them asks for, and wait for
// one another alone; nodes are kept by all, and only who folds a tile that nodes are in waits for them.
// A position below the prefix is that row of the cache. One past it is the node of the query's own path at that depth: a row
// of this pass where one has that index, else a row that an earlier pass over the same tree left in the cache.
#pragma once

#include "boxes.cuh"
#include "cluster.cuh"
#include "common.cuh"
#include "fold.cuh"
#include "merge.cuh"
#include "nodes.cuh"
#include "stages.cuh"

#include <type_traits>

namespace eagle3 {

// Short tables: cluster x / kUsed: group of heads; y: tile of rows; z: sequence. Long ones: x: see rank_of; y: past `first`, sequences'
// tiles of rows. kShare heads a group; kHalf: see turn; kUsed: ranks that are there. Warps 8 i … 8 i + 7 hold part i.
template <int kWidth, int kShare, int kHalf, int kMost, int kUsed, class Maps>
__global__ void __launch_bounds__(kMost *kWarps * 32, 2 / kMost) attend(Attention p, const __grid_constant__ Maps maps, int first) {
  constexpr int kBlock = kVectors / kShare, kMany = kWidth / 32, kChunks = kWidth / 8; // kBlock: rows of a part
  constexpr bool kOne = std::is_same_v<Maps, NoBoxes>; // a short table
  // Where the first projection's blocks end, those behind this kernel begin to ask for weights, a little at a time.
  if (kOne) launch_dependents();
  using P = Stages<kWidth, kMost, kUsed, kOne>;
  constexpr int kDepth = P::kDepth, kSide = kSlices * 32; // tiles of a side in flight; its threads in a part
  using Sum = Columns<kWidth>;
  using Sums = Fold<kWidth, !kOne>;
  using Rows = typename Sums::Rows;
  uint4 *const attention_memory = stages_memory<kOne>(); // stages of kTile keys, then kTile values
  __shared__ Nodes<kMost * kBlock> nodes;
  __shared__ int slots_of[kOne ? 2 * kTile : 1]; // of the rows below the prefix of tiles that are to be fetched; -1: there is none
  __shared__ Copies<kDepth> copies[kOne ? 1 : 2]; // of each side of long tables
  __shared__ uint64_t inbox;
  bf16 *const memory = reinterpret_cast<bf16 *>(attention_memory);
  float *const result = reinterpret_cast<float *>(attention_memory);
  float2 *const stats_of = reinterpret_cast<float2 *>(result + P::kResult);
  const int threads = kMost == 1 ? kWarps * 32 : blockDim.x, parts = threads / (kWarps * 32);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = warp / kWarps, side = warp / kSlices & 1, slice = warp % kSlices;
  const int mates = parts * kSide, mate = part * kSide + threadIdx.x % kSide; // threads of this side, and which of them this one is
  const RankOf place = kOne ? RankOf{cluster_rank(), static_cast<int>(blockIdx.x / kUsed)} : rank_of(p.groups);
  const int rank = place.rank, group = place.group, tiles = (p.t + parts * kBlock - 1) / (parts * kBlock), unit = first + blockIdx.y;
  const int b = kOne ? blockIdx.z : unit / tiles, tile_of_rows = kOne ? blockIdx.y : unit - b * tiles;
  const int first_row = tile_of_rows * parts * kBlock, rows = min(parts * kBlock, p.t - first_row), vectors = rows * kShare;
  const int64_t line0 = static_cast<int64_t>(b) * p.t;
  const int64_t prefix_asked = load_long(p.prefix + b);
  const int *const pages = p.pages + static_cast<int64_t>(b) * p.table;
  const auto asked = nodes.ask(p, line0, first_row, rows);
  // 16 vectors: their rows, and of the half that this warp norms and turns for its side, if it does, all but the vectors
  const int g = lane >> 2, halves = part * kBlock + 8 / kShare < rows ? 2 : 1;
  const int turned = g + 8 * (slice & 1), turned_row = part * kBlock + turned / kShare;
  // Blocks of long tables that no nodes are in read no table of nodes.
  const int64_t own_position = kOne ? 0 : load_long(p.positions + line0 + first_row + min(turned_row, rows - 1));
  const uint64_t own_bits = kOne ? 0 : nodes.bits_of(p, line0, first_row + min(lane, rows - 1));
  auto mine = [&](int s) { return s % kNext<kOne> / 2 == rank; };
  int page, rest; // of a row of a short table's tile: its page and its place there
  auto look = [&](int row) { // slots are below 2^31, as no GPU's memory holds more
    const unsigned column = static_cast<unsigned>(row) / static_cast<unsigned>(p.page);
    page = column < static_cast<unsigned>(p.columns) ? pages[column] : 0;
    rest = row - static_cast<int>(column) * p.page;
  };
  int *const slots = slots_of + side * kTile;
  const Stream<kWidth, kDepth, Maps> stream{p, maps, pages, memory + side * kDepth * P::kStage, copies[kOne ? 0 : side], group};
  const bool asks = !kOne && part == 0 && slice == 2; // of long tables: a warp a side that turns no queries
  int pages_of[3]; // of the tiles that it asks for first
  const int begin = first_tile<kOne>(rank, side, 0);
  auto lines = [&](int v) { return Lines<kWidth>(p, group, parts * kVectors, v); }; // of a vector, where ranks hand their sums over
  if (!kOne && warp == kSlices - 1 && lane < vectors) lines(lane).foresee(rank);
  if (kOne) look(begin * kTile + mate % kTile); // before the prefix is known: most often no window moves the first tile
  if (asks) stream.look_up(pages_of, begin);
  Angles<kHalf> angles;
  uint4 gain[kMany];
  auto load_gain = [&] {
#pragma unroll
    for (int i = 0; i < kMany; i++) // ones where there are none
      gain[i] = load_gains(p.q_gain, i * 32 + (lane & 3) * 8);
  };
  if (!kOne && slice < halves) { // before tiles are asked for: behind those they would come behind them, and queries with them
    load_gain();
    angles.load(p.cos_sin + own_position * p.turned);
  }
  const int prefix = static_cast<int>(prefix_asked);
  // no row of the block sees an older tile
  const int oldest = p.window ? max(0, prefix + (p.tree ? 0 : first_row) - p.window + 1) / kTile : 0;
  auto first_of = [&](int rank, int side) { return first_tile<kOne>(rank, side, oldest); };
  const bool merges = !kOne && rank >= kDealt - kMergers && kDealt - 1 - rank < vectors;
  if (!kOne && !merges && min(first_of(rank, 0), first_of(rank, 1)) * kTile >= prefix + kTile) return; // whatever the tree, no tile is this rank's
  const int start = first_of(rank, side), border = prefix / kTile; // the tile that the prefix ends in, and the first node's
  const int tail = border + !mine(border); // the first of this rank that nodes may be in, if it is this rank's
  const int depth = kDepth - (!kOne && side && mine(tail)); // of this side: nodes take the other's place
  if (start != begin) {
    if (kOne) look(start * kTile + mate % kTile);
    if (asks) stream.look_up(pages_of, start);
  }
  if (asks) {
    if (lane == 0) stream.open(mates / 32, depth);
    stream.begin(pages_of, start, depth, prefix);
  }
  if (kOne && mate < kTile) slots[mate] = start * kTile + mate < prefix ? page * p.page + rest : -1;
  // short tables: a thread copies its 16 bytes of every `step` rows (a multiple of 8: their places differ by rows alone)
  const int copied = mate / kChunks, chunk = mate % kChunks * 8, step = mates / kChunks;
  const char *own_keys = reinterpret_cast<const char *>(p.keys + group * kWidth + chunk);
  const char *own_values = reinterpret_cast<const char *>(p.values + group * kWidth + chunk);
  int key_to = Rows::key(copied, chunk), value_to = Rows::value(copied + kTile, chunk);
  uint32_t pitch = p.groups * kWidth * sizeof(bf16);
  if (kOne) asm volatile("" : "+l"(own_keys), "+l"(own_values), "+r"(pitch), "+r"(key_to), "+r"(value_to)); // or each copy computes them anew
  auto copy = [&](int row, int slot) { // row: of keys, so many past this thread's first; of values a tile further
    const uint64_t from = static_cast<uint64_t>(static_cast<uint32_t>(slot)) * pitch;
    copy_async(memory + key_to + row * kWidth, own_keys + from, true);
    copy_async(memory + value_to + row * kWidth, own_values + from, true);
  };
  auto fetch = [&] {
    constexpr int kBatch = kMost == 1 ? 4 : 2; // which divides the rows of a thread
#pragma unroll 1
    for (int first = 0; first < kTile; first += kBatch * step) {
      int slot[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) slot[i] = slots[copied + first + i * step];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (slot[i] >= 0) copy(side * 2 * kTile + first + i * step, slot[i]);
    }
    commit_copies();
  };
  int end = kOne ? 0 : prefix + max(1, static_cast<int>(__reduce_max_sync(kAll, __popcll(own_bits))));
  const bool holds = mine(tail) && tail * kTile < end; // of long tables: whether nodes are in a tile of this block
  if (kOne || holds || p.window) nodes.read(p, asked, line0, first_row, rows, prefix, pages);
  if (kOne) end = nodes.end;
  if ((kOne || holds) && slice == kSlices - 1 && side && !lane) nodes.lead(part, part * kBlock, min(rows, (part + 1) * kBlock));
  // Nodes have a stage of their own where a block may have two parts: in long tables the odd side's last. Else they lie behind the
  // prefix's rows in the stage of their tile, or else in that of the odd one after it, which has no such rows, or else in that of the
  // even one before it, once it is folded.
  const int before = max(0, prefix - tail * kTile);
  const bool beside = kMost > 1 || before + nodes.count() <= kTile;
  // row of their first key
  const int node0 = kMost == 1 ? beside ? (tail & 1) * 2 * kTile + before : (~tail & 1) * 2 * kTile : (2 * kDepth - !kOne) * 2 * kTile;
  if (kOne) fetch();
  auto has = [&](int rank) { return min(first_of(rank, 0), first_of(rank, 1)) * kTile < end; }; // whether it has a partial
  const unsigned live_ranks = kOne ? __ballot_sync(kAll, has(lane % kRanks)) & ((1u << kRanks) - 1) : 0;
  // of short tables vector i is rank i mod kUsed's, who gets it from all that have a part of it
  if (kOne && threadIdx.x == 0) open_inbox(&inbox, (vectors + kUsed - 1 - rank) / kUsed * __popc(live_ranks) * (kWidth + 2) * 4);
  if (kOne) cluster_arrive();
  float *const sent = result + P::kInbox, *const sent_stats = sent + P::kReceived * kWidth; // [vectors / kUsed, kUsed], kWidth and 2 of each
  if constexpr (kOne) { // of ranks that have none: who merges asks no more who has any
    if (warp < P::kReceived / kUsed)
#pragma unroll 1
      for (unsigned none = ~live_ranks & ((1u << kUsed) - 1); none; none &= none - 1) {
        const int from = warp * kUsed + __ffs(none) - 1;
        *reinterpret_cast<Sum *>(sent + from * kWidth + lane * kMany) = Sum{};
        if (lane == 0) *reinterpret_cast<float2 *>(sent_stats + from * 2) = make_float2(-INFINITY, 0.f);
      }
    __syncwarp(); // all lanes read them, in a block without a tile behind no other barrier
  }
  const int lanes = (p.heads + 2 * p.groups) * kWidth;
  const bool some = kOne ? live_ranks >> rank & 1 : has(rank), folds = start * kTile < end; // whether this block has a tile, and this side
  // the first tile past the prefix is written by who folds it
  const bool writes = tile_of_rows == 0 && mine(border), own_nodes = kOne ? some && mine(tail) && tail * kTile < end : holds;
  const bool late = kMost == 1 && own_nodes && !beside && (tail & 1); // then by the odd side, when the even one has folded its tile
  const int nodes_tile = border + ((border ^ side) & 1); // the only one of this side that nodes may be in, if it is this rank's
  const bool sees_nodes = own_nodes && mine(nodes_tile) && nodes_tile >= oldest && nodes_tile * kTile < end;
  // rows of the cache are older than the kernel before this one, which only projects
  const unsigned long long earlier = own_nodes ? nodes.wanted & ~nodes.present : 0;
  if (kOne && !folds && lane < kVectors) stats_of[warp * kVectors + lane] = make_float2(-INFINITY, 0.f); // of nothing
  auto fetch_earlier = [&] { // seldom: a step of a draft
#pragma unroll 1
    for (int i = late ? mate : threadIdx.x; i < kTile * kChunks; i += late ? mates : threads) {
      const int node = i / kChunks, slot = nodes.slot_of[node];
      if (!(earlier >> node & 1ull) || slot < 0) continue;
      copy_async(memory + Rows::key(node0 + node, chunk), own_keys + static_cast<uint64_t>(slot) * pitch, true);
      copy_async(memory + Rows::value(node0 + kTile + node, chunk), own_values + static_cast<uint64_t>(slot) * pitch, true);
    }
    commit_copies();
  };
  if (earlier && !late) fetch_earlier();
  uint4 *const queries = attention_memory + P::kQueries / sizeof(uint4) + (side * kMost + part) * Sums::kQueries;
  struct Limits {
    int row, last, after; // a vector's row; positions that it sees are up to `last` and past `after`
  };
  auto limits = [&](int h) {
    const int row = part * kBlock + ((kOne ? g : (fresh_thread() & 31) / 4) + 8 * h) / kShare, last = row < rows ? nodes.last_of[row] : -1;
    return Limits{row, last, p.window ? last - p.window : -1};
  };
  Limits early[2] = {}; // in long tables where they are needed: there are no registers to keep them
  if (kOne) early[0] = limits(0), early[1] = limits(1);
  const bool turns = folds && slice < halves;
  const bf16 *from = p.projected + (line0 + first_row + turned_row) * lanes + (group * kShare + turned % kShare) * kWidth + (lane & 3) * 8;
  asm volatile("" : "+l"(from)); // an address before the wait
  NodeTurn<kWidth> node_turn;
  uint4 q[kMany];
  if (kOne && turns) angles.load(p.cos_sin + static_cast<int64_t>(nodes.position_of[first_row + min(turned_row, rows - 1)]) * p.turned);
  if (own_nodes) node_turn.load(p, nodes);
  if (kOne) load_gain();
  wait_for_predecessor();
  if (!kOne) launch_dependents();
#pragma unroll
  for (int i = 0; i < kMany; i++) q[i] = turns && turned_row < rows ? load_rows(from + i * 32) : make_uint4(0, 0, 0, 0);
  if (kOne) cluster_wait(); // others may be sent to: asked while the queries are on their way, it costs nothing
  constexpr int kRead = 1, kKept = 2, kOwn = 3, kVector = 5; // barriers: the even tile is read; nodes are kept; of a side; of a vector
  if (late && side) meet_at(kRead, threads);
  if (own_nodes && (side || !late)) {
    if (earlier && late) fetch_earlier();
    keep_nodes<kWidth, !kOne, kHalf>(p, nodes, node_turn, late ? threads / 2 : threads, memory, node0, line0, group, writes);
    if (earlier) wait_copies<0>();
    if (!sees_nodes) arrive_at(kKept, threads);
  }
  if (turns) {
    turn<kWidth, kHalf>(q, gain, p.q_gain != nullptr, angles, p.eps);
    Sums::keep(queries, q, slice);
  }
  if (asks) stream.go_on(first_of(rank, side), prefix);
  Sums fold;
  if (folds) {
    fold.begin();
    const int past = (end + kTile - 1) / kTile * kTile;
    auto own_copies = [&]() -> Copies<kDepth> & { return copies[kOne ? 0 : fresh_thread() / (kSlices * 32) & 1]; };
    if (!kOne && start < border) meet_at(kOwn + side, mates); // queries are kept
#pragma unroll 1
    for (int cursor = start * kTile; cursor < past; cursor += kNext<kOne> * kTile) { // a tile's first position, and in its low bits
      const unsigned turn = kOne ? 0 : cursor % kTile; // the turn of this side's stages, 2 * stage + parity: registers are short
      const int at = cursor - static_cast<int>(turn);
      if (kOne) wait_copies<0>();
      if (at + kTile > prefix)
        meet_at(kKept, late ? threads / 2 : threads);
      else if (kOne)
        meet_at(kOwn + side, mates);
      if (!kOne) await(own_copies().full + turn / 2, turn & 1);
      const int first = at + slice * kSlice, row0 = (side * kDepth + static_cast<int>(turn / 2)) * 2 * kTile + slice * kSlice;
      const bool gathered = first + kSlice > prefix; // then each row by itself, unless they lie on one path
      const int row_begin = part * kBlock, leader = gathered ? nodes.leader[part] : row_begin;
      const int row_end = min(rows, leader < 0 ? row_begin + kBlock : leader + 1);
      if (!kOne && !gathered && !p.window) { // every vector sees every position
        if (row_begin < rows) fold.slice(queries, memory, Sums::place_at(row0), false, first, {}, {}, p.scale);
      } else {
#pragma unroll 1
        for (int r = max(leader, row_begin); r < row_end; r++) {
          const int last = nodes.last_of[r];
          if (gathered && first > last) continue;
          const uint8_t *path = nodes.path[r];
          int sees[2], after[2];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const Limits of = kOne ? early[h] : limits(h);
            sees[h] = leader >= 0 || of.row == r ? of.last : -1;
            after[h] = of.after;
          }
          auto place = Sums::place_at(row0);
          if (gathered) place = Sums::place_of([&](int i) { return first + i < prefix ? row0 + i : node0 + path[min(first + i, last) - prefix]; });
          fold.slice(queries, memory, place, gathered || p.window, first, after, sees, p.scale);
          if (gathered && nodes.broken) // a query that sees a broken node is lost, and only such a query
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const Limits of = kOne ? early[h] : limits(h);
              if (of.row < rows && (nodes.bits[of.row] & nodes.broken)) fold.norm[h] = NAN;
            }
        }
      }
      if (kOne) break;
      __syncwarp();
      if (lane == 0) arrive(own_copies().empty + turn / 2);
      const int depth = own_copies().depth, next = at + depth * kNext<kOne> * kTile;
      if (asks && next < end) {
        await(own_copies().empty + turn / 2, turn & 1);
        stream.ask(turn / 2, next, stream.looked_up(), prefix);
        stream.look_ahead(next + kNext<kOne> * kTile);
      }
      cursor = at + static_cast<int>(turn / 2 + 1 == static_cast<unsigned>(depth) ? ~turn & 1 : turn + 2);
    }
  }
  if (late && !side) arrive_at(kRead, threads);
  if (some) {
    // `folds`, without a register meanwhile
    const bool folded = kOne ? start * kTile < nodes.end : first_of(rank, fresh_thread() / (kSlices * 32) & 1) * kTile < end;
    if (!kOne || own_nodes) { // what one side stores, the other may still read
      wait_copies<0>();
      __syncthreads();
    } else if (folded)
      meet_at(kOwn + side, mates);
    if (folded)
      fold.store(result + warp * kVectors * kWidth, stats_of + warp * kVectors, halves);
    else if (!kOne && lane < kVectors)
      stats_of[warp * kVectors + lane] = make_float2(-INFINITY, 0.f); // of nothing
  }
  __syncthreads(); // by all, so that it lies on every way to the partials
  // the block's partials, a warp a vector at a time
  const int column = lane * kMany;
  auto hand_on = [&](auto each) {
    constexpr int kEach = decltype(each)::value;
    const bool sides[2] = {first_of(rank, 0) * kTile < end, first_of(rank, 1) * kTile < end}; // that have folded a tile
    auto live = [&](int w) { return sides[w / kSlices]; };
    Partials<kWidth, kWarps> partials[kEach]; // all loads are on their way at once
    float of_all[kEach][2];
    Sum y[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int v = warp + i * parts * kWarps, at = v / kVectors * kWarps * kVectors + v % kVectors; // of its part's first warp
      const float *const from = result + sum_at<kWidth>(at, column & ~7) + (column & 7); // those of a warp are a multiple of 8 vectors
      partials[i].load(live, [&](int w) { return stats_of[at + w * kVectors]; },
                       [&](int w) { return *reinterpret_cast<const Sum *>(from + w * kVectors * kWidth); });
    }
#pragma unroll
    for (int i = 0; i < kEach; i++) y[i] = partials[i].merged(of_all[i][0], of_all[i][1], live);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int v = warp + i * parts * kWarps;
      if (!kOne) {
        lines(v).hand_over(rank, y[i], of_all[i][0], of_all[i][1]);
        continue;
      }
      const int to = v / kUsed * kUsed + rank;
      send(sent + to * kWidth + column, &inbox, v % kUsed, y[i].v);
      if (lane == 0) send(sent_stats + to * 2, &inbox, v % kUsed, of_all[i]);
    }
  };
  if (some && warp + parts * kWarps < vectors)
    hand_on(std::integral_constant<int, 2>{}); // no warp has more
  else if (some && warp < vectors)
    hand_on(std::integral_constant<int, 1>{});
  // what this rank merges: of the cluster, or of all ranks
  const int v = kOne ? rank + kUsed * warp : kDealt - 1 - rank + kMergers * (warp / kQuarters);
  if (v >= vectors || !(kOne || merges)) return;
  const int head = group * kShare + v % kShare;
  bf16 *to = p.y + ((line0 + first_row + v / kShare) * p.heads + head) * kWidth + column;
  float sink = p.sinks ? __bfloat162float(p.sinks[head]) * 1.4426950408889634f : -INFINITY;
  asm volatile("" : "+l"(to), "+f"(sink)); // beside the others' sending
  if constexpr (kOne) {
    await(&inbox, 0); // in this block's own memory: a wait of the cluster's would drop all of L1 besides
    const float *const got = sent + warp * kUsed * kWidth + column;
    const float2 *const got_stats = reinterpret_cast<const float2 *>(sent_stats) + warp * kUsed;
    float top, norm;
    const Sum y = merge_partials<kWidth, kUsed>(top, norm, [](int) { return true; }, [&](int c) { return got_stats[c]; },
                                                [&](int c) { return *reinterpret_cast<const Sum *>(got + c * kWidth); });
    finish<kWidth>(to, y, top, norm, sink);
  } else {
    float *const shared = sent + warp / kQuarters * kQuarters * (kWidth + 2); // behind what other warps still read
    merge_ranks<kWidth>(lines(v), shared, kVector + warp / kQuarters, has, to, sink);
  }
}

} // namespace eagle3
