// A GQA layer's attention over few rows, after the projection: head norms, RoPE, cache write, attention under the one law
// (kernels/attention.py), merge.
//
// Positions come in tiles of 64, counted from 0. Runs of 16 tiles are dealt to 3 clusters in turn, the tiles of a run to the 8
// ranks of its cluster, the 16 positions from 16 w of a tile to warp w. A warp folds its positions in ascending order; the
// partials of warps, then of ranks, then of clusters are merged in ascending order. All of that follows from a query's own
// position, so neither the rows beside it nor the shape of its tree nor the size of the launch change a bit: whoever has no
// position of a query adds nothing to it, and may as well be missing.
// A position below the prefix is that row of the cache. One past it is the node of the query's own path at that depth: a row
// of this pass where one has that index, else a row that an earlier pass over the same tree left in the cache.
#pragma once

#include "cluster.cuh"
#include "common.cuh"
#include "fold.cuh"
#include "nodes.cuh"

namespace eagle3 {

constexpr int kRanks = 8; // of a cluster
constexpr int kRun = 2 * kRanks, kClusters = 3; // tiles of a run: 1,024 positions need one cluster
// three clusters of 4 groups of heads fit at once, a block a multiprocessor; of 16, an H200 takes 15
constexpr int kParts = 2; // groups of kVectors that a block of a long context may hold: its keys serve them all

// Whether tables of that many positions are one cluster's: of their tiles and of one that unwritten rows may reach.
inline bool short_table(int positions) { return positions + kTile <= kRun * kTile; }

// The first tile of a cluster and rank that is not older than tile `oldest`, and the one after tile s. kOne: short tables, whose
// tiles are one run.
template <bool kOne>
__device__ __forceinline__ int next_tile(int s) {
  return s + (!kOne && s & kRanks ? (kClusters - 1) * kRun + kRanks : kRanks);
}
template <bool kOne>
__device__ __forceinline__ int first_tile(int cluster, int rank, int oldest) {
  int s = (kOne ? 0 : oldest / (kRun * kClusters) * (kRun * kClusters) + cluster * kRun) + rank;
  while (s < oldest) s = next_tile<kOne>(s);
  return s;
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

// Where a block's partials lie in shared memory: over the stages, when they have been read, and the inbox behind them. Blocks of
// short contexts have their inbox behind the stages too: there others may send before this block has read its last tile.
template <int kWidth, int kStages, int kMost>
struct Stages {
  static constexpr int kVectorsHeld = kMost * kVectors, kStage = 2 * kTile * kWidth; // elements of a stage
  static constexpr int kResult = kMost * kWarps * kVectors * kWidth, kStats = 2 * kMost * kWarps * kVectors; // floats
  static constexpr int kInbox = kMost == 1 ? kStages * kStage / 2 : kResult + kStats;
  static constexpr size_t kBytes = (static_cast<size_t>(kStages) * kStage + (kMost == 1 ? kVectorsHeld * (kWidth + 2) * 2 : 0)) * sizeof(bf16);
  static_assert((kInbox + kVectorsHeld * (kWidth + 2)) * sizeof(float) <= kBytes && kResult + kStats <= kStages * kStage / 2, "all fits");
};

// Cluster x / 8: group of heads; y: tile of rows; z: sequence and, where there are several, a cluster of tiles. kShare heads a
// group; kHalf: see turn; kStages tiles of positions in flight, one less where nodes need room. Warps 4 i … 4 i + 3 hold part i.
template <int kWidth, int kShare, int kHalf, int kStages, int kMost>
__global__ void __launch_bounds__(kMost *kWarps * 32) attend(Attention p) {
  constexpr int kBlock = kVectors / kShare, kMany = kWidth / 32, kChunks = kWidth / 8; // kBlock: rows of a part
  constexpr bool kOne = kMost == 1;
  using P = Stages<kWidth, kStages, kMost>;
  using Sum = Columns<kWidth>;
  extern __shared__ uint4 attention_memory[]; // [kStages] of kTile keys, then kTile values
  __shared__ Nodes<kMost * kBlock> nodes;
  __shared__ int slots[kStages * kTile]; // of the rows below the prefix of tiles that are to be fetched; -1: there is none
  __shared__ uint64_t inbox;
  bf16 *const memory = reinterpret_cast<bf16 *>(attention_memory);
  float *const result = reinterpret_cast<float *>(attention_memory), *const top_of = result + P::kResult, *const norm_of = top_of + P::kStats / 2;
  const int threads = kOne ? kWarps * 32 : blockDim.x, parts = threads / (kWarps * 32);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = warp / kWarps, slice = warp % kWarps;
  const int rank = cluster_rank(), group = blockIdx.x / kRanks, batch = kOne ? gridDim.z : gridDim.z / kClusters;
  const int own = kOne ? 0 : blockIdx.z / batch, b = blockIdx.z - own * batch; // own: cluster of tiles
  const int first_row = blockIdx.y * parts * kBlock, rows = min(parts * kBlock, p.t - first_row), vectors = rows * kShare;
  const int64_t line0 = static_cast<int64_t>(b) * p.t;
  const int prefix = static_cast<int>(load_long(p.prefix + b));
  const int *const pages = p.pages + static_cast<int64_t>(b) * p.table;
  const auto asked = nodes.ask(p, line0, first_row, rows);
  // of a row of a tile: its page and its place there; slots are below 2^31, as no GPU's memory holds more
  auto look = [&](int row, int &page, int &rest) {
    const unsigned column = static_cast<unsigned>(row) / static_cast<unsigned>(p.page);
    page = column < static_cast<unsigned>(p.columns) ? pages[column] : 0;
    rest = row - static_cast<int>(column) * p.page;
  };
  auto row_at = [&](int s, int i) { // row i of tile s and of those after it
    for (int n = i / kTile; n; n--) s = next_tile<kOne>(s);
    return s * kTile + i % kTile;
  };
  constexpr int kLooks = (kStages * kTile + kWarps * 32 - 1) / (kWarps * 32);
  int looked[kLooks][2]; // before the prefix is known: most often no window moves the first tile
  const int begin = first_tile<kOne>(own, rank, 0);
#pragma unroll
  for (int j = 0; j < kLooks; j++) look(row_at(begin, threadIdx.x + j * threads), looked[j][0], looked[j][1]);
  // no row of the block sees an older tile
  const int oldest = p.window ? max(0, prefix + (p.tree ? 0 : first_row) - p.window + 1) / kTile : 0;
  if (!(clusters_with<kOne>(oldest, prefix + kTile) >> own & 1)) return; // whatever the tree, no tile is this cluster's
  const int start = first_tile<kOne>(own, rank, oldest), border = prefix / kTile; // the tile that the prefix ends in, and the first node's
  auto mine = [&](int s) { return (kOne || s / kRun % kClusters == own) && s % kRanks == rank; };
  const int tail = border + !mine(border); // the only one of this rank that nodes may be in, if it is this rank's
  // a thread copies its 16 bytes of every `step` rows (a multiple of 8: their places differ by rows alone)
  const int copied = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks * 8, step = threads / kChunks;
  const char *own_keys = reinterpret_cast<const char *>(p.keys + group * kWidth + chunk);
  const char *own_values = reinterpret_cast<const char *>(p.values + group * kWidth + chunk);
  int key_to = key_at<kWidth>(copied, chunk), value_to = value_at<kWidth>(copied + kTile, chunk);
  uint32_t pitch = p.groups * kWidth * sizeof(bf16);
  asm volatile("" : "+l"(own_keys), "+l"(own_values), "+r"(key_to), "+r"(value_to), "+r"(pitch)); // or each copy computes them anew
  auto copy = [&](int row, int slot) { // row: of keys, so many past this thread's first; of values a tile further
    const uint64_t from = static_cast<uint64_t>(static_cast<uint32_t>(slot)) * pitch;
    copy_async(memory + key_to + row * kWidth, own_keys + from, true);
    copy_async(memory + value_to + row * kWidth, own_values + from, true);
  };
  auto fetch = [&](const int *from, int place) {
    constexpr int kBatch = kMost > 1 && kWidth == 64 ? 2 : 4; // which divides the rows of a thread
#pragma unroll 1
    for (int first = 0; first < kTile; first += kBatch * step) {
      int slot[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) slot[i] = from[copied + first + i * step];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (slot[i] >= 0) copy(place * 2 * kTile + first + i * step, slot[i]);
    }
    commit_copies();
  };
  int ahead = start; // the tile that is fetched next
#pragma unroll
  for (int j = 0; j < kLooks; j++) {
    const int i = threadIdx.x + j * threads, row = row_at(start, i);
    if (start != begin) look(row, looked[j][0], looked[j][1]);
    if (i < kStages * kTile) slots[i] = row < prefix ? looked[j][0] * p.page + looked[j][1] : -1;
  }
  nodes.read(p, asked, line0, first_row, rows, prefix, pages);
  // the nodes lie behind the prefix's rows in the stage of that tile, if it is one of the first and they fit, or in the last stage
  int turns = 0;
  for (int s = start; s < tail && turns < kStages; s = next_tile<kOne>(s)) turns++;
  const int before = max(0, prefix - tail * kTile);
  const bool beside = turns < kStages && before + nodes.count() <= kTile;
  const int node0 = beside ? turns * 2 * kTile + before : (kStages - 1) * 2 * kTile; // row of the memory where their keys begin
  const int held = kStages - (mine(tail) && !beside), end = nodes.end;
#pragma unroll 1
  for (int i = 0; i < held; i++, ahead = next_tile<kOne>(ahead)) fetch(slots + i * kTile, i);
  const unsigned clusters = clusters_with<kOne>(oldest, end);
  if (!(clusters >> own & 1)) return; // nothing was copied
  const bool live = first_tile<kOne>(own, lane % kRanks, oldest) * kTile < end; // whether a rank has a partial
  const unsigned live_ranks = __ballot_sync(kAll, live) & ((1u << kRanks) - 1);
  // vector i is rank i mod 8's, who gets it from all that have a part of it
  if (threadIdx.x == 0) open_inbox(&inbox, (vectors + kRanks - 1 - rank) / kRanks * __popc(live_ranks) * (kWidth + 2) * 4);
  if (kOne) cluster_arrive();
  const int lanes = (p.heads + 2 * p.groups) * kWidth;
  const bool folds = start * kTile < end;
  // the first tile past the prefix is written by who folds it
  const bool writes = blockIdx.y == 0 && mine(border), own_nodes = folds && mine(tail) && tail * kTile < end;
  // rows of the cache are older than the kernel before this one, which only projects
  const unsigned long long earlier = own_nodes ? nodes.wanted & ~nodes.present : 0;
  if (earlier) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kTile * kChunks; i += threads) { // seldom: a step of a draft
      const int node = i / kChunks, slot = nodes.slot_of[node];
      if (!(earlier >> node & 1ull) || slot < 0) continue;
      copy_async(memory + key_at<kWidth>(node0 + node, chunk), own_keys + static_cast<uint64_t>(slot) * pitch, true);
      copy_async(memory + value_at<kWidth>(node0 + kTile + node, chunk), own_values + static_cast<uint64_t>(slot) * pitch, true);
    }
    commit_copies();
  }
  // a warp's 16 vectors
  const int g = lane >> 2;
  int row_of[2], upto[2], after[2];
  Fold<kWidth> fold;
  Angles<kHalf> angles[2];
  uint4 gain[kMany];
  const bf16 *from[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    row_of[h] = part * kBlock + (g + 8 * h) / kShare;
    upto[h] = row_of[h] < rows ? nodes.last_of[row_of[h]] : -1;
    after[h] = p.window ? upto[h] - p.window : -1;
    if (folds) angles[h].load(p.cos_sin + static_cast<int64_t>(nodes.position_of[first_row + min(row_of[h], rows - 1)]) * p.turned);
    from[h] = p.projected + (line0 + first_row + row_of[h]) * lanes + (group * kShare + (g + 8 * h) % kShare) * kWidth + (lane & 3) * 8;
    asm volatile("" : "+l"(from[h])); // an address before the wait
  }
#pragma unroll
  for (int i = 0; i < kMany; i++) // ones where there are none
    gain[i] = p.q_gain ? load_weights(p.q_gain + i * 32 + (lane & 3) * 8) : make_uint4(0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u);
  int page = 0, rest = 0; // of a row of the tile ahead
  if (threadIdx.x < kTile) look(ahead * kTile + threadIdx.x, page, rest);
  wait_for_predecessor();
  launch_dependents();
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < kMany; i++) fold.q[h][i] = folds && row_of[h] < rows ? load_rows(from[h] + i * 32) : make_uint4(0, 0, 0, 0);
  if (own_nodes) keep_nodes<kWidth, kHalf>(p, nodes, memory, node0, line0, group, writes);
  if (folds) {
    fold.begin();
#pragma unroll 1
    for (int left = part * kBlock + 8 / kShare < rows ? 2 : 1, halves = left; left; left--) { // one code for both: half 1 takes half 0's place
      turn<kWidth, kHalf>(fold.q[0], gain, p.q_gain != nullptr, angles[0], p.eps);
      if (halves == 1) break;
      angles[0] = angles[1];
#pragma unroll
      for (int i = 0; i < kMany; i++) {
        const uint4 v = fold.q[0][i];
        fold.q[0][i] = fold.q[1][i], fold.q[1][i] = v;
      }
    }
    int place = 0;
#pragma unroll 1
    for (int s = start; s * kTile < end; s = next_tile<kOne>(s)) {
      if (earlier && s == start)
        wait_copies<0>();
      else if (held == kStages)
        wait_copies<kStages - 1>();
      else
        wait_copies<kStages - 2>();
      __syncthreads();
      if (threadIdx.x < kTile) slots[threadIdx.x] = ahead * kTile + static_cast<int>(threadIdx.x) < prefix ? page * p.page + rest : -1;
      const int first = s * kTile + slice * kSlice, row0 = place * 2 * kTile + slice * kSlice;
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
        fold.slice(memory, place_of, [&](int i) { return place_of(i) + kTile; }, first, after, sees, p.scale);
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
      __syncthreads();
      fetch(slots, place);
      ahead = next_tile<kOne>(ahead);
      if (threadIdx.x < kTile) look(ahead * kTile + threadIdx.x, page, rest); // there by the next tile's end
      place = place + 1 == held ? 0 : place + 1;
    }
    wait_copies<0>();
    __syncthreads();
    fold.store(result + warp * kVectors * kWidth, top_of + warp * kVectors, norm_of + warp * kVectors);
    __syncthreads();
  }
  if (!kOne) cluster_arrive(); // others may send
  bool waited = false; // until this block may
  // the block's partials, a warp a vector at a time
  const int column = lane * kMany;
  float *const sent = result + P::kInbox, *const sent_stats = sent + P::kVectorsHeld * kWidth; // [vectors / 8, kRanks], kWidth and 2 of each
  if (folds) {
#pragma unroll 1
    for (int v = warp; v < vectors; v += parts * kWarps) {
      const int at = v / kVectors * kWarps * kVectors + v % kVectors; // of its part's first warp
      float of_all[2] = {top_of[at + lane % kWarps * kVectors], norm_of[at + lane % kWarps * kVectors]};
      const Sum y = merge_partials<kWidth, kWarps>(of_all[0], of_all[1], (1u << kWarps) - 1, -INFINITY, [&](int w) {
        return *reinterpret_cast<const Sum *>(result + sum_at<kWidth>(at + w * kVectors, column & ~7) + (column & 7));
      });
      if (!waited) cluster_wait(), waited = true;
      const int to = v / kRanks * kRanks + rank;
      send(sent + to * kWidth + column, &inbox, v % kRanks, y.v);
      if (lane == 0) send(sent_stats + to * 2, &inbox, v % kRanks, of_all);
    }
  }
  if (!waited) cluster_wait();
  // the cluster's
  const int v = rank + kRanks * warp;
  if (v >= vectors) return;
  wait_inbox(&inbox);
  const float *const got = sent + warp * kRanks * kWidth + column, *const got_stats = sent_stats + (warp * kRanks + lane % kRanks) * 2;
  float top = live ? got_stats[0] : -INFINITY, norm = live ? got_stats[1] : 0.f;
  const Sum y = merge_partials<kWidth, kRanks>(top, norm, live_ranks, -INFINITY, [&](int c) { return *reinterpret_cast<const Sum *>(got + c * kWidth); });
  merge_clusters<kWidth, kOne>(p, y, top, norm, clusters, own, QueryVector{b, group, first_row + v / kShare, v % kShare, v, parts * kVectors});
}

template <int kWidth, int kShare, int kHalf>
inline cudaError_t launch_attend(const Attention &p, int batch, cudaStream_t stream) {
  auto grid = [&](int clusters, int parts) {
    const int rows = parts * kVectors / kShare;
    return dim3(kRanks * p.groups, (p.t + rows - 1) / rows, batch * clusters);
  };
  if (short_table(p.columns * p.page)) // less shared memory: more fits beside it
    return launch(attend<kWidth, kShare, kHalf, 2, 1>, grid(1, 1), kWarps * 32, Stages<kWidth, 2, 1>::kBytes, stream, kRanks, p);
  if (!p.sums) return cudaErrorInvalidValue;
  const int parts = p.t * kShare > kVectors ? kParts : 1;
  const size_t shared = Stages<kWidth, 3, kParts>::kBytes;
  return launch(attend<kWidth, kShare, kHalf, 3, kParts>, grid(kClusters, parts), parts * kWarps * 32, shared, stream, kRanks, p);
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
