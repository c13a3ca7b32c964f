// Which experts a row chooses by a router of any kind, in one warp, and their weights.
#pragma once

#include "softmax_choice.cuh"

namespace eagle3 {

constexpr int kRouterChoices = 32; // of a row, at most

enum Score { kSoftmax, kSigmoid, kLogits }; // as kernels.routing.SCORES

struct Router {
  const bf16 *x;           // [rows, columns] residual stream
  const bf16 *gamma;       // [columns] or null: x comes normed
  const bf16 *gate;        // [experts, columns]
  const bf16 *bias;        // [experts] or null
  const float *correction; // [experts] or null, for the choice alone
  const bf16 *shared;      // [2 * width, columns], gates first, or null
  bf16 *normed;            // [rows, columns] where there is a gamma, or null
  bf16 *hidden;            // [rows, width] of the shared expert, or null
  uint64_t *packets;       // [groups of rows * 8, kMostExperts] scores
  unsigned *launches;      // [groups of rows] number of each group's next launch; one before the first
  unsigned *arrivals;      // [groups of rows], zero between passes
  int64_t *ids;            // [rows, choices]
  float *weights;          // [rows, choices]
  float eps, scale;
  int rows, columns, width, experts, choices, score, renormalise, groups, top_groups, group_best;
};

// What a group's rows score, in shared memory. Code is short where it can be: it is cold where it runs.
template <int kExperts, int kHeld>
struct RowScores {
  float of[kHeld][kExperts];
  uint32_t key[kHeld][kExperts]; // that sort like what the choice goes by; 0: no expert
};

// What a router makes of sums of products with rows whose norm's factor they lack: an expert's score before its correction, a unit
// of the shared expert. One piece of code for all kernels, and no rounding left to the compiler.
__device__ __forceinline__ float score_of(const Router &p, float factor, float sum, float bias) {
  const float logit = fmaf(factor, sum, bias);
  return p.score == kSigmoid ? __fdividef(1.f, 1.f + __expf(-logit)) : logit;
}
__device__ __forceinline__ bf16 unit_of(float factor, float gate, float up) {
  return __float2bfloat16(silu(__fmul_rn(factor, gate)) * factor * up);
}

// One row's experts in a warp: lane l holds l, l + 32, …
template <int kMany>
struct Candidates {
  Keys<kMany> key;

  static __device__ __forceinline__ int expert(int j) { return j * 32 + (static_cast<int>(threadIdx.x) & 31); }
  static __device__ __forceinline__ bool in_group(int e, int g, int size) { return e >= g * size && e < (g + 1) * size; }

  // Takes the best one out, lower ids first among equals; its key is left in `found`. 0: nothing was left.
  __device__ __forceinline__ int take(uint32_t &found) {
    found = key.best_below(0xffffffffu);
    unsigned id = 0xffffffffu;
#pragma unroll
    for (int j = kMany - 1; j >= 0; j--)
      if (key.of[j] == found) id = expert(j);
    id = __reduce_min_sync(kAll, id);
#pragma unroll
    for (int j = 0; j < kMany; j++)
      if (static_cast<unsigned>(expert(j)) == id) key.of[j] = 0;
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
      for (int j = 0; j < kMany; j++) members.key.of[j] = in_group(expert(j), g, size) ? key.of[j] : 0;
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
        if (in_group(expert(j), g, size)) key.of[j] = 0;
    }
  }

  // The best `choices` in turn, best first, one a lane. All that counts is latency: nothing but a comparison lies between two reductions
  // of keys, beside which the expert that the key before was of is told to all.
  __device__ __forceinline__ int choose(int choices) {
    const int lane = threadIdx.x & 31;
    uint32_t found = 0xffffffffu;
    int id = -1, own = -1;
#pragma unroll 1
    for (int k = 0; k < choices; k++) {
      const int before = __reduce_max_sync(kAll, id);
      found = key.best_below(found);
      if (lane == k - 1) own = before;
      id = -1;
#pragma unroll
      for (int j = 0; j < kMany; j++) id = key.of[j] == found ? expert(j) : id;
    }
    id = __reduce_max_sync(kAll, id);
    if (lane == choices - 1) own = id;
    if (key.count_from(found) != choices) // some are equal
#pragma unroll 1
      for (int k = 0; k < choices; k++) {
        id = take(found);
        if (lane == k) own = id;
      }
    return own;
  }
};

// Fills the scores of `live` rows as they come; correction: in shared memory. A thread's next two are on their way meanwhile.
template <int kThreads, int kExperts, int kHeld>
__device__ __forceinline__ void await_scores(const Router &p, RowScores<kExperts, kHeld> &s, const float *correction, int live, unsigned tag) {
  constexpr int kPairs = kExperts / 2;
  const uint64_t *const packets = p.packets + static_cast<size_t>(blockIdx.y) * kRows * kMostExperts;
  auto place = [&](int i) { return packets + i / kPairs * kMostExperts + i % kPairs * 2; }; // not further than the group's rows reach
  Packets v = load_packets(place(min(static_cast<int>(threadIdx.x), kRows * kPairs - 1)));
#pragma unroll 1
  for (int i = threadIdx.x; i < live * kPairs; i += kThreads) {
    const Packets next = load_packets(place(min(i + kThreads, kRows * kPairs - 1)));
    const int row = i / kPairs, e = 2 * (i % kPairs);
    const bool first = e < p.experts, second = e + 1 < p.experts;
#pragma unroll 1
    while ((first && !carries(v.a, tag)) || (second && !carries(v.b, tag))) v = load_packets(place(i));
    const float a = first ? value_of(v.a) : 0.f, b = second ? value_of(v.b) : 0.f;
    const uint32_t above = sortable(a + correction[e]), below = sortable(b + correction[e + 1]);
    *reinterpret_cast<float2 *>(&s.of[row][e]) = make_float2(a, b);
    *reinterpret_cast<uint2 *>(&s.key[row][e]) = make_uint2(first ? above : 0, second ? below : 0);
    v = next;
  }
}

// What a lane of a warp holds of a row's choice: expert `lane` in descending order, -1 past the last.
struct Chosen {
  int id;
  float weight;
};
__device__ __forceinline__ void write_chosen(const Router &p, int row, const Chosen &own) {
  const size_t at = (static_cast<size_t>(blockIdx.y) * kRows + row) * p.choices + (threadIdx.x & 31);
  if (own.id >= 0) p.ids[at] = own.id, p.weights[at] = own.weight;
}

// The choice of row `row` of the group, by one warp, from its scores, 32 * kMany experts at most. rehearsed: of nothing, and
// nobody is chosen, but the code has been fetched.
template <int kMany, int kExperts, int kHeld>
__device__ __forceinline__ Chosen choose_row(const Router &p, RowScores<kExperts, kHeld> &s, const float *correction, int row, bool rehearsed) {
  using All = Candidates<kMany>;
  const int lane = threadIdx.x & 31;
  float *const score = s.of[row];
  if (p.score == kSoftmax && !rehearsed) {
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
      s.key[row][e] = sortable(score[e] + correction[e]);
    }
  }
  All all;
#pragma unroll
  for (int j = 0; j < kMany; j++) all.key.of[j] = rehearsed ? All::expert(j) + 1 : s.key[row][All::expert(j)];
  if (p.groups > 1) all.keep_groups(p.experts / p.groups, p.groups, p.top_groups, p.group_best);
  const int found = all.choose(p.choices);
  __syncwarp(); // scores that other lanes have made shares
  const bool real = lane < p.choices;
  const int id = real ? found : 0;
  float own = real ? score[id] : 0.f;
  if (p.score == kLogits) {
    const float top = warp_max(real ? own : -INFINITY), raised = real ? __expf(own - top) : 0.f;
    own = __fdividef(raised, warp_sum(raised));
  }
  if (p.renormalise) own = __fdividef(own, warp_sum(own) + 1e-20f);
  return {real && !rehearsed ? id : -1, own * p.scale};
}

__device__ __forceinline__ Chosen choose_row(const Router &p, RowScores<kMostExperts, kRows> &s, const float *correction, int row, bool rehearsed) {
  if (p.experts <= 128) return choose_row<4>(p, s, correction, row, rehearsed);
  if (p.experts <= 256) return choose_row<8>(p, s, correction, row, rehearsed);
  if (p.experts <= 384) return choose_row<12>(p, s, correction, row, rehearsed);
  return choose_row<kMostExperts / 32>(p, s, correction, row, rehearsed);
}

} // namespace eagle3
