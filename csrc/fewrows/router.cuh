// The beginning of a mixture-of-experts block for every kind of router (kernels/routing.py): norm, logits, choice and weights;
// beside it, where there is a shared expert, its gate, up and activation of the same normed rows.
//
// Blocks share the experts and the shared expert's units evenly. The block of a group of rows that arrives last makes the
// group's choice, a warp a row: nobody waits, so no block needs another one to be resident.
#pragma once

#include "common.cuh"
#include "staged.cuh"

namespace eagle3 {

constexpr int kRouted = 512; // experts at most

enum Score { kSoftmax, kSigmoid, kLogits }; // as kernels.routing.SCORES

struct Router {
  const bf16 *x;           // [rows, columns] residual stream
  const bf16 *gamma;       // [columns] or null: x comes normed
  const bf16 *gate;        // [experts, columns]
  const bf16 *bias;        // [experts] or null
  const float *correction; // [experts] or null, for the choice alone
  const bf16 *shared;      // [2 * width, columns], gates first, or null
  bf16 *normed;            // [rows, columns], where there is a gamma
  bf16 *hidden;            // [rows, width] of the shared expert, or null
  float *logits;           // [groups of rows * 8, experts] scratch
  unsigned *arrivals;      // [groups of rows], zero between passes
  int64_t *ids;            // [rows, choices]
  float *weights;          // [rows, choices]
  float eps, scale;
  int rows, columns, width, experts, choices, score, renormalise, groups, top_groups, group_best;
};

// One row's experts in a warp: lane l holds l, l + 32, …
template <int kMany>
struct Candidates {
  uint32_t key[kMany];

  static __device__ __forceinline__ bool in_group(int e, int g, int size) { return e >= g * size && e < (g + 1) * size; }

  // Takes the best one out, lower ids first among equals; its key is left in `found`. 0: nothing was left.
  __device__ __forceinline__ int take(uint32_t &found) {
    const int lane = threadIdx.x & 31;
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kMany; j++) most = max(most, key[j]);
    found = __reduce_max_sync(kAll, most);
    unsigned id = 0xffffffffu;
#pragma unroll
    for (int j = kMany - 1; j >= 0; j--)
      if (key[j] == found) id = j * 32 + lane;
    id = __reduce_min_sync(kAll, id);
#pragma unroll
    for (int j = 0; j < kMany; j++)
      if (static_cast<unsigned>(j * 32 + lane) == id) key[j] = 0;
    return static_cast<int>(id);
  }

  // Leaves the experts of the best groups, a group being as good as the sum of its `best` best.
  __device__ __forceinline__ void keep_groups(int size, int groups, int top, int best) {
    const int lane = threadIdx.x & 31;
    float own = 0.f; // of group `lane`
#pragma unroll 1
    for (int g = 0; g < groups; g++) {
      Candidates members;
#pragma unroll
      for (int j = 0; j < kMany; j++) members.key[j] = in_group(j * 32 + lane, g, size) ? key[j] : 0;
      float sum = 0.f;
#pragma unroll 1
      for (int i = 0; i < best; i++) {
        uint32_t found;
        members.take(found);
        sum += sorted_value(found);
      }
      if (lane == g) own = sum;
    }
    uint32_t mine = lane < groups ? sortable(own) : 0, kept = 0;
#pragma unroll 1
    for (int i = 0; i < top; i++) {
      const uint32_t found = __reduce_max_sync(kAll, mine);
      const unsigned g = __reduce_min_sync(kAll, mine == found ? lane : 32u);
      kept |= 1u << g;
      if (static_cast<unsigned>(lane) == g) mine = 0;
    }
#pragma unroll 1
    for (int g = 0; g < groups; g++) {
      if (kept >> g & 1u) continue;
#pragma unroll
      for (int j = 0; j < kMany; j++)
        if (in_group(j * 32 + lane, g, size)) key[j] = 0;
    }
  }
};

// What a group's rows score, in shared memory; loops over it are short code, and this code is cold where it runs.
struct Scores {
  float of[kRows][kRouted];
  uint32_t key[kRows][kRouted]; // that sort like what the choice goes by; 0: no expert
};

// Ids and weights of row `row` of the group, by one warp, from its scores, 32 * kMany experts at most. `rehearsed`: nothing is
// written; see `route`.
template <int kMany>
__device__ __forceinline__ void choose_row(const Router &p, Scores &s, int row, bool rehearsed) {
  const int lane = threadIdx.x & 31;
  float *score = s.of[row];
  if (p.score == kSoftmax) {
    float top = -INFINITY, sum = 0.f;
#pragma unroll 1
    for (int e = lane; e < p.experts; e += 32) top = fmaxf(top, score[e]);
    top = warp_max(top);
#pragma unroll 1
    for (int e = lane; e < p.experts; e += 32) sum += score[e] = __expf(score[e] - top);
    const float share = __fdividef(1.f, warp_sum(sum));
#pragma unroll 1
    for (int e = lane; e < p.experts; e += 32) {
      score[e] *= share;
      s.key[row][e] = sortable(score[e] + (p.correction ? p.correction[e] : 0.f));
    }
    __syncwarp();
  }
  Candidates<kMany> all;
#pragma unroll
  for (int j = 0; j < kMany; j++) all.key[j] = s.key[row][j * 32 + lane];
  if (p.groups > 1) all.keep_groups(p.experts / p.groups, p.groups, p.top_groups, p.group_best);
  int id = 0;
#pragma unroll 1
  for (int k = 0; k < p.choices; k++) {
    uint32_t found;
    const int e = all.take(found);
    if (lane == k) id = e;
  }
  const bool real = lane < p.choices;
  float own = real ? score[id] : 0.f;
  if (p.score == kLogits) {
    const float top = warp_max(real ? own : -INFINITY), raised = real ? __expf(own - top) : 0.f;
    own = __fdividef(raised, warp_sum(raised));
  }
  if (p.renormalise) own = __fdividef(own, warp_sum(own) + 1e-20f);
  if (!real || rehearsed) return;
  const size_t at = (static_cast<size_t>(blockIdx.y) * kRows + row) * p.choices + lane;
  p.ids[at] = id;
  p.weights[at] = own * p.scale;
}

__device__ __forceinline__ void choose_row(const Router &p, Scores &s, int row, bool rehearsed) {
  if (p.experts <= 128)
    choose_row<4>(p, s, row, rehearsed);
  else if (p.experts <= 256)
    choose_row<8>(p, s, row, rehearsed);
  else
    choose_row<kRouted / 32>(p, s, row, rehearsed);
}

// Fills the scores of `live` rows from their logits; zeros past the last expert.
template <int kThreads>
__device__ __forceinline__ void score_group(const Router &p, Scores &s, int live) {
#pragma unroll 1
  for (int i = threadIdx.x; i < live * kRouted; i += kThreads) {
    const int row = i / kRouted, e = i % kRouted;
    float v = 0.f;
    uint32_t key = 0;
    if (e < p.experts) {
      const float correction = p.correction ? p.correction[e] : 0.f;
      v = load_float(p.logits + (static_cast<size_t>(blockIdx.y) * kRows + row) * p.experts + e);
      if (p.score == kSigmoid) v = __fdividef(1.f, 1.f + __expf(-v));
      key = sortable(v + correction);
    }
    s.of[row][e] = v;
    s.key[row][e] = key;
  }
}

// The block's share of the weight rows: its units' gates and ups in turn, then its experts.
struct Shares {
  int expert, unit, gated, count; // the first of each; rows of units, rows in all
  __device__ __forceinline__ explicit Shares(const Router &p)
      : expert(share_begin(p.experts, blockIdx.x)), unit(share_begin(p.width, blockIdx.x)),
        gated(2 * (share_begin(p.width, blockIdx.x + 1) - unit)), count(gated + share_begin(p.experts, blockIdx.x + 1) - expert) {}
  __device__ __forceinline__ const bf16 *row(const Router &p, int i) const {
    return i < gated ? p.shared + static_cast<size_t>(unit + i / 2 + (i & 1) * p.width) * p.columns
                     : p.gate + static_cast<size_t>(expert + i - gated) * p.columns;
  }
};

// Eight columns of the normed rows, from column `column` on; at: their place in all rows.
__device__ __forceinline__ void write_normed(const Router &p, size_t at, int column, float factor) {
  uint4 v = load_rows(p.x + at);
  const uint4 gains = load_weights(p.gamma + column);
  uint32_t *w = reinterpret_cast<uint32_t *>(&v);
  const uint32_t *gain = reinterpret_cast<const uint32_t *>(&gains);
#pragma unroll
  for (int j = 0; j < 4; j++) w[j] = pack(low(w[j]) * factor * low(gain[j]), high(w[j]) * factor * high(gain[j]));
  *reinterpret_cast<uint4 *>(p.normed + at) = v;
}

// Norm, logits and the shared expert's units. A block's usual share of weight rows is less than 8. The last block of a group
// chooses.
template <int kThreads, int kPieces>
__global__ void __launch_bounds__(kThreads, 1) route(Router p) {
  using Rows = StagedRows<kThreads, kPieces>;
  constexpr int kWarps = kThreads / 32, kChunks = Rows::kChunks;
  extern __shared__ uint4 route_memory[]; // rows, then the scores
  __shared__ TileSums<kWarps> red[2];
  __shared__ float squares[kWarps][kRows];
  __shared__ bool last;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
  const Shares shares(p);
  const int tiles = (shares.count + 7) / 8;
  auto aim = [&](int tile) {
    const int i = tile * 8 + g;
    return i < shares.count ? shares.row(p, i) + warp * kPieces * kPiece + t * 8 : nullptr;
  };
  HalfTile<kPieces> weights;
  weights.begin(aim(0));
  Rows rows(route_memory, squares, p.gamma);
  if (threadIdx.x == 0) last = false;
  wait_for_predecessor();
  launch_dependents();
  rows.stage(p.x + static_cast<size_t>(blockIdx.y) * kRows * p.columns, p.columns, live);
  const int a = threadIdx.x >> 3, n = threadIdx.x & 7, row = blockIdx.y * kRows + n; // of the sums that this thread adds
  const float scale = threadIdx.x < 64 ? rows.factor(n, p.columns, p.eps) : 1.f;
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    TileSums<kWarps> &sums = red[tile & 1];
    sums.put(weights.multiply(rows.operand(live), tile + 1 < tiles, aim(tile + 1)));
    __syncthreads();
    const int i = tile * 8 + a;
    if (threadIdx.x >= 64 || n >= live || i >= shares.count || (i < shares.gated && (i & 1))) continue;
    const float own = scale * sums.sum(threadIdx.x);
    if (i < shares.gated) {
      p.hidden[static_cast<size_t>(row) * p.width + shares.unit + i / 2] = __float2bfloat16(silu(own) * scale * sums.sum(threadIdx.x + 8));
    } else {
      const int e = shares.expert + i - shares.gated;
      p.logits[static_cast<size_t>(row) * p.experts + e] = p.bias ? own + __bfloat162float(p.bias[e]) : own;
    }
  }
  Scores &scores = *reinterpret_cast<Scores *>(route_memory); // the rows are read
  if (warp < 2) { // who wrote logits
    __syncwarp();
    if (lane == 0 && arrive(p.arrivals + blockIdx.y) == 2 * gridDim.x - 1) last = true, p.arrivals[blockIdx.y] = 0;
  } else if (warp == kWarps - 1) {
    choose_row(p, scores, 0, true); // its code is cold: a rehearsal on whatever lies there, while the others arrive
  } else { // normed rows, by all blocks together
#pragma unroll 1
    for (int i = static_cast<int>(gridDim.x) * (threadIdx.x - 64) + blockIdx.x; p.gamma && i < live * kChunks; i += gridDim.x * (kThreads - 96))
      write_normed(p, static_cast<size_t>(blockIdx.y) * kRows * p.columns + static_cast<size_t>(i) * 8, i % kChunks * 8, rows.factor(i / kChunks, p.columns, p.eps));
  }
  __syncthreads();
  if (!last) return;
  score_group<kThreads>(p, scores, live);
  __syncthreads();
#pragma unroll 1
  for (int r = warp; r < live; r += kWarps) choose_row(p, scores, r, false);
}

inline dim3 route_grid(const Router &p, int blocks) {
  const int most = p.experts > p.width ? p.experts : p.width;
  return dim3(most < blocks ? most : blocks, (p.rows + kRows - 1) / kRows);
}

template <int kThreads, int kPieces>
inline cudaError_t launch_route(const Router &p, int blocks, cudaStream_t stream) {
  const size_t rows = StagedRows<kThreads, kPieces>::bytes(p.rows);
  return launch(route<kThreads, kPieces>, route_grid(p, blocks), kThreads, rows > sizeof(Scores) ? rows : sizeof(Scores), stream, 1, p);
}

inline cudaError_t routed(const Router &p, int blocks, cudaStream_t stream) {
  if (p.experts > kRouted || p.choices > 32 || p.choices > p.experts || p.groups > 32) return cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: return launch_route<256, 1>(p, blocks, stream);
  case 512: return launch_route<512, 1>(p, blocks, stream);
  case 2048: return launch_route<512, 4>(p, blocks, stream);
  case 2880: return launch_route<480, 6>(p, blocks, stream);
  case 4096: return launch_route<512, 8>(p, blocks, stream);
  case 5120: return launch_route<512, 10>(p, blocks, stream);
  case 7168: return launch_route<512, 14>(p, blocks, stream);
  default: return cudaErrorInvalidValue;
  }
}

} // namespace eagle3
