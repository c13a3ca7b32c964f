// The beginning of a mixture-of-experts block for every kind of router (kernels/routing.py): norm, logits, choice and weights;
// beside it, where there is a shared expert, its gate, up and activation of the same normed rows.
//
// Blocks share the experts and the shared expert's units evenly. The block of a group of rows that arrives last makes the
// group's choice, a warp a row: nobody waits, so no block needs another one to be resident.
#pragma once

#include "common.cuh"
#include "project.cuh"
#include "stream.cuh"

namespace eagle3 {

constexpr int kRouted = 512; // experts at most

enum Score { kSoftmax, kSigmoid, kLogits }; // as kernels.routing.SCORES

constexpr size_t kLongRing = static_cast<size_t>(4) * 3 * 16 * 512; // of long rows: activations beside the weights

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

// Adds one and says how many there were; what this block wrote before is seen by whoever arrives later.
__device__ __forceinline__ unsigned arrive(unsigned *count) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(kAll, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(kAll, v, o));
  return v;
}

// One row's experts in a warp: lane l holds l, l + 32, …
struct Candidates {
  static constexpr int kMany = kRouted / 32;
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

// Ids and weights of row `row` of the group, by one warp, from its scores.
__device__ __forceinline__ void choose_row(const Router &p, Scores &s, int row) {
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
  Candidates all;
#pragma unroll
  for (int j = 0; j < Candidates::kMany; j++) all.key[j] = s.key[row][j * 32 + lane];
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
  if (!real) return;
  const size_t at = (static_cast<size_t>(blockIdx.y) * kRows + row) * p.choices + lane;
  p.ids[at] = id;
  p.weights[at] = own * p.scale;
}

// The choice of the block's group of rows, all logits being there. All threads call it.
template <int kThreads>
__device__ __forceinline__ void choose_group(const Router &p, Scores &s, int live) {
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
  __syncthreads();
#pragma unroll 1
  for (int r = threadIdx.x >> 5; r < live; r += kThreads / 32) choose_row(p, s, r);
}

// A tile's 16 rows: 8 experts (rows 0-3 and 8-11), 4 units of the shared expert (gates 4-7, ups 12-15).
struct Shares {
  int expert, experts_end, unit, units_end;
  __device__ __forceinline__ explicit Shares(const Router &p)
      : expert(share_begin(p.experts, blockIdx.x)), experts_end(share_begin(p.experts, blockIdx.x + 1)),
        unit(share_begin(p.width, blockIdx.x)), units_end(share_begin(p.width, blockIdx.x + 1)) {}
  __device__ __forceinline__ int tiles() const { return max((experts_end - expert + 7) / 8, (units_end - unit + 3) / 4); }
  // as Stream's Aim, from column `column` on
  __device__ __forceinline__ void aim(const Router &p, int tile, int column, const bf16 *&top, const bf16 *&bottom,
                                      bool &has_top, bool &has_bottom) const {
    const int g = (threadIdx.x & 31) >> 2;
    if (g < 4) {
      const int e = expert + tile * 8 + g;
      has_top = e < experts_end;
      has_bottom = e + 4 < experts_end;
      top = p.gate + static_cast<size_t>(e) * p.columns + column;
      bottom = top + 4 * p.columns;
    } else {
      const int i = unit + tile * 4 + g - 4;
      has_top = has_bottom = i < units_end;
      top = p.shared + static_cast<size_t>(i) * p.columns + column;
      bottom = top + static_cast<size_t>(p.width) * p.columns;
    }
  }
};

// Products of one tile: thread (component, lane) as in sum_partials; scale: as in store_tile.
template <int kThreads>
__device__ __forceinline__ void store_routed(const Router &p, const Shares &s, int tile, const float *red, float scale = 1.f) {
  if (threadIdx.x >= 128) return;
  const int which = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int row = blockIdx.y * kRows + 2 * (lane & 3) + (which & 1);
  if (row >= p.rows) return;
  if (g < 4) {
    const int e = s.expert + tile * 8 + g + (which & 2 ? 4 : 0);
    if (e >= s.experts_end) return;
    const float v = scale * sum_partials<kThreads>(red, which, lane);
    p.logits[static_cast<size_t>(row) * p.experts + e] = p.bias ? v + __bfloat162float(p.bias[e]) : v;
  } else if (which < 2) {
    const int i = s.unit + tile * 4 + g - 4;
    if (i >= s.units_end) return;
    const float gate = scale * sum_partials<kThreads>(red, which, lane), v = silu(gate) * scale * sum_partials<kThreads>(red, which + 2, lane);
    p.hidden[static_cast<size_t>(row) * p.width + i] = __float2bfloat16(v);
  }
}

// The end of a block: the last one of its group chooses. `memory`: dynamic shared memory, all read.
template <int kThreads>
__device__ __forceinline__ void finish(const Router &p, void *memory) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = arrive(p.arrivals + blockIdx.y) == gridDim.x - 1;
    if (last) p.arrivals[blockIdx.y] = 0;
  }
  __syncthreads();
  if (last) choose_group<kThreads>(p, *static_cast<Scores *>(memory), min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows));
}

template <int kThreads, int kPieces>
__global__ void __launch_bounds__(kThreads, 1) route(Router p) {
  constexpr int kWarps = kThreads / 32;
  extern __shared__ uint4 ring_memory[];
  __shared__ float red[2][4 * kThreads];
  __shared__ float partial[kWarps * kRows];
  __shared__ uint4 gains[kThreads / 8 * kPieces];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  const Shares shares(p);
  auto aim = [&](int tile, const bf16 *&top, const bf16 *&bottom, bool &has_top, bool &has_bottom) {
    shares.aim(p, tile, column, top, bottom, has_top, has_bottom);
  };
  Stream<kThreads, kPieces, decltype(aim)> stream(ring_memory, aim, shares.tiles());
#pragma unroll 1
  for (int i = threadIdx.x; p.gamma && i < p.columns / 8; i += kThreads) gains[i] = load_weights(p.gamma + i * 8);
  wait_for_predecessor();
  launch_dependents();
  uint4 b[kPieces];
  load_group(b, p.x + static_cast<size_t>(row) * p.columns + column, row < p.rows);
  __syncthreads();
  if (p.gamma) norm_group<kWarps>(b, reinterpret_cast<const bf16 *>(gains) + column, partial, p.columns, p.eps);
#pragma unroll
  for (int i = 0; i < kPieces; i++) // the normed rows are written by all blocks together
    if (p.gamma && (warp * kPieces + i) % gridDim.x == blockIdx.x && row < p.rows)
      *reinterpret_cast<uint4 *>(p.normed + static_cast<size_t>(row) * p.columns + column + i * kPiece) = b[i];
#pragma unroll 1
  for (int tile = 0; tile < shares.tiles(); tile++) {
    store_partial<kThreads>(red[tile & 1], stream.multiply(b));
    __syncthreads();
    store_routed<kThreads>(p, shares, tile, red[tile & 1]);
  }
  finish<kThreads>(p, ring_memory);
}

// The same for long rows: activations pass through the ring beside the weights and take their gains on the way, as in
// project_long; the rows' own factors come with the sums.
__global__ void __launch_bounds__(512, 1) route_long(Router p) {
  constexpr int kThreads = 512, kUnits = 4;
  extern __shared__ uint4 ring_memory[];
  __shared__ float red[2][4 * kThreads];
  __shared__ float squares[kThreads / 32][kRows];
  uint4 *const ring = ring_memory + threadIdx.x, *const gains = ring_memory + kLongRing / 16;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, pieces = p.columns / 512;
  const int column = warp * pieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  const Shares shares(p);
  const int units = shares.tiles() * pieces;
  const bool live = row < p.rows;
  const bf16 *const x = p.x + static_cast<size_t>(live ? row : 0) * p.columns + column;
  auto weights = [&](int unit) {
    if (unit >= units) return;
    const bf16 *top, *bottom;
    bool has_top, has_bottom;
    shares.aim(p, unit / pieces, column + unit % pieces * kPiece, top, bottom, has_top, has_bottom);
    uint4 *slot = ring + unit % kUnits * 3 * kThreads;
    copy_async(slot, top, has_top);
    copy_async(slot + kThreads, bottom, has_bottom);
  };
  auto activations = [&](int unit) {
    if (unit < units) copy_async(ring + (unit % kUnits * 3 + 2) * kThreads, x + unit % pieces * kPiece, live);
  };
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) {
    weights(u);
    commit_copies();
  }
#pragma unroll 1
  for (int i = threadIdx.x; p.gamma && i < p.columns / 8; i += kThreads) gains[i] = load_weights(p.gamma + i * 8);
  wait_for_predecessor();
  launch_dependents();
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) {
    activations(u);
    commit_copies();
  }
  __syncthreads();
  auto factor = [&](int r) { // of row r of the group, when its squares are there
    float total = 0.f;
#pragma unroll 4
    for (int w = 0; w < kThreads / 32; w++) total += squares[w][r];
    return rsqrtf(total / p.columns + p.eps);
  };
  float scale = 1.f, own = 1.f; // of the row whose sums this thread adds; of the one whose columns it holds
  int unit = 0;
#pragma unroll 1
  for (int tile = 0; tile < shares.tiles(); tile++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
    float sum = 0.f;
#pragma unroll 1
    for (int part = 0; part < pieces; part++, unit++) {
      wait_copies<kUnits - 1>();
      const uint4 *slot = ring + unit % kUnits * 3 * kThreads;
      const uint4 v = p.gamma ? gained(slot[2 * kThreads], gains[column / 8 + part * (kPiece / 8)], sum) : slot[2 * kThreads];
      mma_piece(c, slot[0], slot[kThreads], v);
      weights(unit + kUnits);
      activations(unit + kUnits);
      commit_copies();
    }
    store_partial<kThreads>(red[tile & 1], c);
    if (tile == 0) {
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      if ((lane & 3) == 0) squares[warp][g] = sum;
    }
    __syncthreads();
    if (p.gamma && tile == 0) scale = factor(2 * (lane & 3) + (warp & 1)), own = factor(g);
    store_routed<kThreads>(p, shares, tile, red[tile & 1], scale);
  }
#pragma unroll 1
  for (unsigned i = 0; p.gamma && live && i < static_cast<unsigned>(pieces); i++) { // written by all blocks together
    if ((warp * pieces + i) % gridDim.x != blockIdx.x) continue;
    uint4 v = load_rows(x + i * kPiece);
    const uint4 gain = gains[column / 8 + i * (kPiece / 8)];
    uint32_t *w = reinterpret_cast<uint32_t *>(&v);
    const uint32_t *gs = reinterpret_cast<const uint32_t *>(&gain);
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = pack(low(w[j]) * own * low(gs[j]), high(w[j]) * own * high(gs[j]));
    *reinterpret_cast<uint4 *>(p.normed + static_cast<size_t>(row) * p.columns + column + i * kPiece) = v;
  }
  finish<kThreads>(p, ring_memory);
}

inline dim3 route_grid(const Router &p, int blocks) {
  const int most = p.experts > p.width ? p.experts : p.width;
  return dim3(most < blocks ? most : blocks, (p.rows + kRows - 1) / kRows);
}

template <int kThreads, int kPieces>
inline cudaError_t launch_route(const Router &p, int blocks, cudaStream_t stream) {
  static_assert(kRingBytes<kThreads, kPieces> >= sizeof(Scores), "scores lie where the ring was");
  return launch(route<kThreads, kPieces>, route_grid(p, blocks), kThreads, kRingBytes<kThreads, kPieces>, stream, 1, p);
}

inline cudaError_t routed(const Router &p, int blocks, cudaStream_t stream) {
  if (p.experts > kRouted || p.choices > 32 || p.choices > p.experts || p.groups > 32) return cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: return launch_route<256, 1>(p, blocks, stream);
  case 2880: return launch_route<480, 6>(p, blocks, stream);
  default: break;
  }
  if (p.columns % 512) return cudaErrorInvalidValue;
  static_assert(kLongRing >= sizeof(Scores), "scores lie where the ring was");
  return launch(route_long, route_grid(p, blocks), 512, kLongRing + static_cast<size_t>(p.columns) * 2, stream, 1, p);
}

} // namespace eagle3
