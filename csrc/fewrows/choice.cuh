// Which experts a group of rows chose, from ids and weights that a router wrote: the beginning of the packed experts' kernels.
#pragma once

#include "common.cuh"

namespace eagle3 {

constexpr int kGroupChosen = 64; // experts of a group of rows, at most: 8 rows of 8 choices

// What a group of rows chose: its experts in ascending order; of each, which rows (a bit each) with which weights.
struct GroupChoice {
  float weight[kGroupChosen][kRows];
  unsigned rows[kGroupChosen], mask[kGroupChosen];
  int list[kGroupChosen], id[kGroupChosen], fresh[kGroupChosen];
};

// Returns how many experts the block's group of rows chose. All threads call it; P: the parameters of a kernel, with its ids
// and weights. Work follows the pairs (64 at most), not the experts. Ids that are no expert's are passed over.
template <int kThreads, class P>
__device__ __forceinline__ int choose_rows(const P &p, GroupChoice &c) {
  constexpr int kOwn = kThreads < kGroupChosen ? kGroupChosen / kThreads : 1; // pairs of a thread
  const int first = blockIdx.y * kRows, pairs = min(kRows, p.rows - first) * p.choices;
  const size_t from = static_cast<size_t>(first) * p.choices;
  int e[kOwn];
  float w[kOwn];
#pragma unroll
  for (int k = 0; k < kOwn; k++) {
    const int i = threadIdx.x + k * kThreads;
    e[k] = -1, w[k] = 0.f;
    if (i >= pairs) continue;
    const int64_t own = load_long(p.ids + from + i);
    w[k] = load_float(p.weights + from + i);
    e[k] = own >= 0 && own < p.experts ? static_cast<int>(own) : -1;
    c.id[i] = e[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kOwn; k++) {
    const int i = threadIdx.x + k * kThreads;
    if (i >= pairs) continue;
    unsigned mask = 0;
    bool fresh = e[k] >= 0;
#pragma unroll 1
    for (int j = 0, row = 0, left = p.choices; j < pairs; j++) {
      if (c.id[j] == e[k]) mask |= 1u << row, fresh &= j >= i;
      if (--left == 0) left = p.choices, row++;
    }
    c.mask[i] = mask, c.fresh[i] = fresh;
  }
  __syncthreads();
  int count = 0;
#pragma unroll 4
  for (int j = 0; j < pairs; j++) count += c.fresh[j];
#pragma unroll
  for (int k = 0; k < kOwn; k++) {
    const int i = threadIdx.x + k * kThreads;
    if (i >= pairs || e[k] < 0) continue;
    int place = 0;
#pragma unroll 2
    for (int j = 0; j < pairs; j++) place += c.fresh[j] && c.id[j] < e[k];
    c.weight[place][i / p.choices] = w[k];
    if (c.fresh[i]) c.list[place] = e[k], c.rows[place] = c.mask[i];
  }
  __syncthreads();
  return count;
}

} // namespace eagle3
