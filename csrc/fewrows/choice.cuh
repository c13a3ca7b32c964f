// Which experts a group of rows chose, from ids and weights that a router wrote: the beginning of the packed experts' kernels.
#pragma once

#include "common.cuh"

namespace eagle3 {

constexpr int kGroupChosen = 64;     // experts of a group of rows, at most: 8 rows of 8 choices
constexpr int kGroupChoices = 8;     // of a row, at most

// What a group of rows chose: its experts in ascending order; of each, which rows (a bit each).
struct GroupChoice {
  uint8_t rank[kGroupChosen][kRows]; // of an expert among those of a row that chose it
  int list[kGroupChosen], id[kGroupChosen], count;
  unsigned rows[kGroupChosen];
  alignas(16) unsigned bits[kMostExperts / 32];
  float weight[kRows][kGroupChoices]; // of a row's own, in ascending order of the experts
  uint8_t place[kRows][kGroupChoices], owns[kRows]; // their places in `list`; how many they are

  // Before `take`, with a barrier between them.
  template <int kThreads>
  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kGroupChosen; i += kThreads) {
      rows[i] = 0;
      if (i < kMostExperts / 32) bits[i] = 0;
    }
  }
  // Pair i of the group is expert e, -1 for none.
  __device__ __forceinline__ void note(int i, int e) {
    id[i] = e;
    if (e >= 0) atomicOr(bits + e / 32, 1u << e % 32);
  }
};

// The (row, choice) pairs of the block's group that a thread takes care of: asked for at once, needed later.
template <int kThreads>
struct OwnPairs {
  static constexpr int kOwn = kThreads < kGroupChosen ? kGroupChosen / kThreads : 1;
  int e[kOwn], row[kOwn];
  float w[kOwn];
  __device__ __forceinline__ OwnPairs() {}
  // P: the parameters of a kernel, with ids and weights of its rows. What needs no load comes before the wait.
  template <class P>
  __device__ __forceinline__ explicit OwnPairs(const P &p) {
    const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
#pragma unroll
    for (int k = 0; k < kOwn; k++) {
      const unsigned i = threadIdx.x + k * kThreads, r = i / static_cast<unsigned>(p.choices);
      row[k] = static_cast<int>(r) < live ? static_cast<int>(r) : -1;
    }
  }
  // Ids that are no expert's are passed over.
  template <class P>
  __device__ __forceinline__ void load(const P &p) {
    const size_t from = static_cast<size_t>(blockIdx.y) * kRows * p.choices + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kOwn; k++) {
      e[k] = -1, w[k] = 0.f;
      if (row[k] < 0) continue;
      const int64_t id = load_long(p.ids + from + k * kThreads);
      w[k] = load_float(p.weights + from + k * kThreads);
      e[k] = id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
    }
  }
  // Of a choice that was noted in this launch.
  __device__ __forceinline__ void take(const GroupChoice &c) {
#pragma unroll
    for (int k = 0; k < kOwn; k++) e[k] = row[k] < 0 ? -1 : c.id[threadIdx.x + k * kThreads], w[k] = 0.f;
  }
};

// Returns how many experts the block's group of rows chose. All threads call it, after a barrier that follows the notes of their
// pairs. An expert's place is the number of set bits before its own: no loop over the pairs. kOrdered: also each row's own experts
// in ascending order.
template <int kThreads, bool kOrdered, class P>
__device__ __forceinline__ int list_chosen(const P &p, const OwnPairs<kThreads> &own, GroupChoice &c) {
#pragma unroll
  for (int k = 0; k < own.kOwn; k++) {
    const int i = threadIdx.x + k * kThreads, e = own.e[k], row = own.row[k];
    if (row < 0) continue;
    int place = 0, all = 0;
#pragma unroll
    for (int word = 0; word < kMostExperts / 32; word++) {
      const unsigned bits = c.bits[word];
      all += __popc(bits);
      if (word <= e / 32) place += __popc(word < e / 32 ? bits : bits & ((1u << (e & 31)) - 1));
    }
    if (i == 0) c.count = all;
    if (e >= 0) c.list[place] = e, atomicOr(c.rows + place, 1u << row);
    if constexpr (kOrdered) {
      int rank = 0, owns = 0;
#pragma unroll
      for (int j = 0; j < kGroupChoices; j++) {
        if (j >= p.choices) continue;
        const int other = c.id[row * p.choices + j];
        owns += other >= 0, rank += other >= 0 && other < e;
      }
      c.owns[row] = static_cast<uint8_t>(owns); // the same from every pair of the row
      if (e < 0) continue;
      c.weight[row][rank] = own.w[k];
      c.place[row][rank] = static_cast<uint8_t>(place), c.rank[place][row] = static_cast<uint8_t>(rank);
    }
  }
  __syncthreads();
  return c.count;
}

// The same of ids and weights that were loaded.
template <int kThreads, bool kOrdered, class P>
__device__ __forceinline__ int choose_rows(const P &p, const OwnPairs<kThreads> &own, GroupChoice &c) {
#pragma unroll
  for (int k = 0; k < own.kOwn; k++)
    if (own.row[k] >= 0) c.note(threadIdx.x + k * kThreads, own.e[k]);
  __syncthreads();
  return list_chosen<kThreads, kOrdered>(p, own, c);
}

} // namespace eagle3
