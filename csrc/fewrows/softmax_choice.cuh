// Which experts the rows of a block chose, by softmax over a router's logits: what experts.cuh's kernels share.
#pragma once

#include "packets.cuh"

namespace eagle3 {

constexpr int kChoices = 8;   // of a row, at most
constexpr int kPackets = 16 * kMostExperts;
constexpr int kEarly = 4;     // experts of 2 to 8 rows whose activations are multiplied before gate and up have ended
constexpr int kWidest = 1024; // expert that a kernel is built for
constexpr int kEarlyNumbers = kEarly * kRows * kWidest; // of all early ones

struct Experts {
  const bf16 *x;        // [rows, columns] residual stream
  const bf16 *gamma;    // [columns] or null: x comes normed
  const bf16 *router;   // [experts, columns]
  const bf16 *gate_up;  // [experts, 2 * width, columns], gates first
  const bf16 *down;     // [experts, columns, width]
  float *logits;        // [rows, experts] scratch where there are more rows than one block of them
  uint64_t *packets;    // [kPackets] logits of a launch that routes its one block of rows itself, in Board's copies
  unsigned *launch;     // [1] number of the next such launch; one before the first
  int *chosen;          // [blocks of rows, 1 + kChosen] scratch: twice how many experts a block's rows chose, + `turn` % 2; which ones
  float *shares;        // [blocks of rows, kChosen, kHeld] scratch: of each of those experts in each row; -1: none
  bf16 *hidden;         // [blocks of rows, experts of a block, its rows, width] scratch
  bf16 *early;          // [2, kEarlyNumbers] those of the first experts, [kEarly, 8, width], in turn; all ones: has not come
  unsigned *turn;       // [1] of launches whose first experts are early
  const bf16 *residual; // [rows, columns] or null
  bf16 *y;              // [rows, columns]
  const char *following; // what the kernel behind these asks for first, or null
  float eps;
  int rows, columns, width, experts, choices, renormalise, ahead; // ahead: bytes of `following`
};

// The rows of block y: up to kGroups groups of 8.
template <int kGroups>
struct Block {
  static constexpr int kHeld = kRows * kGroups, kChosen = kHeld * kChoices; // rows; experts, at most
  const int first, live;
  __device__ __forceinline__ explicit Block(const Experts &p)
      : first(blockIdx.y * kHeld), live(min(kHeld, p.rows - static_cast<int>(blockIdx.y) * kHeld)) {}
};

// Where early activations lie in a turn. Who reads them knows from each value whether it has come: no number becomes all ones in
// bf16. The turn before makes them so.
inline __device__ bf16 *early_of(const Experts &p, unsigned turn) { return p.early + (turn & 1) * kEarlyNumbers; }
__device__ __forceinline__ void empty_early(const Experts &p, unsigned turn) {
  uint4 *const from = reinterpret_cast<uint4 *>(early_of(p, turn));
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kEarlyNumbers / 8; i += gridDim.x * blockDim.x)
    from[i] = make_uint4(kAll, kAll, kAll, kAll);
}
// Whether none of eight values is all ones: a half of ~w is zero where subtracting one from both borrows.
__device__ __forceinline__ bool have_come(const uint4 &v) {
  auto ones = [](uint32_t w) { return (~w - 0x10001u) & w; };
  return !((ones(v.x) | ones(v.y) | ones(v.z) | ones(v.w)) & 0x80008000u);
}

// Where packets lie: as many copies of a block of rows as there is room for, of which a block reads one. All blocks wait for all
// packets, and a line of the L2 answers one after another.
template <int kGroups, int kMany>
struct Board {
  static constexpr int kPitch = 32 * kMany, kCopies = kPackets / (Block<kGroups>::kHeld * kPitch);
  static_assert(kCopies * kGroups <= 8, "a warp a group and copy writes them");
  static __device__ __forceinline__ int place(int copy, int row) { return (copy * Block<kGroups>::kHeld + row) * kPitch; }
};

// A lane's kMany neighbours of a row's logits: from memory, or from packets, which are waited for.
template <int kMany>
__device__ __forceinline__ void load_logits(const Experts &p, int row, float (&value)[kMany]) {
  const int first = (static_cast<int>(threadIdx.x) & 31) * kMany;
  const float *from = p.logits + static_cast<size_t>(row) * p.experts + first;
#pragma unroll
  for (int j = 0; j < kMany; j++) value[j] = first + j < p.experts ? load_float(from + j) : 0.f;
}
template <int kGroups, int kMany>
__device__ __forceinline__ void await_logits(const Experts &p, int row, unsigned tag, float (&value)[kMany]) {
  const int first = (static_cast<int>(threadIdx.x) & 31) * kMany;
  using Copies = Board<kGroups, kMany>;
  const uint64_t *from = p.packets + Copies::place(blockIdx.x % Copies::kCopies, row) + first;
  Packets v[kMany / 2];
  bool here;
  do { // all of them on their way before the first one is looked at; those of no expert are memory too
#pragma unroll
    for (int j = 0; j < kMany / 2; j++) v[j] = load_packets(from + 2 * j);
    here = true;
#pragma unroll
    for (int j = 0; j < kMany / 2; j++) {
      here &= first + 2 * j >= p.experts || carries(v[j].a, tag);
      here &= first + 2 * j + 1 >= p.experts || carries(v[j].b, tag);
    }
  } while (!__all_sync(kAll, here));
#pragma unroll
  for (int j = 0; j < kMany / 2; j++) value[2 * j] = value_of(v[j].a), value[2 * j + 1] = value_of(v[j].b);
}

// A row's keys in a warp, a lane's kMany neighbours each.
template <int kMany>
struct Keys {
  uint32_t of[kMany];
  __device__ __forceinline__ uint32_t best_below(uint32_t limit) const {
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kMany; j++) most = max(most, of[j] < limit ? of[j] : 0);
    return __reduce_max_sync(kAll, most);
  }
  // The best key and the `count`th best, where so many are not below it; false: it has equals.
  __device__ __forceinline__ bool best_of(int count, uint32_t &best, uint32_t &least) const {
    if constexpr (kMany == 4) { // a lane's keys are sorted first, so that a step is a comparison with the first of them
      const uint32_t a = max(of[0], of[1]), b = min(of[0], of[1]), c = max(of[2], of[3]), d = min(of[2], of[3]);
      const uint32_t e = min(a, c), f = max(b, d);
      uint32_t first = max(a, c), second = max(e, f), third = min(e, f), fourth = min(b, d);
      best = least = __reduce_max_sync(kAll, first);
      int taken = 0;
#pragma unroll 1
      for (int k = 1;; k++) {
        const bool mine = first == least;
        taken += __popc(__ballot_sync(kAll, mine));
        if (mine) first = second, second = third, third = fourth, fourth = 0;
        if (k == count) break;
        least = __reduce_max_sync(kAll, first);
      }
      const bool more = __any_sync(kAll, first == least);
      return taken == count && !more;
    } else {
      best = least = best_below(0xffffffffu);
#pragma unroll 1
      for (int k = 1; k < count; k++) least = best_below(least);
      return count_from(least) == count;
    }
  }
  __device__ __forceinline__ int count_from(uint32_t least) const {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kMany; j++) count += of[j] >= least;
    return __reduce_add_sync(kAll, count);
  }
};

// `sortable` in fewer steps, for values that come from products: what is NaN becomes -inf, what is -0 becomes 0.
__device__ __forceinline__ uint32_t sortable_number(float v) {
  const int raw = __float_as_int(fmaxf(v, -INFINITY) + 0.f);
  return static_cast<uint32_t>(raw) ^ (static_cast<uint32_t>(raw >> 31) | 0x80000000u);
}

// How many bits are set below bit e.
__device__ __forceinline__ int count_below(const unsigned *bits, int e) {
  int count = __popc(bits[e / 32] & ((1u << (e & 31)) - 1u));
  for (int word = 0; word < e / 32; word++) count += __popc(bits[word]);
  return count;
}

// The choice of one row by one warp, 32 * kMany experts at most; value: logits of a lane's kMany neighbours. The best `choices`
// of them, lower ids first among equals; sets their bits in the row's and in all rows'. weight: null where nobody needs it, else
// those of the chosen experts in ascending order, by softmax. All that counts here is latency: nothing but a comparison lies
// between two reductions.
template <int kMany>
__device__ __forceinline__ void choose(const Experts &p, const float (&value)[kMany], float *weight, unsigned *row, unsigned *all) {
  static_assert(32 % kMany == 0, "a lane's neighbours have their bits in one word");
  const int lane = threadIdx.x & 31;
  Keys<kMany> key;
#pragma unroll
  for (int j = 0; j < kMany; j++) key.of[j] = lane * kMany + j < p.experts ? sortable_number(value[j]) : 0; // NaN too: experts that exist
  uint32_t best, least;
  const bool sure = key.best_of(p.choices, best, least);
  unsigned own = 0; // of this lane's neighbours, those that are chosen
  if (sure) {
#pragma unroll
    for (int j = 0; j < kMany; j++) own |= static_cast<unsigned>(key.of[j] >= least) << j;
  } else { // some are equal: the first ones of the last value
    least = best;
    while (key.count_from(least) < p.choices) least = key.best_below(least);
    int left = p.choices - key.count_from(least + 1);
#pragma unroll
    for (int j = 0; j < kMany; j++) left -= __popc(__ballot_sync(kAll, key.of[j] == least) & ((1u << lane) - 1u));
#pragma unroll
    for (int j = 0; j < kMany; j++) own |= static_cast<unsigned>(key.of[j] > least || (key.of[j] == least && left-- > 0)) << j;
  }
  if (own) atomicOr(all + lane * kMany / 32, own << (lane * kMany & 31)), atomicOr(row + lane * kMany / 32, own << (lane * kMany & 31));
  if (!weight) return;
  float share[kMany], sum = 0.f;
#pragma unroll
  for (int j = 0; j < kMany; j++) {
    share[j] = key.of[j] ? __expf(sorted_value(key.of[j]) - sorted_value(best)) : 0.f;
    if (!p.renormalise || (own >> j & 1u)) sum += share[j];
  }
  sum = __fdividef(1.f, warp_sum(sum));
  __syncwarp(); // the row's bits are set
  int place = count_below(row, lane * kMany);
#pragma unroll
  for (int j = 0; j < kMany; j++)
    if (own >> j & 1u) weight[place++] = share[j] * sum;
}

// What a block's rows chose.
template <int kGroups, int kMany>
struct Choice {
  static constexpr int kChosen = Block<kGroups>::kChosen, kHeld = Block<kGroups>::kHeld, kWarps = 8;
  unsigned bits[kMany], chose[kHeld * kMany]; // experts, a bit each: all rows', each row's
  uint16_t list[kWarps][kChosen];             // all rows', ascending; each warp writes its own and waits for no other
  float weight[kHeld][kChoices];              // of a row's, ascending: where the choice is published
  __device__ __forceinline__ int listed(int u) const { return list[threadIdx.x >> 5][u]; }
  __device__ __forceinline__ bool took(int row, int e) const { return chose[row * kMany + e / 32] >> (e & 31) & 1u; }

  // Nothing is chosen yet: what may be done before the logits are there.
  __device__ __forceinline__ void clear() {
    static_assert(kHeld * kMany <= kWarps * 32, "a word a thread");
    if (threadIdx.x < kMany) bits[threadIdx.x] = 0;
    if (threadIdx.x < kHeld * kMany) chose[threadIdx.x] = 0;
  }
  // Returns how many experts. All threads call it, after a barrier that follows `clear`; load(row of the block, value): logits.
  template <class Load>
  __device__ __forceinline__ int make(const Experts &p, const Block<kGroups> &block, bool publishes, Load load) {
#pragma unroll 1
    for (int r = threadIdx.x >> 5; r < block.live; r += kWarps) {
      float value[kMany] = {};
      load(r, value);
      choose<kMany>(p, value, publishes ? weight[r] : nullptr, chose + r * kMany, bits);
    }
    __syncthreads();
    const int first = (threadIdx.x & 31) * kMany; // of a lane's neighbours
    int count = 0, before = 0;
#pragma unroll
    for (int i = 0; i < kMany; i++) {
      if (i == first / 32) before = count + __popc(bits[i] & ((1u << (first & 31)) - 1u));
      count += __popc(bits[i]);
    }
    const unsigned own = bits[first / 32] >> (first & 31);
#pragma unroll
    for (int j = 0; j < kMany; j++)
      if (own >> j & 1u) list[threadIdx.x >> 5][before++] = first + j;
    __syncwarp();
    return count;
  }
  // By one block, for the next kernel, which may begin when all blocks let it: until then it is where all can read it.
  __device__ __forceinline__ void publish(const Experts &p, int count, unsigned turn) const {
    int *const to = p.chosen + static_cast<size_t>(blockIdx.y) * (1 + kChosen);
    float *const shares = p.shares + static_cast<size_t>(blockIdx.y) * kChosen * kHeld;
    if (threadIdx.x == 0) to[0] = 2 * count + static_cast<int>(turn & 1);
    for (int u = threadIdx.x; u < count; u += blockDim.x) to[1 + u] = listed(u);
    for (int i = threadIdx.x; i < count * kHeld; i += blockDim.x) {
      const int row = i % kHeld, e = listed(i / kHeld);
      shares[i] = took(row, e) ? weight[row][count_below(chose + row * kMany, e)] : -1.f;
    }
    __threadfence();
    __syncthreads();
  }
};

} // namespace eagle3
