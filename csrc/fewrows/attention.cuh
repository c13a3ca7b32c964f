// A GQA layer's attention over few rows, after the projection: head norms, RoPE, cache write, attention under the one law
// (kernels/attention.py), merge.
//
// Positions come in tiles of 64, counted from 0. Runs of 16 tiles are dealt to 3 clusters in turn, the pairs of tiles (2 r,
// 2 r + 1) of a run to the 8 ranks r of its cluster: the even tile to warps 0 to 3 of 8, the odd one to warps 4 to 7, 16
// positions a warp. A warp folds its positions in ascending order; the partials of warps, then of ranks, then of clusters are
// merged in ascending order. All of that follows from a query's own position, so neither the rows beside it nor the shape of its
// tree nor the size of the launch change a bit: whoever has no position of a query adds nothing to it, and may as well be missing.
// The four warps of a side (even or odd) fetch their own tiles and wait for one another alone; nodes are kept by all, and only
// who folds a tile that nodes are in waits for them.
// A position below the prefix is that row of the cache. One past it is the node of the query's own path at that depth: a row
// of this pass where one has that index, else a row that an earlier pass over the same tree left in the cache.
#pragma once

#include "cluster.cuh"
#include "common.cuh"
#include "fold.cuh"
#include "nodes.cuh"

namespace eagle3 {

constexpr int kRanks = 8; // of a cluster, or of one whose last ranks would have no tile the first kFewer
constexpr int kFewer = 6; // of them 20 fit at once, of 8 ranks 15: 8 rows of 4 groups of heads are 16
constexpr int kRun = 2 * kRanks, kClusters = 3; // tiles of a run: 1,024 positions need one cluster
// three clusters of 4 groups of heads fit at once, a block a multiprocessor; of 16, an H200 takes 15
constexpr int kParts = 2; // groups of kVectors that a block of a long context may hold: its keys serve them all

// Whether so many ranks have all tiles of tables of that many positions, and one that unwritten rows may reach.
inline bool short_table(int positions, int ranks) { return positions + kTile <= 2 * ranks * kTile; }

// From a tile to the next one of the same cluster, rank and side. kOne: short tables, whose tiles are one run.
template <bool kOne>
constexpr int kNext = kOne ? kRun : kRun * kClusters;

// The first tile of a cluster, rank and side that is not older than tile `oldest`.
template <bool kOne>
__device__ __forceinline__ int first_tile(int cluster, int rank, int side, int oldest) {
  const int s = (kOne ? 0 : oldest / kNext<kOne> * kNext<kOne> + cluster * kRun) + 2 * rank + side;
  return s < oldest ? s + kNext<kOne> : s;
}

// Clusters that have a tile between tile `oldest` and position `end`, a bit each.
template <bool kOne>
__device__ __forceinline__ unsigned clusters_with(int oldest, int end) {
  if (kOne) return 1;
  const int from = oldest / kRun, runs = (end - 1) / kTile / kRun - from + 1;
  const unsigned some = ((1u << min(runs, kClusters)) - 1) << from % kClusters;
  return (some | some >> kClusters) & ((1u << kClusters) - 1);
}

// One vector of a block: `at` among the `held` of its block.
struct QueryVector {
  int b, group, row, head, at, held;
};

// A cluster's sum of a vector, for a warp: to the output if it is the only one, else to those of the other clusters, and the one
// that comes last merges them, in ascending order.
template <int kWidth, bool kOne>
__device__ __forceinline__ void merge_clusters(const Attention &p, const Columns<kWidth> &y, float top, float norm, unsigned clusters, int own,
                                       const QueryVector &v) {
  using Sum = Columns<kWidth>;
  const int lane = threadIdx.x & 31, column = lane * (kWidth / 32), c = lane % 4, head = v.group * (p.heads / p.groups) + v.head;
  const bool several = !kOne && clusters != 1u << own, has = clusters >> c & 1; // kClusters is at most 4
  const size_t unit = (static_cast<size_t>(v.b) * gridDim.y + blockIdx.y) * p.groups + v.group, first = unit * kClusters * v.held + v.at;
  const float sink = p.sinks ? __bfloat162float(p.sinks[head]) * 1.4426950408889634f : -INFINITY;
  if (several) {
    const size_t to = first + static_cast<size_t>(own) * v.held;
    *reinterpret_cast<Sum *>(p.sums + to * kWidth + column) = y;
    if (lane == 0) p.stats[to * 2] = top, p.stats[to * 2 + 1] = norm;
    __syncwarp();
    unsigned *const arrivals = p.arrivals + unit * v.held + v.at;
    bool last = false;
    if (lane == 0) {
      last = arrive(arrivals) == static_cast<unsigned>(__popc(clusters)) - 1;
      if (last) *arrivals = 0;
    }
    if (!__any_sync(kAll, last)) return;
    __syncwarp();
    const float *const from = p.stats + (first + static_cast<size_t>(c) * v.held) * 2;
    if (has) top = load_float(from), norm = load_float(from + 1);
  }
  if (!has) top = -INFINITY, norm = 0.f;
  const Sum all = merge_partials<kWidth, 4>(top, norm, clusters, sink, [&](int c) {
    return several ? Sum::read(p.sums + (first + static_cast<size_t>(c) * v.held) * kWidth + column) : y;
  });
  bf16 *const to = p.y + ((static_cast<int64_t>(v.b) * p.t + v.row) * p.heads + head) * kWidth + column;
  const float by = 1.f / norm;
#pragma unroll
  for (int j = 0; j < kWidth / 32; j += 2) // + 0: nothing may hang on the sign of a zero, which adding nothing may change
    *reinterpret_cast<uint32_t *>(to + j) = pack(all.v[j] * by + 0.f, all.v[j + 1] * by + 0.f);
}

// Where things lie in shared memory: stages, one or two a side, in long tables one of nodes behind them; partials over them, when
// they have been read, and the inbox behind those. In short tables others may send before this block has read its tiles: there
// the inbox lies behind the stages too, and the partials of a side lie where its own tile did. Queries lie behind everything.
template <int kWidth, int kMost, int kUsed>
struct Stages {
  static constexpr int kReceived = (kMost * kVectors + kUsed - 1) / kUsed * kUsed; // partials, at most: of a rank's vectors, one of each rank
  static constexpr int kDepth = kMost == 1 ? 1 : 2, kStage = 2 * kTile * kWidth; // elements of a stage
  static constexpr int kAll = 2 * kDepth + (kMost > 1);
  static constexpr int kResult = kMost * kWarps * kVectors * kWidth, kStats = 2 * kMost * kWarps * kVectors; // floats
  static constexpr int kInbox = kResult + kStats, kEnd = kInbox + kReceived * (kWidth + 2);
  static constexpr size_t kOfStages = kAll * kStage * sizeof(bf16), kQueries = kMost == 1 ? kEnd * sizeof(float) : kOfStages; // bytes
  static constexpr size_t kBytes = kQueries + 2 * kMost * kVectors * kWidth * sizeof(bf16); // queries of each side
  static_assert(kEnd * sizeof(float) <= kQueries && (kMost > 1 || kResult * sizeof(float) == kOfStages) && kQueries % 16 == 0, "all fits");
};

// Cluster x / kUsed: group of heads; y: tile of rows; z: sequence and, where there are several, a cluster of tiles. kShare heads a
// group; kHalf: see turn; kUsed: ranks of the cluster that are there. Warps 8 i … 8 i + 7 hold part i.
template <int kWidth, int kShare, int kHalf, int kMost, int kUsed>
__global__ void __launch_bounds__(kMost *kWarps * 32, 2 / kMost) attend(Attention p) {
  constexpr int kBlock = kVectors / kShare, kMany = kWidth / 32, kChunks = kWidth / 8; // kBlock: rows of a part
  constexpr bool kOne = kMost == 1;
  using P = Stages<kWidth, kMost, kUsed>;
  constexpr int kDepth = P::kDepth, kSide = kSlices * 32; // tiles of a side in flight; its threads in a part
  using Sum = Columns<kWidth>;
  extern __shared__ uint4 attention_memory[]; // stages of kTile keys, then kTile values
  __shared__ Nodes<kMost * kBlock> nodes;
  __shared__ int slots_of[2 * kDepth * kTile]; // of the rows below the prefix of tiles that are to be fetched; -1: there is none
  __shared__ int2 later_of[kOne ? 1 : 2 * kDepth * kTile]; // of the rows of tiles after those: their pages and places there
  __shared__ int tile_of[kOne ? 1 : kMost * kWarps]; // that a warp folds
  __shared__ uint64_t inbox;
  bf16 *const memory = reinterpret_cast<bf16 *>(attention_memory);
  float *const result = reinterpret_cast<float *>(attention_memory), *const top_of = result + P::kResult, *const norm_of = top_of + P::kStats / 2;
  const int threads = kOne ? kWarps * 32 : blockDim.x, parts = threads / (kWarps * 32);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = warp / kWarps, side = warp / kSlices & 1, slice = warp % kSlices;
  const int mates = parts * kSide, mate = part * kSide + threadIdx.x % kSide; // threads of this side, and which of them this one is
  const int rank = cluster_rank(), group = blockIdx.x / kUsed, batch = kOne ? gridDim.z : gridDim.z / kClusters;
  const int own = kOne ? 0 : blockIdx.z / batch, b = blockIdx.z - own * batch; // own: cluster of tiles
  const int first_row = blockIdx.y * parts * kBlock, rows = min(parts * kBlock, p.t - first_row), vectors = rows * kShare;
  const int64_t line0 = static_cast<int64_t>(b) * p.t;
  const int prefix = static_cast<int>(load_long(p.prefix + b));
  const int *const pages = p.pages + static_cast<int64_t>(b) * p.table;
  const auto asked = nodes.ask(p, line0, first_row, rows);
  int page, rest; // of a row of a tile to come: its page and its place there
  auto look = [&](int row) { // slots are below 2^31, as no GPU's memory holds more
    const unsigned column = static_cast<unsigned>(row) / static_cast<unsigned>(p.page);
    page = column < static_cast<unsigned>(p.columns) ? pages[column] : 0;
    rest = row - static_cast<int>(column) * p.page;
  };
  int *const slots = slots_of + side * kDepth * kTile;
  auto row_from = [&](int s) { return (s + mate / kTile * kNext<kOne>) * kTile + mate % kTile; }; // of tile s and those after it
  const int begin = first_tile<kOne>(own, rank, side, 0);
  look(row_from(begin)); // before the prefix is known: most often no window moves the first tile
  // no row of the block sees an older tile
  const int oldest = p.window ? max(0, prefix + (p.tree ? 0 : first_row) - p.window + 1) / kTile : 0;
  if (!(clusters_with<kOne>(oldest, prefix + kTile) >> own & 1)) return; // whatever the tree, no tile is this cluster's
  const int start = first_tile<kOne>(own, rank, side, oldest), border = prefix / kTile; // the tile that the prefix ends in, and the first node's
  auto mine = [&](int s) { return (kOne || s / kRun % kClusters == own) && s % kRun / 2 == rank; };
  const int tail = border + !mine(border); // the first of this rank that nodes may be in, if it is this rank's
  // a thread copies its 16 bytes of every `step` rows (a multiple of 8: their places differ by rows alone)
  const int copied = mate / kChunks, chunk = mate % kChunks * 8, step = mates / kChunks;
  const char *own_keys = reinterpret_cast<const char *>(p.keys + group * kWidth + chunk);
  const char *own_values = reinterpret_cast<const char *>(p.values + group * kWidth + chunk);
  int key_to = key_at<kWidth>(copied, chunk), value_to = value_at<kWidth>(copied + kTile, chunk);
  uint32_t pitch = p.groups * kWidth * sizeof(bf16);
  asm volatile("" : "+l"(own_keys), "+l"(own_values), "+r"(pitch)); // or each copy computes them anew
  if (kOne) asm volatile("" : "+r"(key_to), "+r"(value_to)); // in long tables for each tile: see `limit`
  auto copy = [&](int row, int slot) { // row: of keys, so many past this thread's first; of values a tile further
    const uint64_t from = static_cast<uint64_t>(static_cast<uint32_t>(slot)) * pitch;
    copy_async(memory + key_to + row * kWidth, own_keys + from, true);
    copy_async(memory + value_to + row * kWidth, own_values + from, true);
  };
  auto fetch = [&](int turn) { // of this side's turns of stages
    constexpr int kBatch = kMost > 1 && kWidth == 64 ? 2 : 4; // which divides the rows of a thread
    const int *const from = slots + (kOne ? 0 : turn * kTile);
    if (!kOne) {
      const int thread = fresh_thread(), first = (thread / (kWarps * 32) * kSide + thread % kSide) / kChunks, to = thread % kChunks * 8;
      key_to = key_at<kWidth>(first, to), value_to = value_at<kWidth>(first + kTile, to);
    }
#pragma unroll 1
    for (int first = 0; first < kTile; first += kBatch * step) {
      int slot[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) slot[i] = from[copied + first + i * step];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (slot[i] >= 0) copy((side * kDepth + turn) * 2 * kTile + first + i * step, slot[i]);
    }
    commit_copies();
  };
  constexpr int kAhead = kDepth * kNext<kOne>; // from a tile to the one that is fetched when it has been folded
  // A page's number comes with the rows of the tile kAhead before: L1 answers in order, so a load would wait for all rows under way.
  int2 *const later = later_of + (kOne ? 0 : side * kDepth * kTile + mate);
  auto ask = [&](int turn, int s) { // for tile s + kAhead
    const unsigned row = (s + kAhead) * kTile + mate, column = row / static_cast<unsigned>(p.page);
    if (row < static_cast<unsigned>(prefix)) copy_word(&later[turn * kTile].x, pages + column);
    later[turn * kTile].y = static_cast<int>(row - column * p.page);
  };
  if (start != begin) look(row_from(start));
  if (mate < kDepth * kTile) slots[mate] = row_from(start) < prefix ? page * p.page + rest : -1;
  nodes.read(p, asked, line0, first_row, rows, prefix, pages);
  // Nodes have a stage of their own in long tables. In short ones they lie behind the prefix's rows in the stage of their tile, or
  // else in that of the odd one after it, which has no such rows, or else in that of the even one before it, once it is folded.
  const int before = max(0, prefix - tail * kTile);
  const bool beside = before + nodes.count() <= kTile;
  const int node0 = kOne ? beside ? (tail & 1) * 2 * kTile + before : (~tail & 1) * 2 * kTile : 2 * kDepth * 2 * kTile; // row of their first key
  const int end = nodes.end;
#pragma unroll 1
  for (int i = 0; i < kDepth; i++) {
    if (!kOne && mate < kTile) ask(i, start + i * kNext<kOne>);
    fetch(i);
  }
  const unsigned clusters = clusters_with<kOne>(oldest, end);
  if (!(clusters >> own & 1)) return; // nothing was copied
  auto has = [&](int rank, int side) { return first_tile<kOne>(own, rank, side, oldest) * kTile < end; };
  const bool live = has(lane % kRanks, 0) || has(lane % kRanks, 1); // whether a rank has a partial
  const unsigned live_ranks = __ballot_sync(kAll, live) & ((1u << kRanks) - 1);
  // vector i is rank i mod kUsed's, who gets it from all that have a part of it
  if (threadIdx.x == 0) open_inbox(&inbox, (vectors + kUsed - 1 - rank) / kUsed * __popc(live_ranks) * (kWidth + 2) * 4);
  if (kOne) cluster_arrive();
  const int lanes = (p.heads + 2 * p.groups) * kWidth;
  const bool some = live_ranks >> rank & 1, folds = start * kTile < end; // whether this block has a tile, and this side
  // the first tile past the prefix is written by who folds it
  const bool writes = blockIdx.y == 0 && mine(border), own_nodes = some && mine(tail) && tail * kTile < end;
  const bool late = kOne && own_nodes && !beside && (tail & 1); // then by the odd side, when the even one has folded its tile
  const int nodes_tile = border + ((border ^ side) & 1); // the only one of this side that nodes may be in, if it is this rank's
  const bool sees_nodes = own_nodes && mine(nodes_tile) && nodes_tile >= oldest && nodes_tile * kTile < end;
  // rows of the cache are older than the kernel before this one, which only projects
  const unsigned long long earlier = own_nodes ? nodes.wanted & ~nodes.present : 0;
  auto fetch_earlier = [&] { // seldom: a step of a draft
#pragma unroll 1
    for (int i = late ? mate : threadIdx.x; i < kTile * kChunks; i += late ? mates : threads) {
      const int node = i / kChunks, slot = nodes.slot_of[node];
      if (!(earlier >> node & 1ull) || slot < 0) continue;
      copy_async(memory + key_at<kWidth>(node0 + node, chunk), own_keys + static_cast<uint64_t>(slot) * pitch, true);
      copy_async(memory + value_at<kWidth>(node0 + kTile + node, chunk), own_values + static_cast<uint64_t>(slot) * pitch, true);
    }
    commit_copies();
  };
  if (earlier && !late) fetch_earlier();
  // 16 vectors: their rows, and of the half that this warp norms and turns for its side, if it does, all but the vectors
  const int g = lane >> 2, halves = part * kBlock + 8 / kShare < rows ? 2 : 1;
  uint4 *const queries = attention_memory + P::kQueries / sizeof(uint4) + (side * kMost + part) * 2 * Fold<kWidth>::kHalf;
  int row_of[2], upto[2], after[2];
  auto limit = [&] { // in long tables again each turn: registers that are kept are spilled, and come back behind all rows under way
#pragma unroll
    for (int h = 0; h < 2; h++) {
      row_of[h] = part * kBlock + (g + 8 * h) / kShare;
      upto[h] = row_of[h] < rows ? nodes.last_of[row_of[h]] : -1;
      after[h] = p.window ? upto[h] - p.window : -1;
    }
  };
  if (kOne) limit();
  const bool turns = folds && slice < halves;
  const int turned = g + 8 * (slice & 1), turned_row = part * kBlock + turned / kShare;
  const bf16 *from = p.projected + (line0 + first_row + turned_row) * lanes + (group * kShare + turned % kShare) * kWidth + (lane & 3) * 8;
  asm volatile("" : "+l"(from)); // an address before the wait
  Angles<kHalf> angles;
  NodeTurn<kWidth> node_turn;
  uint4 gain[kMany], q[kMany];
  if (turns) angles.load(p.cos_sin + static_cast<int64_t>(nodes.position_of[first_row + min(turned_row, rows - 1)]) * p.turned);
  if (own_nodes) node_turn.load(p, nodes);
#pragma unroll
  for (int i = 0; i < kMany; i++) // ones where there are none
    gain[i] = load_gains(p.q_gain, i * 32 + (lane & 3) * 8);
  wait_for_predecessor();
  launch_dependents();
#pragma unroll
  for (int i = 0; i < kMany; i++) q[i] = turns && turned_row < rows ? load_rows(from + i * 32) : make_uint4(0, 0, 0, 0);
  constexpr int kRead = 1, kKept = 2, kOwn = 3; // barriers: the even tile is read; nodes are kept; of a side
  if (late && side) meet_at(kRead, threads);
  if (own_nodes && (side || !late)) {
    if (earlier && late) fetch_earlier();
    keep_nodes<kWidth, kHalf>(p, nodes, node_turn, late ? threads / 2 : threads, memory, node0, line0, group, writes);
    if (earlier) wait_copies<0>();
    if (!sees_nodes) arrive_at(kKept, threads);
  }
  if (turns) {
    turn<kWidth, kHalf>(q, gain, p.q_gain != nullptr, angles, p.eps);
#pragma unroll
    for (int i = 0; i < kMany; i++) queries[slice * Fold<kWidth>::kHalf + i * 32 + lane] = q[i];
  }
  Fold<kWidth> fold;
  if (folds) {
    fold.begin();
    int stage = 0; // of this side's
#pragma unroll 1
    for (int s = start; s * kTile < end; s += kNext<kOne>) {
      wait_copies<kDepth - 1>();
      if (s >= border)
        meet_at(kKept, late ? threads / 2 : threads);
      else
        meet_at(kOwn + side, mates);
      if (!kOne && mate < kTile) {
        const int2 at = later[stage * kTile];
        slots[stage * kTile + mate] = (s + kAhead) * kTile + mate < prefix ? at.x * p.page + at.y : -1;
      }
      const int first = s * kTile + slice * kSlice, row0 = (side * kDepth + stage) * 2 * kTile + slice * kSlice;
      if (!kOne) tile_of[warp] = s, limit();
      const bool gathered = first + kSlice > prefix; // then each row by itself: paths differ
      const int row_begin = part * kBlock, row_end = gathered ? min(rows, row_begin + kBlock) : row_begin + (row_begin < rows);
#pragma unroll 1
      for (int r = row_begin; r < row_end; r++) {
        const int last = nodes.last_of[r];
        if (gathered && first > last) continue;
        const uint8_t *path = nodes.path[r];
        int sees[2];
#pragma unroll
        for (int h = 0; h < 2; h++) sees[h] = !gathered || row_of[h] == r ? upto[h] : -1;
        auto place_of = [&](int i) { return first + i < prefix ? row0 + i : node0 + path[min(first + i, last) - prefix]; };
        fold.slice(queries, memory, place_of, [&](int i) { return place_of(i) + kTile; }, first, after, sees, p.scale);
        bool lost = false; // a query that sees a broken node is lost, and only such a query
        if (gathered)
#pragma unroll 1
          for (int d = lane; d <= last - prefix; d += 32) lost |= nodes.broken[path[d]] != 0;
        if (__any_sync(kAll, lost)) {
#pragma unroll
          for (int h = 0; h < 2; h++)
            if (row_of[h] == r) fold.norm[h] = NAN;
        }
      }
      if (kOne) break;
      meet_at(kOwn + side, mates);
      s = *const_cast<volatile int *>(&tile_of[fresh_thread() >> 5]); // written between other barriers than it is read
      if (mate < kTile) ask(stage, s + kAhead);
      fetch(stage);
      stage ^= 1;
    }
  }
  if (late && !side) arrive_at(kRead, threads);
  if (some) {
    if (!kOne || own_nodes) { // what one side stores, the other may still read
      wait_copies<0>();
      __syncthreads();
    } else if (folds)
      meet_at(kOwn + side, mates);
    if (folds) fold.store(result + warp * kVectors * kWidth, top_of + warp * kVectors, norm_of + warp * kVectors, halves);
    __syncthreads();
  }
  if (!kOne) cluster_arrive(); // others may send
  bool waited = false; // until this block may
  // the block's partials, a warp a vector at a time
  const int column = lane * kMany;
  float *const sent = result + P::kInbox, *const sent_stats = sent + P::kReceived * kWidth; // [vectors / kUsed, kUsed], kWidth and 2 of each
  if (some) {
    const unsigned side_warps = (1u << kSlices) - 1, live_warps = (has(rank, 0) ? side_warps : 0) | (has(rank, 1) ? side_warps << kSlices : 0);
    const bool adds = live_warps >> lane % kWarps & 1;
#pragma unroll 1
    for (int v = warp; v < vectors; v += parts * kWarps) {
      const int at = v / kVectors * kWarps * kVectors + v % kVectors; // of its part's first warp
      float of_all[2] = {-INFINITY, 0.f};
      if (adds) of_all[0] = top_of[at + lane % kWarps * kVectors], of_all[1] = norm_of[at + lane % kWarps * kVectors];
      const Sum y = merge_partials<kWidth, kWarps>(of_all[0], of_all[1], live_warps, -INFINITY, [&](int w) {
        return *reinterpret_cast<const Sum *>(result + sum_at<kWidth>(at + w * kVectors, column & ~7) + (column & 7));
      });
      if (!waited) cluster_wait(), waited = true;
      const int to = v / kUsed * kUsed + rank;
      send(sent + to * kWidth + column, &inbox, v % kUsed, y.v);
      if (lane == 0) send(sent_stats + to * 2, &inbox, v % kUsed, of_all);
    }
  }
  if (!waited) cluster_wait();
  // the cluster's
  const int v = rank + kUsed * warp;
  if (v >= vectors) return;
  wait_inbox(&inbox);
  const float *const got = sent + warp * kUsed * kWidth + column, *const got_stats = sent_stats + (warp * kUsed + lane % kRanks) * 2;
  float top = live ? got_stats[0] : -INFINITY, norm = live ? got_stats[1] : 0.f;
  const Sum y = merge_partials<kWidth, kRanks>(top, norm, live_ranks, -INFINITY, [&](int c) { return *reinterpret_cast<const Sum *>(got + c * kWidth); });
  merge_clusters<kWidth, kOne>(p, y, top, norm, clusters, own, QueryVector{b, group, first_row + v / kShare, v % kShare, v, parts * kVectors});
}

template <int kWidth, int kShare, int kHalf>
inline cudaError_t launch_attend(const Attention &p, int batch, cudaStream_t stream) {
  auto grid = [&](int ranks, int clusters, int parts) {
    const int rows = parts * kVectors / kShare;
    return dim3(ranks * p.groups, (p.t + rows - 1) / rows, batch * clusters);
  };
  auto one_cluster = [&](auto kernel, int ranks, size_t shared) { return launch(kernel, grid(ranks, 1, 1), kWarps * 32, shared, stream, ranks, p); };
  const int positions = p.columns * p.page; // of short tables less shared memory: more fits beside it
  if (short_table(positions, kFewer)) return one_cluster(attend<kWidth, kShare, kHalf, 1, kFewer>, kFewer, Stages<kWidth, 1, kFewer>::kBytes);
  if (short_table(positions, kRanks)) return one_cluster(attend<kWidth, kShare, kHalf, 1, kRanks>, kRanks, Stages<kWidth, 1, kRanks>::kBytes);
  if (!p.sums) return cudaErrorInvalidValue;
  const int parts = p.t * kShare > kVectors ? kParts : 1;
  return launch(attend<kWidth, kShare, kHalf, kParts, kRanks>, grid(kRanks, kClusters, parts), parts * kWarps * 32, Stages<kWidth, kParts, kRanks>::kBytes,
                stream, kRanks, p);
}

template <int kWidth, int kHalf>
inline cudaError_t attend_heads(const Attention &p, int batch, cudaStream_t stream) {
  switch (p.heads / p.groups) {
  case 1: return launch_attend<kWidth, 1, kHalf>(p, batch, stream);
  case 2: return launch_attend<kWidth, 2, kHalf>(p, batch, stream);
  case 4: return launch_attend<kWidth, 4, kHalf>(p, batch, stream);
  case 8: return launch_attend<kWidth, 8, kHalf>(p, batch, stream);
  default: return cudaErrorInvalidValue;
  }
}

inline cudaError_t attention(const Attention &p, int width, int batch, cudaStream_t stream) {
  if (p.t > kTile) return cudaErrorInvalidValue;
  switch (width * 1000 + p.turned) {
  case 64064: return attend_heads<64, 1>(p, batch, stream);
  case 128064: return attend_heads<128, 1>(p, batch, stream);
  case 128128: return attend_heads<128, 2>(p, batch, stream);
  default: return cudaErrorInvalidValue;
  }
}

} // namespace eagle3
