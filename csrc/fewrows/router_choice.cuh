// Which experts a row chooses by a router of any kind, in one warp, and their weights.
#pragma once

#include "softmax_choice.cuh"

namespace eagle3 {

constexpr int kRouted = 512;      // experts at most
constexpr int kRouterChoices = 32; // of a row, at most

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
  uint64_t *packets;       // [groups of rows * 8, kRouted] scores
  unsigned *launches;      // [groups of rows] number of each group's next launch; one before the first
  unsigned *arrivals;      // [groups of rows], zero between passes
  int64_t *ids;            // [rows, choices]
  float *weights;          // [rows, choices]
  float eps, scale;
  int rows, columns, width, experts, choices, score, renormalise, groups, top_groups, group_best;
};

// Where a group's rows are chosen, in shared memory.
struct RowScores {
  float of[kRows][kRouted];
  int chosen[kRows][kRouterChoices]; // experts, best first
};

// One row's experts in a warp, a lane's kMany of them in pairs of neighbours. Loops are short code: it is cold where it runs.
template <int kMany>
struct Candidates {
  Keys<kMany> key; // sort like what the choice goes by; 0: no expert

  static __device__ __forceinline__ int expert(int j) { return j / 2 * 64 + 2 * (static_cast<int>(threadIdx.x) & 31) + (j & 1); }
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

  // The best `choices` in turn, best first. All that counts is latency: nothing but a comparison lies between two reductions.
  __device__ __forceinline__ void choose(int choices, int *chosen) {
    uint32_t found = 0xffffffffu;
#pragma unroll 1
    for (int k = 0; k < choices; k++) {
      found = key.best_below(found);
      int id = -1;
#pragma unroll
      for (int j = 0; j < kMany; j++) id = key.of[j] == found ? expert(j) : id;
      if (id >= 0) chosen[k] = id;
    }
    if (key.count_from(found) != choices) { // some are equal
      __syncwarp();
#pragma unroll 1
      for (int k = 0; k < choices; k++) {
        const int id = take(found);
        if ((threadIdx.x & 31) == 0) chosen[k] = id;
      }
    }
    __syncwarp();
  }
};

// A lane's scores of a row, which are waited for. from: the row's packets.
template <int kMany>
__device__ __forceinline__ void await_scores(const Router &p, const uint64_t *from, unsigned tag, float (&value)[kMany]) {
  bool here;
  do {
    here = true;
#pragma unroll
    for (int j = 0; j < kMany; j += 2) {
      const int e = Candidates<kMany>::expert(j);
      const Packets v = load_packets(from + e); // without a branch: all are under way before the first one is looked at
      here &= (e >= p.experts || carries(v.a, tag)) & (e + 1 >= p.experts || carries(v.b, tag));
      value[j] = value_of(v.a), value[j + 1] = value_of(v.b);
    }
  } while (!__all_sync(kAll, here));
}

// Ids and weights of row `row` of the group, by one warp, 32 * kMany experts at most. correction: in shared memory. rehearsed:
// nothing is waited for and nothing written, but the code has been fetched.
template <int kMany>
__device__ __forceinline__ void choose_row(const Router &p, RowScores &s, const float *correction, int row, unsigned tag, bool rehearsed) {
  using All = Candidates<kMany>;
  const int lane = threadIdx.x & 31;
  const size_t at = static_cast<size_t>(blockIdx.y) * kRows + row;
  float *const score = s.of[row], value[kMany];
#pragma unroll
  for (int j = 0; j < kMany; j++) value[j] = static_cast<float>(All::expert(j));
  if (!rehearsed) await_scores<kMany>(p, p.packets + at * kRouted, tag, value);
  if (p.score == kSoftmax) {
    float top = -INFINITY, sum = 0.f;
#pragma unroll
    for (int j = 0; j < kMany; j++)
      if (All::expert(j) < p.experts) top = fmaxf(top, value[j]);
    top = warp_max(top);
#pragma unroll
    for (int j = 0; j < kMany; j++)
      if (All::expert(j) < p.experts) sum += value[j] = __expf(value[j] - top);
    const float share = __fdividef(1.f, warp_sum(sum));
#pragma unroll
    for (int j = 0; j < kMany; j++) value[j] *= share;
  }
  All all;
#pragma unroll
  for (int j = 0; j < kMany; j++) {
    const int e = All::expert(j);
    score[e] = value[j];
    const uint32_t key = sortable(value[j] + correction[e]);
    all.key.of[j] = e < p.experts ? key : 0;
  }
  if (p.groups > 1) all.keep_groups(p.experts / p.groups, p.groups, p.top_groups, p.group_best);
  all.choose(p.choices, s.chosen[row]);
  const bool real = lane < p.choices;
  const int id = real ? s.chosen[row][lane] : 0;
  float own = real ? score[id] : 0.f;
  if (p.score == kLogits) {
    const float top = warp_max(real ? own : -INFINITY), raised = real ? __expf(own - top) : 0.f;
    own = __fdividef(raised, warp_sum(raised));
  }
  if (p.renormalise) own = __fdividef(own, warp_sum(own) + 1e-20f);
  if (!rehearsed && lane == 0 && row == 0) p.launches[blockIdx.y] = tag + 1; // all blocks have read it: their scores are here
  if (!real || rehearsed) return;
  p.ids[at * p.choices + lane] = id;
  p.weights[at * p.choices + lane] = own * p.scale;
}

__device__ __forceinline__ void choose_row(const Router &p, RowScores &s, const float *correction, int row, unsigned tag, bool rehearsed) {
  if (p.experts <= 128)
    choose_row<4>(p, s, correction, row, tag, rehearsed);
  else if (p.experts <= 256)
    choose_row<8>(p, s, correction, row, tag, rehearsed);
  else if (p.experts <= 384)
    choose_row<12>(p, s, correction, row, tag, rehearsed);
  else
    choose_row<kRouted / 32>(p, s, correction, row, tag, rehearsed);
}

} // namespace eagle3
