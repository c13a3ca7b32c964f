// Which experts the rows of a block chose, by softmax over a router's logits: what experts.cuh's kernels share.
#pragma once

#include "packets.cuh"

namespace eagle3 {

constexpr int kExperts = 512; // at most
constexpr int kChoices = 8;   // of a row, at most

struct Experts {
  const bf16 *x;        // [rows, columns] residual stream
  const bf16 *gamma;    // [columns] or null: x comes normed
  const bf16 *router;   // [experts, columns]
  const bf16 *gate_up;  // [experts, 2 * width, columns], gates first
  const bf16 *down;     // [experts, columns, width]
  float *logits;        // [rows, experts] scratch where there are more rows than one block of them
  uint64_t *packets;    // [16, kExperts] logits of a launch that routes its one block of rows itself
  unsigned *launch;     // [1] number of the next such launch; one before the first
  int *chosen;          // [blocks of rows, 1 + kChosen] scratch: how many experts a block's rows chose, and which
  float *shares;        // [blocks of rows, kChosen, kHeld] scratch: of each of those experts in each row; -1: none
  bf16 *hidden;         // [blocks of rows, experts of a block, its rows, width] scratch
  const bf16 *residual; // [rows, columns] or null
  bf16 *y;              // [rows, columns]
  float eps;
  int rows, columns, width, experts, choices, renormalise;
};

// The rows of block y: up to kGroups groups of 8.
template <int kGroups>
struct Block {
  static constexpr int kHeld = kRows * kGroups, kChosen = kHeld * kChoices; // rows; experts, at most
  const int first, live;
  __device__ __forceinline__ explicit Block(const Experts &p)
      : first(blockIdx.y * kHeld), live(min(kHeld, p.rows - static_cast<int>(blockIdx.y) * kHeld)) {}
};

// A lane's kMany neighbours of a row's logits: from memory, or from packets, which are waited for.
template <int kMany>
__device__ __forceinline__ void load_logits(const Experts &p, int row, float (&value)[kMany]) {
  const int first = (static_cast<int>(threadIdx.x) & 31) * kMany;
  const float *from = p.logits + static_cast<size_t>(row) * p.experts + first;
#pragma unroll
  for (int j = 0; j < kMany; j++) value[j] = first + j < p.experts ? load_float(from + j) : 0.f;
}
template <int kMany>
__device__ __forceinline__ void await_logits(const Experts &p, int row, unsigned tag, float (&value)[kMany]) {
  const int first = (static_cast<int>(threadIdx.x) & 31) * kMany;
  const uint64_t *from = p.packets + row * kExperts + first;
  bool here;
  do {
    here = true;
#pragma unroll
    for (int j = 0; j < kMany; j += 2) {
      if (first + j >= p.experts) continue;
      const Packets v = load_packets(from + j);
      here &= carries(v.a, tag) && (first + j + 1 >= p.experts || carries(v.b, tag));
      value[j] = value_of(v.a), value[j + 1] = value_of(v.b);
    }
  } while (!__all_sync(kAll, here));
}

// The choice of one row by one warp, 32 * kMany experts at most; value: logits of a lane's kMany neighbours. The best `choices`
// of them, lower ids first among equals, weights by softmax. Writes weight[e] for chosen experts, the others keep what they hold
// (-1), and sets their bits.
template <int kMany>
__device__ __forceinline__ void choose(const Experts &p, const float (&value)[kMany], float *weight, unsigned *bits) {
  const int lane = threadIdx.x & 31;
  uint32_t key[kMany], most = 0;
#pragma unroll
  for (int j = 0; j < kMany; j++) {
    key[j] = lane * kMany + j < p.experts ? sortable(value[j]) : 0; // a row of NaN still chooses experts that exist
    most = max(most, key[j]);
  }
  uint32_t found = __reduce_max_sync(kAll, most), best = 0;
  const float top = sorted_value(found);
  float all = 0.f;
  if (!p.renormalise) {
#pragma unroll
    for (int j = 0; j < kMany; j++) all += key[j] ? __expf(sorted_value(key[j]) - top) : 0.f;
    all = warp_sum(all);
  }
  unsigned own = 0; // of this lane's neighbours, those that are chosen
#pragma unroll 1
  for (int k = 0; k < p.choices; k++) {
    if (lane == k) best = found;
    const unsigned having = __ballot_sync(kAll, most == found); // lanes; ids ascend from one to the next
    bool open = lane == __ffs(having) - 1;
    most = 0;
#pragma unroll
    for (int j = 0; j < kMany; j++) { // its first one
      const bool taken = open && key[j] == found && !(own >> j & 1u);
      own |= static_cast<unsigned>(taken) << j, open &= !taken;
      most = max(most, own >> j & 1u ? 0u : key[j]);
    }
    found = __reduce_max_sync(kAll, most);
  }
  float sum = lane < p.choices ? __expf(sorted_value(best) - top) : 0.f;
#pragma unroll
  for (int o = 1; o < kChoices; o <<= 1) sum += __shfl_xor_sync(kAll, sum, o);
  sum = __shfl_sync(kAll, p.renormalise ? sum : all, 0);
#pragma unroll
  for (int j = 0; j < kMany; j++) {
    if (!(own >> j & 1u)) continue;
    const int e = lane * kMany + j;
    weight[e] = __expf(sorted_value(key[j]) - top) / sum;
    atomicOr(bits + (e >> 5), 1u << (e & 31));
  }
}

// What a block's rows chose.
template <int kGroups, int kMany>
struct Choice {
  static constexpr int kChosen = Block<kGroups>::kChosen, kHeld = Block<kGroups>::kHeld;
  int list[kChosen];    // experts, ascending
  unsigned bits[kMany]; // the same, a bit each

  // Nothing is chosen yet: what may be done before the logits are there. weight: [rows][experts], -1: not chosen.
  __device__ __forceinline__ void clear(const Experts &p, float *weight) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kHeld * p.experts; i += blockDim.x) weight[i] = -1.f;
    if (threadIdx.x < kMany) bits[threadIdx.x] = 0;
  }
  // Returns how many experts. All threads call it, after a barrier that follows `clear`; load(row of the block, value): logits.
  template <class Load>
  __device__ __forceinline__ int make(const Experts &p, const Block<kGroups> &block, float *weight, Load load) {
#pragma unroll 1
    for (int r = threadIdx.x >> 5; r < block.live; r += blockDim.x >> 5) {
      float value[kMany] = {};
      load(r, value);
      choose<kMany>(p, value, weight + r * p.experts, bits);
    }
    __syncthreads();
    int count = 0;
#pragma unroll
    for (int i = 0; i < kMany; i++) { // an expert a thread
      const unsigned word = bits[i], e = threadIdx.x - i * 32 % 256;
      if (e < 32 && word >> e & 1u) list[count + __popc(word & ((1u << e) - 1u))] = i * 32 + e;
      count += __popc(word);
    }
    __syncthreads();
    return count;
  }
  // By one block, for the next kernel, which may begin when all blocks let it: until then it is where all can read it.
  __device__ __forceinline__ void publish(const Experts &p, const float *weight, int count) const {
    int *const to = p.chosen + static_cast<size_t>(blockIdx.y) * (1 + kChosen);
    float *const shares = p.shares + static_cast<size_t>(blockIdx.y) * kChosen * kHeld;
    if (threadIdx.x == 0) to[0] = count;
    for (int u = threadIdx.x; u < count; u += blockDim.x) to[1 + u] = list[u];
    for (int i = threadIdx.x; i < count * kHeld; i += blockDim.x) shares[i] = weight[i % kHeld * p.experts + list[i / kHeld]];
    __threadfence();
    __syncthreads();
  }
};

} // namespace eagle3
