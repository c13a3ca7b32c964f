// A GQA layer's attention over few rows, after the projection: head norms, RoPE, cache write, attention under the one law
// (kernels/attention.py), merge.
//
// Positions come in tiles of 64, counted from 0; tile s belongs to rank s mod 8 of a cluster, each rank folds its tiles in
// ascending order, the ranks are merged in ascending order. All of that follows from a query's own position, so neither the
// rows beside it nor the shape of its tree change a bit. A position below the prefix is that row of the cache; one past it is
// the node of the query's own path (or, without bitsets, the row of the pass) at that depth.
#pragma once

#include <cooperative_groups.h>

#include "common.cuh"

namespace eagle3 {

constexpr int kTile = 64, kRanks = 8, kWarps = 4;

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

// What a block keeps in shared memory; nodes: this pass's own keys and values.
template <int kWidth>
struct Plane {
  static constexpr int kKey = kWidth + 32, kValue = kWidth + 8; // strides that keep 16-byte reads off each other's banks
  static constexpr size_t kStage = static_cast<size_t>(kTile) * (kKey + kValue);
  static size_t bytes(int t, int stages) {
    const size_t out = static_cast<size_t>(kTile) * kWidth * 4, stage = stages * kStage * 2;
    return (stage > out ? stage : out) + static_cast<size_t>(t) * (kKey + kValue) * 2 + static_cast<size_t>(kTile) * kKey * 2;
  }
};

// Head vectors that a warp norms and turns at a time: their loads are all in flight before the first is used.
constexpr int kTogether = 8;

// Cosines then sines of one position, as the lanes need them: columns j * 32 + lane.
template <int kWidth>
__device__ __forceinline__ void load_angles(float (&angle)[kWidth / 32], const Attention &p, int64_t line) {
  const float *from = p.cos_sin + load_long(p.positions + line) * p.turned + (threadIdx.x & 31);
#pragma unroll
  for (int j = 0; j < kWidth / 32; j++) angle[j] = j * 32 < p.turned ? from[j * 32] : 0.f;
}

// Norm and RoPE of one head vector in registers: a lane holds columns j * 32 + lane.
template <int kWidth>
__device__ __forceinline__ void turn(float (&v)[kWidth / 32], const float (&gain)[kWidth / 32], bool normed,
                                     const float (&angle)[kWidth / 32], int turned, float eps) {
  constexpr int kMany = kWidth / 32;
  if (normed) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kMany; j++) sum = fmaf(v[j], v[j], sum);
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(kAll, sum, o);
    const float scale = rsqrtf(sum / kWidth + eps);
#pragma unroll
    for (int j = 0; j < kMany; j++) v[j] = rounded(v[j] * scale * gain[j]);
  }
#pragma unroll
  for (int half = 1; half <= kMany / 2; half++) { // in steps of 32 columns; registers are indexed by constants
    if (half * 64 != turned) continue;
#pragma unroll
    for (int j = 0; j < half; j++) {
      const float a = v[j], b = v[j + half];
      v[j] = rounded(a * angle[j] - b * angle[j + half]);
      v[j + half] = rounded(b * angle[j] + a * angle[j + half]);
    }
  }
}

// A warp's 16 query vectors (rows of the pass times heads of the group) and what they have seen so far.
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

  // One tile of 64 positions: key(i), value(i) are where position first + i lies in shared memory. Half h of the vectors
  // (rows g and g + 8) sees positions in (after[h], upto[h]].
  template <class Key, class Value>
  __device__ __forceinline__ void tile(Key key, Value value, int first, const int (&after)[2], const int (&upto)[2], float scale) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float4 s[8];
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 8; n++) {
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
    uint32_t weight[8][2];
#pragma unroll
    for (int n = 0; n < 8; n++) {
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
#pragma unroll
    for (int i = 0; i < kWidth / 8; i++)
      out[i].x *= keep[0], out[i].y *= keep[0], out[i].z *= keep[1], out[i].w *= keep[1];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const bf16 *v = value(k * 16 + (lane >> 3 & 1) * 8 + (lane & 7)) + (lane >> 4) * 8;
#pragma unroll
      for (int i = 0; i < kWidth / 16; i++) {
        uint32_t r[4];
        const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(v + i * 16));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(from)
                     : "memory");
        mma(out[2 * i], weight[2 * k][0], weight[2 * k][1], weight[2 * k + 1][0], weight[2 * k + 1][1], r[0], r[1]);
        mma(out[2 * i + 1], weight[2 * k][0], weight[2 * k][1], weight[2 * k + 1][0], weight[2 * k + 1][1], r[2], r[3]);
      }
    }
  }
};

// Cluster (x / 8 = group of heads, y = tile of rows, z = sequence). kShare heads a group; a warp has 16 / kShare rows.
template <int kWidth, int kShare, int kStages>
__global__ void __launch_bounds__(kWarps * 32) attend(Attention p) {
  using P = Plane<kWidth>;
  constexpr int kOwn = 16 / kShare, kBlock = kWarps * kOwn, kMany = kWidth / 32;
  extern __shared__ uint4 attention_memory[];
  __shared__ float top_of[kTile], norm_of[kTile];
  __shared__ uint8_t path[kBlock][kTile]; // node at each depth
  __shared__ int last_of[kBlock];
  __shared__ uint8_t broken[kTile]; // nodes whose key or value is not finite
  bf16 *stage = reinterpret_cast<bf16 *>(attention_memory);
  float *result = reinterpret_cast<float *>(attention_memory); // over the stages, when they have been read
  const size_t held = kStages * P::kStage * 2 > static_cast<size_t>(kTile) * kWidth * 4 ? kStages * P::kStage : static_cast<size_t>(kTile) * kWidth * 2;
  bf16 *node_keys = stage + held, *node_values = node_keys + static_cast<size_t>(p.t) * P::kKey;
  bf16 *queries = node_values + static_cast<size_t>(p.t) * P::kValue;
  namespace cg = cooperative_groups;
  cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), group = blockIdx.x / kRanks, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first_row = blockIdx.y * kBlock, b = blockIdx.z, rows = min(kBlock, p.t - first_row);
  const int64_t line0 = static_cast<int64_t>(b) * p.t;
  const int prefix = static_cast<int>(load_long(p.prefix + b)), end = prefix + p.t; // no query lies past `end`
  const int *pages = p.pages + static_cast<int64_t>(b) * p.table;
  int start = rank;
  if (p.window) {
    const int oldest = max(0, prefix + (p.tree ? 0 : first_row) - p.window + 1) / kTile; // no row of the block sees an older tile
    start += (oldest - start + kRanks - 1 > 0 ? (oldest - start + kRanks - 1) / kRanks : 0) * kRanks;
  }
  auto fetch = [&](int s, int place) {
    if (s * kTile < end) {
      bf16 *k = stage + place * P::kStage, *v = k + kTile * P::kKey;
      const int count = min(kTile, prefix - s * kTile);
      for (int i = threadIdx.x; i < count * (kWidth / 8); i += kWarps * 32) {
        const int r = i / (kWidth / 8), c = i % (kWidth / 8) * 8, row = s * kTile + r;
        const int64_t slot = static_cast<int64_t>(pages[row / p.page]) * p.page + row % p.page;
        const size_t from = (static_cast<size_t>(slot) * p.groups + group) * kWidth + c;
        copy_async(k + r * P::kKey + c, p.keys + from, true);
        copy_async(v + r * P::kValue + c, p.values + from, true);
      }
    }
    commit_copies();
  };
  // committed rows are older than the kernel before this one, which only projects
#pragma unroll
  for (int i = 0; i < kStages; i++) fetch(start + i * kRanks, i);
  for (int i = threadIdx.x; i < kTile; i += kWarps * 32) broken[i] = 0;
  for (int r = warp; r < rows; r += kWarps) {
    const uint64_t bits = p.tree ? static_cast<uint64_t>(load_long(p.tree + line0 + first_row + r)) : (2ull << (first_row + r)) - 1ull;
    const uint64_t below = (1ull << lane) - 1ull;
    if (bits >> lane & 1ull) path[r][__popcll(bits & below)] = static_cast<uint8_t>(lane);
    if (bits >> (lane + 32) & 1ull) path[r][__popcll(bits & ((below << 32) | 0xffffffffull))] = static_cast<uint8_t>(lane + 32);
    if (lane == 0) last_of[r] = prefix + __popcll(bits) - 1;
  }
  const int lanes = (p.heads + 2 * p.groups) * kWidth;
  // does this block fold a tile that reaches past the prefix? The first of them is the tile of the prefix itself
  const bool writes = rank == 0 && blockIdx.y == 0;
  bool own_nodes = writes;
  for (int s = prefix / kTile; s * kTile < end; s++) own_nodes |= s % kRanks == rank;
  // a warp's jobs: keys of the pass's nodes (where they are needed), then queries
  const int node_jobs = own_nodes ? p.t : 0, jobs = node_jobs + rows * kShare;
  auto line_of = [&](int job) { return job < node_jobs ? line0 + job : line0 + first_row + (job - node_jobs) / kShare; };
  float q_gain[kMany], k_gain[kMany], angle[kTogether][kMany];
#pragma unroll
  for (int j = 0; j < kMany; j++) {
    q_gain[j] = p.q_gain ? __bfloat162float(p.q_gain[j * 32 + lane]) : 1.f;
    k_gain[j] = p.k_gain ? __bfloat162float(p.k_gain[j * 32 + lane]) : 1.f;
  }
  auto angles = [&](int first_job) {
#pragma unroll
    for (int i = 0; i < kTogether; i++)
      if (first_job + i * kWarps < jobs) load_angles<kWidth>(angle[i], p, line_of(first_job + i * kWarps));
  };
  angles(warp); // positions are older than the kernel before this one
  __syncthreads();
  wait_for_predecessor();
  launch_dependents();
  auto written_slot = [&](int node) { // of the cache, or -1
    const int64_t row = load_long(p.index + line0 + node);
    if (!writes || row < 0 || row >= static_cast<int64_t>(p.columns) * p.page) return static_cast<int64_t>(-1);
    return static_cast<int64_t>(pages[row / p.page]) * p.page + row % p.page;
  };
  if (own_nodes) { // values as they are, 16 bytes a thread
    for (int i = threadIdx.x; i < p.t * (kWidth / 8); i += kWarps * 32) {
      const int node = i / (kWidth / 8), c = i % (kWidth / 8) * 8;
      uint4 v = load_rows(p.projected + (line0 + node) * lanes + (p.heads + p.groups + group) * kWidth + c);
      const int64_t slot = written_slot(node);
      if (slot >= 0) *reinterpret_cast<uint4 *>(p.values + (static_cast<size_t>(slot) * p.groups + group) * kWidth + c) = v;
      uint32_t *word = reinterpret_cast<uint32_t *>(&v);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (!(fabsf(low(word[j])) < INFINITY) || !(fabsf(high(word[j])) < INFINITY)) word[j] = 0, broken[node] = 1;
      *reinterpret_cast<uint4 *>(node_values + static_cast<size_t>(node) * P::kValue + c) = v;
    }
  }
  for (int first_job = warp; first_job < jobs; first_job += kTogether * kWarps) {
    float v[kTogether][kMany];
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
      if (job >= node_jobs) {
        turn<kWidth>(v[i], q_gain, p.q_gain != nullptr, angle[i], p.turned, p.eps);
        bf16 *to = queries + static_cast<size_t>(job - node_jobs) * P::kKey + lane;
#pragma unroll
        for (int j = 0; j < kMany; j++) to[j * 32] = __float2bfloat16(v[i][j]);
        continue;
      }
      turn<kWidth>(v[i], k_gain, p.k_gain != nullptr, angle[i], p.turned, p.eps);
      const int64_t slot = written_slot(job);
      bf16 *to = node_keys + static_cast<size_t>(job) * P::kKey + lane;
#pragma unroll
      for (int j = 0; j < kMany; j++) {
        const bool finite = fabsf(v[i][j]) < INFINITY;
        if (slot >= 0) p.keys[(static_cast<size_t>(slot) * p.groups + group) * kWidth + j * 32 + lane] = __float2bfloat16(v[i][j]);
        to[j * 32] = __float2bfloat16(finite ? v[i][j] : 0.f); // 0 * NaN is NaN: rows that do not see it must not get it
        if (!finite) broken[job] = 1;
      }
    }
    angles(first_job + kTogether * kWarps);
  }
  __syncthreads();
  const int own_row = warp * kOwn, own_rows = min(kOwn, rows - own_row);
  Fold<kWidth> fold;
  fold.begin(queries + static_cast<size_t>(warp) * 16 * P::kKey);
  int upto[2], after[2], row_of[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    row_of[h] = ((lane >> 2) + 8 * h) / kShare;
    upto[h] = row_of[h] < own_rows ? last_of[own_row + row_of[h]] : -1;
    after[h] = p.window ? upto[h] - p.window : -1;
  }
  int place = 0;
  for (int s = start; s * kTile < end; s += kRanks) {
    wait_copies<kStages - 1>();
    __syncthreads();
    const int first = s * kTile;
    const bf16 *k = stage + place * P::kStage, *v = k + kTile * P::kKey;
    if (own_rows > 0) {
      if (first + kTile <= prefix) {
        fold.tile([&](int i) { return k + i * P::kKey; }, [&](int i) { return v + i * P::kValue; }, first, after, upto, p.scale);
      } else {
        for (int r = 0; r < own_rows; r++) {
          const int last = last_of[own_row + r];
          if (first > last) continue;
          const uint8_t *nodes = path[own_row + r];
          int sees[2];
#pragma unroll
          for (int h = 0; h < 2; h++) sees[h] = row_of[h] == r ? upto[h] : -1;
          auto node = [&](int i) { return static_cast<int>(nodes[min(first + i, last) - prefix]); };
          fold.tile([&](int i) { return first + i < prefix ? k + i * P::kKey : node_keys + node(i) * P::kKey; },
                    [&](int i) { return first + i < prefix ? v + i * P::kValue : node_values + node(i) * P::kValue; }, first,
                    after, sees, p.scale);
          bool lost = false; // a query that sees a broken node is lost, and only such a query
          for (int d = lane; d <= last - prefix; d += 32) lost |= broken[nodes[d]] != 0;
          if (__any_sync(kAll, lost)) {
#pragma unroll
            for (int h = 0; h < 2; h++)
              if (row_of[h] == r) fold.norm[h] = NAN;
          }
        }
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
        *reinterpret_cast<float2 *>(result + (warp * 16 + g + 8 * h) * kWidth + i * 8 + 2 * t) =
            h ? make_float2(fold.out[i].z, fold.out[i].w) : make_float2(fold.out[i].x, fold.out[i].y);
    if (t == 0) {
#pragma unroll
      for (int h = 0; h < 2; h++) top_of[warp * 16 + g + 8 * h] = fold.top[h], norm_of[warp * 16 + g + 8 * h] = fold.norm[h];
    }
  }
  cluster.sync();
  for (int i = warp * kRanks + rank; i < rows * kShare; i += kWarps * kRanks) {
    const int head = group * kShare + i % kShare, row = i / kShare;
    float tops[kRanks], high = -INFINITY, sum = 0.f, y[kMany];
#pragma unroll
    for (int c = 0; c < kRanks; c++) {
      tops[c] = *cluster.map_shared_rank(top_of + i, c);
      high = fmaxf(high, tops[c]);
    }
    const float sink = p.sinks ? __bfloat162float(p.sinks[head]) * 1.4426950408889634f : -INFINITY;
    high = fmaxf(high, sink);
    high = high == -INFINITY ? 0.f : high;
#pragma unroll
    for (int j = 0; j < kMany; j++) y[j] = 0.f;
#pragma unroll
    for (int c = 0; c < kRanks; c++) {
      const float share = exp2f(tops[c] - high);
      sum = fmaf(share, *cluster.map_shared_rank(norm_of + i, c), sum);
      const float *part = cluster.map_shared_rank(result, c) + i * kWidth + lane;
#pragma unroll
      for (int j = 0; j < kMany; j++) y[j] = fmaf(share, part[j * 32], y[j]);
    }
    sum += exp2f(sink - high);
#pragma unroll
    for (int j = 0; j < kMany; j++)
      p.y[((line0 + first_row + row) * p.heads + head) * kWidth + j * 32 + lane] = __float2bfloat16(y[j] / sum);
  }
  cluster.sync();
}

template <int kWidth, int kShare>
inline cudaError_t launch_attend(const Attention &p, int batch, cudaStream_t stream) {
  constexpr int kStages = 2;
  const dim3 grid(kRanks * p.groups, (p.t + kWarps * (16 / kShare) - 1) / (kWarps * (16 / kShare)), batch);
  return launch(attend<kWidth, kShare, kStages>, grid, kWarps * 32, Plane<kWidth>::bytes(p.t, kStages), stream, kRanks, p);
}

inline cudaError_t attention(const Attention &p, int width, int batch, cudaStream_t stream) {
  if (p.t > kTile || p.turned % 64 || p.turned > width) return cudaErrorInvalidValue;
  switch (width * 100 + p.heads / p.groups) {
  case 6401: return launch_attend<64, 1>(p, batch, stream);
  case 6402: return launch_attend<64, 2>(p, batch, stream);
  case 6404: return launch_attend<64, 4>(p, batch, stream);
  case 6408: return launch_attend<64, 8>(p, batch, stream);
  case 12801: return launch_attend<128, 1>(p, batch, stream);
  case 12802: return launch_attend<128, 2>(p, batch, stream);
  case 12804: return launch_attend<128, 4>(p, batch, stream);
  case 12808: return launch_attend<128, 8>(p, batch, stream);
  default: return cudaErrorInvalidValue;
  }
}

} // namespace eagle3
