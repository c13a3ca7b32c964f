// What attend.cuh is called with, and the nodes past the prefix: rows of this pass and those that an earlier pass over the same
// tree left in the cache.
#pragma once

#include "common.cuh"
#include "dealing.cuh"
#include "fold.cuh"

namespace eagle3 {

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
  float *sums;              // [kHanded, kDealt, Dh + 8] of long tables: what ranks hand over, zeros, and zeros again when it is done
  float eps, scale;         // scale: of the softmax, times log2(e)
  int t, heads, groups, turned, columns, table, page, window, slots;
};

// Head vectors that a warp norms and turns at a time: their loads are all in flight before the first is used.
constexpr int kTogether = 2;

// Cosines then sines of one position, as the lanes need them: columns j * 32 + lane.
template <int kWidth>
__device__ __forceinline__ void load_angles(float (&angle)[kWidth / 32], const Attention &p, int position) {
  const float *from = p.cos_sin + static_cast<int64_t>(position) * p.turned + (threadIdx.x & 31);
#pragma unroll
  for (int j = 0; j < kWidth / 32; j++) angle[j] = j * 32 < p.turned ? from[j * 32] : 0.f;
}

// What a block knows of the nodes: rows of the pass, rows that earlier passes over the same tree left, paths of its own rows.
template <int kBlock>
struct Nodes {
  uint8_t path[kBlock][kTile]; // node at each depth
  unsigned long long bits[kBlock]; // nodes on it
  int last_of[kBlock];         // position of each row of the block
  int slot_of[kTile];          // of the cache, for each node; -1: there is none
  int8_t node_of[kTile];       // of each row of the pass, -1: padding
  int position_of[kTile];      // of RoPE, of each row of the pass
  unsigned long long wanted, present; // nodes on some path of the block; nodes that are rows of the pass
  unsigned long long broken;   // nodes whose key or value is not finite
  int leader[kParts];          // of a part's rows: the one on whose path the others' lie as far as they go; -1: there is none
  int end;                     // past the last position that a query of the block sees, and past the first node's

  // Of those that the block may need, the highest and one.
  __device__ __forceinline__ int count() const { return kTile - __clzll(static_cast<long long>(wanted | present)); }

  // What a thread reads that needs no prefix: index and position of the pass's row of its number, ancestors of its warp's row.
  struct Asked {
    int64_t index, position;
    uint64_t bits;
  };
  static __device__ __forceinline__ uint64_t bits_of(const Attention &p, int64_t line0, int row) {
    return p.tree ? static_cast<uint64_t>(load_long(p.tree + line0 + row)) : (2ull << row) - 1ull;
  }
  static __device__ __forceinline__ Asked ask(const Attention &p, int64_t line0, int first_row, int rows) {
    const int64_t line = line0 + min(static_cast<int>(threadIdx.x), p.t - 1);
    return {load_long(p.index + line), load_long(p.positions + line), bits_of(p, line0, first_row + min(static_cast<int>(threadIdx.x >> 5), rows - 1))};
  }

  // Threads of the block do it together, between two barriers of its own.
  __device__ __forceinline__ void read(const Attention &p, const Asked &asked, int64_t line0, int first_row, int rows, int prefix,
                                       const int *pages) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) wanted = present = broken = 0, end = prefix + 1;
    __syncthreads();
    if (threadIdx.x < kTile) {
      const unsigned row = prefix + threadIdx.x, page = row / static_cast<unsigned>(p.page);
      const bool inside = page < static_cast<unsigned>(p.columns);
      slot_of[threadIdx.x] = inside ? pages[page] * p.page + static_cast<int>(row - page * p.page) : -1;
      if (static_cast<int>(threadIdx.x) < p.t) {
        const int64_t node = asked.index - prefix; // below zero: padding
        position_of[threadIdx.x] = static_cast<int>(asked.position);
        node_of[threadIdx.x] = static_cast<int8_t>(node >= 0 && node < kTile ? node : -1);
        if (node >= 0 && node < kTile) atomicOr(&present, 1ull << node);
      }
    }
    for (int r = warp; r < rows; r += blockDim.x / 32) {
      const uint64_t bits = r == warp ? asked.bits : bits_of(p, line0, first_row + r);
      const uint64_t below = (1ull << lane) - 1ull;
      if (bits >> lane & 1ull) path[r][__popcll(bits & below)] = static_cast<uint8_t>(lane);
      if (bits >> (lane + 32) & 1ull) path[r][__popcll(bits & ((below << 32) | 0xffffffffull))] = static_cast<uint8_t>(lane + 32);
      if (lane == 0) {
        last_of[r] = prefix + __popcll(bits) - 1;
        this->bits[r] = bits;
        atomicMax(&end, last_of[r] + 1);
        atomicOr(&wanted, static_cast<unsigned long long>(bits));
      }
    }
    __syncthreads();
  }

  // By a thread a part of the block, rows [first, last), once they are read and before nodes are kept.
  __device__ __forceinline__ void lead(int part, int first, int last) {
    int longest = first;
#pragma unroll 1
    for (int r = first + 1; r < last; r++)
      if (last_of[r] > last_of[longest]) longest = r;
    bool one = true;
#pragma unroll 1
    for (int r = first; r < last; r++)
      if (bits[r]) one &= !((bits[longest] ^ bits[r]) << __clzll(static_cast<long long>(bits[r])));
    leader[part] = one ? longest : -1;
  }
};

// What a warp needs of its first row of keep_nodes and that no kernel before this one writes.
template <int kWidth>
struct NodeTurn {
  uint32_t gain[kWidth / 32]; // as they are stored: made numbers before the wait, they would be waited for there
  float angle[kWidth / 32];
  static __device__ __forceinline__ int first_row() { return (blockDim.x >> 5) - 1 - (threadIdx.x >> 5); } // odd tiles are often empty
  template <int kBlock>
  __device__ __forceinline__ void load(const Attention &p, const Nodes<kBlock> &nodes) {
#pragma unroll
    for (int j = 0; j < kWidth / 32; j++) gain[j] = p.k_gain ? load_half(p.k_gain + j * 32 + (threadIdx.x & 31)) : 0x3f80u;
    load_angles<kWidth>(angle, p, nodes.position_of[min(first_row(), p.t - 1)]);
  }
};

// Keys (normed, turned) and values of the rows of the pass, where their nodes lie in shared memory, and in the cache if this
// block writes it. The last `threads` of the block do it together, half of them or all.
template <int kWidth, bool kBoxed, int kHalf, int kBlock>
__device__ __forceinline__ void keep_nodes(const Attention &p, Nodes<kBlock> &nodes, const NodeTurn<kWidth> &own, int threads, bf16 *memory,
                                           int node0, int64_t line0, int group, bool writes) {
  constexpr int kMany = kWidth / 32, kChunks = kWidth / 8;
  const int lane = threadIdx.x & 31, warps = threads >> 5, warp = own.first_row();
  const int own_line = threadIdx.x ^ 6 * 32; // of values: up to four rows by two warps that turn no queries
  const int lanes = (p.heads + 2 * p.groups) * kWidth, value_lines = p.t * kChunks;
  const bf16 *const keys = p.projected + line0 * lanes + (p.heads + group) * kWidth, *const values = keys + p.groups * kWidth;
  auto value_of = [&](int i) { return load_rows(values + static_cast<int64_t>(i / kChunks) * lanes + i % kChunks * 8); };
  float gain[kMany];
#pragma unroll
  for (int j = 0; j < kMany; j++) {
    uint32_t raw = own.gain[j];
    asm volatile("" : "+r"(raw));
    gain[j] = low(raw);
  }
  uint4 v = make_uint4(0, 0, 0, 0);
  if (own_line < value_lines) v = value_of(own_line); // beside the keys
#pragma unroll 1
  for (int first = warp; first < p.t; first += kTogether * warps) {
    float key[kTogether][kMany], angle[kTogether][kMany];
#pragma unroll
    for (int j = 0; j < kMany; j++) angle[0][j] = own.angle[j];
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int row = min(first + i * warps, p.t - 1);
      if (i || first != warp) load_angles<kWidth>(angle[i], p, nodes.position_of[row]);
#pragma unroll
      for (int j = 0; j < kMany; j++) key[i][j] = load_bf16(keys + static_cast<int64_t>(row) * lanes + j * 32 + lane);
    }
#pragma unroll 1
    for (int row = first; row < min(first + kTogether * warps, p.t); row += warps) {
      const int node = nodes.node_of[row];
      if (node >= 0) {
        turn<kWidth, kHalf>(key[0], gain, p.k_gain != nullptr, angle[0], p.eps);
        const int slot = writes ? nodes.slot_of[node] : -1;
        bf16 *const to = p.keys + (static_cast<int64_t>(slot) * p.groups + group) * kWidth + lane;
#pragma unroll
        for (int j = 0; j < kMany; j++) {
          if (slot >= 0) to[j * 32] = __float2bfloat16(key[0][j]);
          if (!(fabsf(key[0][j]) < INFINITY)) key[0][j] = 0.f, atomicOr(&nodes.broken, 1ull << node); // 0 * NaN is NaN: only who sees it may get it
          memory[Layout<kWidth, kBoxed>::key(node0 + node, j * 32 + (lane & ~7)) + (lane & 7)] = __float2bfloat16(key[0][j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kMany; j++) key[0][j] = key[kTogether - 1][j], angle[0][j] = angle[kTogether - 1][j];
    }
  }
#pragma unroll 1
  for (int i = own_line; i < value_lines; i += threads) { // values as they are, 16 bytes a thread
    if (i >= threads) v = value_of(i);
    const int node = nodes.node_of[i / kChunks], c = i % kChunks * 8;
    if (node < 0) continue;
    const int slot = writes ? nodes.slot_of[node] : -1;
    if (slot >= 0) *reinterpret_cast<uint4 *>(p.values + (static_cast<int64_t>(slot) * p.groups + group) * kWidth + c) = v;
    uint32_t *word = reinterpret_cast<uint32_t *>(&v);
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (!(fabsf(low(word[j])) < INFINITY) || !(fabsf(high(word[j])) < INFINITY)) word[j] = 0, atomicOr(&nodes.broken, 1ull << node);
    *reinterpret_cast<uint4 *>(memory + Layout<kWidth, kBoxed>::value(node0 + kTile + node, c)) = v;
  }
}

} // namespace eagle3
