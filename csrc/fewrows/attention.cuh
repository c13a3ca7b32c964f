// A GQA layer's attention over few rows, after the projection: head norms, RoPE, cache write, attention under the one law
// (kernels/attention.py), merge.
//
// Positions come in tiles of 64, counted from 0; tile s belongs to rank s mod 8 of a cluster, and the 16 positions from 16 w
// of a tile to warp w. A warp folds its positions in ascending order; the partials of ranks and warps are merged in ascending
// order. All of that follows from a query's own position, so neither the rows beside it nor the shape of its tree change a bit.
// A position below the prefix is that row of the cache. One past it is the node of the query's own path at that depth: a row
// of this pass where one has that index, else a row that an earlier pass over the same tree left in the cache.
#pragma once

#include <cooperative_groups.h>

#include "common.cuh"

namespace eagle3 {

constexpr int kTile = 64, kRanks = 8, kWarps = 4, kSlice = kTile / kWarps, kVectors = 16; // of a block: rows times heads
constexpr int kShort = 2 * kRanks * kTile; // positions of a table that need no second tile in flight

struct Attention {
  const bf16 *projected;    // [B * T, (heads + 2 * groups) * Dh]
  const bf16 *q_gain;       // [Dh] or null, and so is k_gain
  const bf16 *k_gain;
  const float *cos_sin;     // [L, turned]
  const int64_t *positions; // [B, T] of RoPE
  const int64_t *index;     // [B, T] rows written
  const int *pages;         // [B, table]
  const int64_t *prefix;    // [B]
  const int64_t *tree;      // [B, T] ancestor bits or null
  const bf16 *sinks;        // [heads] or null
  bf16 *keys;               // [slots, groups, Dh]
  bf16 *values;
  bf16 *y;                  // [B * T, heads * Dh]
  float eps, scale;         // scale: of the softmax, times log2(e)
  int t, heads, groups, turned, columns, table, page, window;
};

// What a block keeps in shared memory: stages of keys and values, those of up to 64 nodes past the prefix, queries.
template <int kWidth>
struct Plane {
  static constexpr int kKey = kWidth + 32, kValue = kWidth + 8; // strides that keep 16-byte reads off each other's banks
  static constexpr size_t kStage = static_cast<size_t>(kTile) * (kKey + kValue);
  static size_t bytes(int stages) {
    const size_t out = static_cast<size_t>(kTile) * kWidth * 4, stage = stages * kStage * 2;
    return (stage > out ? stage : out) + static_cast<size_t>(kTile) * (kKey + kValue) * 2 + static_cast<size_t>(kVectors) * kKey * 2;
  }
};

// Head vectors that a warp norms and turns at a time: their loads are all in flight before the first is used.
constexpr int kTogether = 4;

// Cosines then sines of one position, as the lanes need them: columns j * 32 + lane.
template <int kWidth>
__device__ __forceinline__ void load_angles(float (&angle)[kWidth / 32], const Attention &p, int64_t line) {
  const float *from = p.cos_sin + load_long(p.positions + line) * p.turned + (threadIdx.x & 31);
#pragma unroll
  for (int j = 0; j < kWidth / 32; j++) angle[j] = j * 32 < p.turned ? from[j * 32] : 0.f;
}

// Norm and RoPE of one head vector in registers: a lane holds columns j * 32 + lane, of which the first 2 * kHalf * 32 turn.
template <int kWidth, int kHalf>
__device__ __forceinline__ void turn(float (&v)[kWidth / 32], const float (&gain)[kWidth / 32], bool normed,
                                     const float (&angle)[kWidth / 32], float eps) {
  if (normed) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kWidth / 32; j++) sum = fmaf(v[j], v[j], sum);
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(kAll, sum, o);
    const float scale = rsqrtf(sum * (1.f / kWidth) + eps);
#pragma unroll
    for (int j = 0; j < kWidth / 32; j++) v[j] = rounded(v[j] * scale * gain[j]);
  }
#pragma unroll
  for (int j = 0; j < kHalf; j++) {
    const float a = v[j], b = v[j + kHalf];
    v[j] = rounded(a * angle[j] - b * angle[j + kHalf]);
    v[j + kHalf] = rounded(b * angle[j] + a * angle[j + kHalf]);
  }
}

// The block's 16 query vectors (rows of the pass times heads of the group) and what this warp's positions gave them.
template <int kWidth>
struct Fold {
  uint4 q[kWidth / 32][2];
  float4 out[kWidth / 8];
  float top[2], norm[2];

  __device__ __forceinline__ void begin(const bf16 *queries) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < kWidth / 32; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        q[i][h] = *reinterpret_cast<const uint4 *>(queries + (g + 8 * h) * Plane<kWidth>::kKey + i * 32 + t * 8);
#pragma unroll
    for (int i = 0; i < kWidth / 8; i++) out[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    top[0] = top[1] = -INFINITY;
    norm[0] = norm[1] = 0.f;
  }

  // The warp's 16 positions of a tile, from `first`: key(i), value(i) are where position first + i lies in shared memory. Half
  // h of the vectors (rows g and g + 8) sees positions in (after[h], upto[h]].
  template <class Key, class Value>
  __device__ __forceinline__ void slice(Key key, Value value, int first, const int (&after)[2], const int (&upto)[2], float scale) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float4 s[2];
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const bf16 *k = key(n * 8 + g) + t * 8;
      s[n] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int i = 0; i < kWidth / 32; i++) mma_piece(s[n], q[i][0], q[i][1], *reinterpret_cast<const uint4 *>(k + i * 32));
      const int at = first + n * 8 + 2 * t;
      s[n].x = at > after[0] && at <= upto[0] ? s[n].x * scale : -INFINITY;
      s[n].y = at + 1 > after[0] && at + 1 <= upto[0] ? s[n].y * scale : -INFINITY;
      s[n].z = at > after[1] && at <= upto[1] ? s[n].z * scale : -INFINITY;
      s[n].w = at + 1 > after[1] && at + 1 <= upto[1] ? s[n].w * scale : -INFINITY;
      most[0] = fmaxf(most[0], fmaxf(s[n].x, s[n].y));
      most[1] = fmaxf(most[1], fmaxf(s[n].z, s[n].w));
    }
    float base[2], keep[2], sum[2] = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      most[h] = fmaxf(most[h], __shfl_xor_sync(kAll, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(kAll, most[h], 2));
      const float now = fmaxf(top[h], most[h]);
      base[h] = now == -INFINITY ? 0.f : now;
      keep[h] = exp2f(top[h] - base[h]);
      top[h] = now;
    }
    uint32_t weight[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float a = exp2f(s[n].x - base[0]), b = exp2f(s[n].y - base[0]);
      const float c = exp2f(s[n].z - base[1]), d = exp2f(s[n].w - base[1]);
      sum[0] += a + b;
      sum[1] += c + d;
      weight[n][0] = pack(a, b);
      weight[n][1] = pack(c, d);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(kAll, sum[h], 1);
      sum[h] += __shfl_xor_sync(kAll, sum[h], 2);
      norm[h] = fmaf(norm[h], keep[h], sum[h]);
    }
    const uint32_t v = static_cast<uint32_t>(__cvta_generic_to_shared(value((lane >> 3 & 1) * 8 + (lane & 7)) + (lane >> 4) * 8));
#pragma unroll
    for (int i = 0; i < kWidth / 16; i++) {
      uint32_t r[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(v + i * 32)
                   : "memory");
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float4 &o = out[2 * i + j];
        o.x *= keep[0], o.y *= keep[0], o.z *= keep[1], o.w *= keep[1];
        mma(o, weight[0][0], weight[0][1], weight[1][0], weight[1][1], r[2 * j], r[2 * j + 1]);
      }
    }
  }
};

// Cluster (x / 8 = group of heads, y = tile of 16 / kShare rows, z = sequence). kShare heads a group; kHalf: see turn;
// kStages tiles of positions in flight: bits do not hang on them.
template <int kWidth, int kShare, int kHalf, int kStages>
__global__ void __launch_bounds__(kWarps * 32) attend(Attention p) {
  using P = Plane<kWidth>;
  constexpr int kBlock = kVectors / kShare, kMany = kWidth / 32;
  extern __shared__ uint4 attention_memory[];
  __shared__ float top_of[kTile], norm_of[kTile];
  __shared__ uint8_t path[kBlock][kTile]; // node at each depth
  __shared__ int last_of[kBlock];
  __shared__ int64_t slot_of[kTile]; // of the cache, for each node; -1: there is none
  __shared__ int node_of[kTile];     // of each row of the pass, -1: padding
  __shared__ unsigned long long wanted, present; // nodes on some path of the block; nodes that are rows of the pass
  __shared__ uint8_t broken[kTile]; // nodes whose key or value is not finite
  bf16 *stage = reinterpret_cast<bf16 *>(attention_memory);
  float *result = reinterpret_cast<float *>(attention_memory); // over the stages, when they have been read
  const size_t held = kStages * P::kStage * 2 > static_cast<size_t>(kTile) * kWidth * 4 ? kStages * P::kStage : static_cast<size_t>(kTile) * kWidth * 2;
  bf16 *node_keys = stage + held, *node_values = node_keys + static_cast<size_t>(kTile) * P::kKey;
  bf16 *queries = node_values + static_cast<size_t>(kTile) * P::kValue;
  namespace cg = cooperative_groups;
  cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), group = blockIdx.x / kRanks, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first_row = blockIdx.y * kBlock, b = blockIdx.z, rows = min(kBlock, p.t - first_row);
  const int64_t line0 = static_cast<int64_t>(b) * p.t;
  const int prefix = static_cast<int>(load_long(p.prefix + b));
  const int *pages = p.pages + static_cast<int64_t>(b) * p.table;
  int start = rank;
  if (p.window) {
    const int oldest = max(0, prefix + (p.tree ? 0 : first_row) - p.window + 1) / kTile; // no row of the block sees an older tile
    start += (oldest - start + kRanks - 1 > 0 ? (oldest - start + kRanks - 1) / kRanks : 0) * kRanks;
  }
  auto fetch = [&](int s, int place) {
    if (s * kTile < prefix) {
      bf16 *k = stage + place * P::kStage, *v = k + kTile * P::kKey;
      const int count = min(kTile, prefix - s * kTile);
#pragma unroll 1
      for (int i = threadIdx.x; i < count * (kWidth / 8); i += kWarps * 32) {
        const int r = i / (kWidth / 8), c = i % (kWidth / 8) * 8;
        const unsigned row = s * kTile + r, page = row / static_cast<unsigned>(p.page);
        const int64_t slot = static_cast<int64_t>(pages[page]) * p.page + (row - page * p.page);
        const size_t from = (static_cast<size_t>(slot) * p.groups + group) * kWidth + c;
        copy_async(k + r * P::kKey + c, p.keys + from, true);
        copy_async(v + r * P::kValue + c, p.values + from, true);
      }
    }
    commit_copies();
  };
  const bool writes = rank == 0 && blockIdx.y == 0;
  if (threadIdx.x == 0) wanted = present = 0;
  __syncthreads();
  if (threadIdx.x < kTile) {
    const unsigned row = prefix + threadIdx.x, page = row / static_cast<unsigned>(p.page);
    const bool inside = page < static_cast<unsigned>(p.columns);
    slot_of[threadIdx.x] = inside ? static_cast<int64_t>(pages[page]) * p.page + (row - page * p.page) : -1;
    broken[threadIdx.x] = 0;
    if (static_cast<int>(threadIdx.x) < p.t) {
      const int64_t node = load_long(p.index + line0 + threadIdx.x) - prefix; // below zero: padding
      node_of[threadIdx.x] = node >= 0 && node < kTile ? static_cast<int>(node) : -1;
      if (node >= 0 && node < kTile) atomicOr(&present, 1ull << node);
    }
  }
  for (int r = warp; r < rows; r += kWarps) {
    const uint64_t bits = p.tree ? static_cast<uint64_t>(load_long(p.tree + line0 + first_row + r)) : (2ull << (first_row + r)) - 1ull;
    const uint64_t below = (1ull << lane) - 1ull;
    if (bits >> lane & 1ull) path[r][__popcll(bits & below)] = static_cast<uint8_t>(lane);
    if (bits >> (lane + 32) & 1ull) path[r][__popcll(bits & ((below << 32) | 0xffffffffull))] = static_cast<uint8_t>(lane + 32);
    if (lane == 0) last_of[r] = prefix + __popcll(bits) - 1, atomicOr(&wanted, static_cast<unsigned long long>(bits));
  }
  __syncthreads();
  int end = prefix; // past the last position that a query of the block sees
  for (int r = 0; r < rows; r++) end = max(end, last_of[r] + 1);
  const int lanes = (p.heads + 2 * p.groups) * kWidth;
  // does this block fold a tile that reaches past the prefix? The first of them is the tile of the prefix itself
  bool own_nodes = writes;
  for (int s = prefix / kTile; s * kTile < end; s++) own_nodes |= s % kRanks == rank;
  // rows of the cache are older than the kernel before this one, which only projects
  const unsigned long long earlier = own_nodes ? wanted & ~present : 0;
  if (earlier) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kTile * (kWidth / 8); i += kWarps * 32) {
      const int node = i / (kWidth / 8), c = i % (kWidth / 8) * 8;
      if (!(earlier >> node & 1ull) || slot_of[node] < 0) continue;
      const size_t from = (static_cast<size_t>(slot_of[node]) * p.groups + group) * kWidth + c;
      copy_async(node_keys + node * P::kKey + c, p.keys + from, true);
      copy_async(node_values + node * P::kValue + c, p.values + from, true);
    }
  }
#pragma unroll 1
  for (int i = 0; i < kStages; i++) fetch(start + i * kRanks, i); // the first one's group holds the nodes too
  // a warp's jobs: keys of the pass's nodes (where they are needed), then queries
  const int node_jobs = own_nodes ? p.t : 0, jobs = node_jobs + rows * kShare;
  auto line_of = [&](int job) { return job < node_jobs ? line0 + job : line0 + first_row + (job - node_jobs) / kShare; };
  float q_gain[kMany], k_gain[kMany];
#pragma unroll
  for (int j = 0; j < kMany; j++) {
    q_gain[j] = p.q_gain ? __bfloat162float(p.q_gain[j * 32 + lane]) : 1.f;
    k_gain[j] = p.k_gain ? __bfloat162float(p.k_gain[j * 32 + lane]) : 1.f;
  }
#pragma unroll 1
  for (int first_job = warp; first_job - warp < jobs; first_job += kTogether * kWarps) {
    float v[kTogether][kMany], angle[kTogether][kMany];
#pragma unroll
    for (int i = 0; i < kTogether; i++) // positions are older than the kernel before this one
      if (first_job + i * kWarps < jobs) load_angles<kWidth>(angle[i], p, line_of(first_job + i * kWarps));
    if (first_job == warp) {
      wait_for_predecessor();
      launch_dependents();
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int job = first_job + i * kWarps;
      if (job >= jobs) continue;
      const int head = job < node_jobs ? p.heads + group : group * kShare + (job - node_jobs) % kShare;
      const bf16 *from = p.projected + line_of(job) * lanes + head * kWidth + lane;
#pragma unroll
      for (int j = 0; j < kMany; j++) v[i][j] = load_bf16(from + j * 32);
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int job = first_job + i * kWarps;
      if (job >= jobs) continue;
      const bool key = job < node_jobs;
      float gain[kMany];
#pragma unroll
      for (int j = 0; j < kMany; j++) gain[j] = key ? k_gain[j] : q_gain[j];
      turn<kWidth, kHalf>(v[i], gain, (key ? p.k_gain : p.q_gain) != nullptr, angle[i], p.eps);
      const int node = key ? node_of[job] : 0;
      if (node < 0) continue;
      const int64_t slot = key && writes ? slot_of[node] : -1;
      bf16 *to = (key ? node_keys + static_cast<size_t>(node) * P::kKey : queries + static_cast<size_t>(job - node_jobs) * P::kKey) + lane;
      bf16 *row = p.keys + (static_cast<size_t>(slot) * p.groups + group) * kWidth + lane;
#pragma unroll
      for (int j = 0; j < kMany; j++) {
        if (slot >= 0) row[j * 32] = __float2bfloat16(v[i][j]);
        if (key && !(fabsf(v[i][j]) < INFINITY)) v[i][j] = 0.f, broken[node] = 1; // 0 * NaN is NaN: only who sees it may get it
        to[j * 32] = __float2bfloat16(v[i][j]);
      }
    }
  }
  if (own_nodes) { // values as they are, 16 bytes a thread
#pragma unroll 1
    for (int i = threadIdx.x; i < p.t * (kWidth / 8); i += kWarps * 32) {
      const int row = i / (kWidth / 8), node = node_of[row], c = i % (kWidth / 8) * 8;
      if (node < 0) continue;
      uint4 v = load_rows(p.projected + (line0 + row) * lanes + (p.heads + p.groups + group) * kWidth + c);
      const int64_t slot = writes ? slot_of[node] : -1;
      if (slot >= 0) *reinterpret_cast<uint4 *>(p.values + (static_cast<size_t>(slot) * p.groups + group) * kWidth + c) = v;
      uint32_t *word = reinterpret_cast<uint32_t *>(&v);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (!(fabsf(low(word[j])) < INFINITY) || !(fabsf(high(word[j])) < INFINITY)) word[j] = 0, broken[node] = 1;
      *reinterpret_cast<uint4 *>(node_values + static_cast<size_t>(node) * P::kValue + c) = v;
    }
  }
  __syncthreads();
  Fold<kWidth> fold;
  fold.begin(queries);
  int upto[2], after[2], row_of[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    row_of[h] = ((lane >> 2) + 8 * h) / kShare;
    upto[h] = row_of[h] < rows ? last_of[row_of[h]] : -1;
    after[h] = p.window ? upto[h] - p.window : -1;
  }
  int place = 0;
#pragma unroll 1
  for (int s = start; s * kTile < end; s += kRanks) {
    wait_copies<kStages - 1>();
    __syncthreads();
    const int first = s * kTile + warp * kSlice;
    const bf16 *k = stage + place * P::kStage + warp * kSlice * P::kKey, *v = stage + place * P::kStage + kTile * P::kKey + warp * kSlice * P::kValue;
    const bool gathered = first + kSlice > prefix; // then each row by itself: paths differ
#pragma unroll 1
    for (int r = 0; r < (gathered ? rows : 1); r++) {
      const int last = last_of[r];
      if (gathered && first > last) continue;
      const uint8_t *nodes = path[r];
      int sees[2];
#pragma unroll
      for (int h = 0; h < 2; h++) sees[h] = !gathered || row_of[h] == r ? upto[h] : -1;
      auto node = [&](int i) { return static_cast<int>(nodes[min(first + i, last) - prefix]); };
      fold.slice([&](int i) { return first + i < prefix ? k + i * P::kKey : node_keys + node(i) * P::kKey; },
                 [&](int i) { return first + i < prefix ? v + i * P::kValue : node_values + node(i) * P::kValue; }, first, after,
                 sees, p.scale);
      bool lost = false; // a query that sees a broken node is lost, and only such a query
      if (gathered)
        for (int d = lane; d <= last - prefix; d += 32) lost |= broken[nodes[d]] != 0;
      if (__any_sync(kAll, lost)) {
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (row_of[h] == r) fold.norm[h] = NAN;
      }
    }
    __syncthreads();
    fetch(s + kStages * kRanks, place);
    place = place + 1 == kStages ? 0 : place + 1;
  }
  wait_copies<0>();
  __syncthreads();
  {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < kWidth / 8; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<float2 *>(result + (warp * kVectors + g + 8 * h) * kWidth + i * 8 + 2 * t) =
            h ? make_float2(fold.out[i].z, fold.out[i].w) : make_float2(fold.out[i].x, fold.out[i].y);
    if (t == 0) {
#pragma unroll
      for (int h = 0; h < 2; h++) top_of[warp * kVectors + g + 8 * h] = fold.top[h], norm_of[warp * kVectors + g + 8 * h] = fold.norm[h];
    }
  }
  cluster.sync();
  // thread: one column of a vector; lane c: what is needed of partial c = rank * 4 + warp
  constexpr int kSide = kWarps * 32 / kWidth; // vectors at a time
  const int column = threadIdx.x % kWidth;
#pragma unroll 1
  for (int i = rank * kSide + threadIdx.x / kWidth; i - threadIdx.x / kWidth < rows * kShare; i += kRanks * kSide) {
    const int head = group * kShare + i % kShare, row = i / kShare, own = min(i, kVectors - 1);
    const float top = *cluster.map_shared_rank(top_of + (lane % kWarps) * kVectors + own, lane / kWarps);
    const float norm = *cluster.map_shared_rank(norm_of + (lane % kWarps) * kVectors + own, lane / kWarps);
    const float sink = p.sinks && i < rows * kShare ? __bfloat162float(p.sinks[head]) * 1.4426950408889634f : -INFINITY;
    float high = fmaxf(top, sink);
#pragma unroll
    for (int o = 16; o; o >>= 1) high = fmaxf(high, __shfl_xor_sync(kAll, high, o));
    high = high == -INFINITY ? 0.f : high;
    const float share = exp2f(top - high), part = share * norm;
    float sum = exp2f(sink - high), y = 0.f;
#pragma unroll
    for (int c = 0; c < kRanks * kWarps; c++) {
      const float *from = cluster.map_shared_rank(result + own * kWidth + column, c / kWarps);
      sum += __shfl_sync(kAll, part, c);
      y = fmaf(__shfl_sync(kAll, share, c), from[c % kWarps * kVectors * kWidth], y);
    }
    if (i < rows * kShare) p.y[((line0 + first_row + row) * p.heads + head) * kWidth + column] = __float2bfloat16(y / sum);
  }
  cluster.sync();
}

template <int kWidth, int kShare, int kHalf>
inline cudaError_t launch_attend(const Attention &p, int batch, cudaStream_t stream) {
  const dim3 grid(kRanks * p.groups, (p.t + kVectors / kShare - 1) / (kVectors / kShare), batch);
  if (p.columns * p.page <= kShort) // less shared memory: more fits beside it
    return launch(attend<kWidth, kShare, kHalf, 1>, grid, kWarps * 32, Plane<kWidth>::bytes(1), stream, kRanks, p);
  return launch(attend<kWidth, kShare, kHalf, 2>, grid, kWarps * 32, Plane<kWidth>::bytes(2), stream, kRanks, p);
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
