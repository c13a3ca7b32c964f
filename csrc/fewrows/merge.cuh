// The last steps of attend.cuh: in long tables ranks hand their sums of a vector to a few that merge them; what a query saw in all
// goes to the output.
#pragma once

#include "bulk.cuh"
#include "dealing.cuh"
#include "nodes.cuh"

namespace eagle3 {

// To the lane's columns of the output; a sink is a position of its own, without a value.
template <int kWidth>
__device__ __forceinline__ void finish(bf16 *to, Columns<kWidth> y, float top, float norm, float sink) {
  if (sink != -INFINITY) {
    const float base = fmaxf(top, sink), share = power_of_two(top - base);
    norm = fmaf(share, norm, power_of_two(sink - base));
#pragma unroll
    for (int j = 0; j < kWidth / 32; j++) y.v[j] *= share;
  }
  const float by = 1.f / norm;
#pragma unroll
  for (int j = 0; j < kWidth / 32; j += 2) // + 0: nothing may hang on the sign of a zero, which adding nothing may change
    *reinterpret_cast<uint32_t *>(to + j) = pack(y.v[j] * by + 0.f, y.v[j + 1] * by + 0.f);
}

// What ranks hand over are words of which none is zero when it has come, and which who has read them makes zero again: who looks sees
// from a word itself that it is there, without a fence or a counter. A float's bits are turned round; all ones, which no sum is,
// would be zero.
template <int kMany>
struct Words {
  uint32_t v[kMany];
  static __device__ __forceinline__ uint32_t of(float v) { return max(~__float_as_uint(v), 1u); }
  __device__ __forceinline__ float get(int j) const { return __uint_as_float(~v[j]); }
  __device__ __forceinline__ void load_if(const float *from, bool live) { // without a branch; where it is not live, they stay as they are
    if constexpr (kMany == 4)
      asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %5, 0;\n@live ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
                   : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
                   : "l"(from), "r"(static_cast<int>(live))
                   : "memory");
    else
      asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %3, 0;\n@live ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];}"
                   : "+r"(v[0]), "+r"(v[1])
                   : "l"(from), "r"(static_cast<int>(live))
                   : "memory");
  }
  __device__ __forceinline__ void store(float *to) const {
    if constexpr (kMany == 4)
      asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    else
      asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(v[0]), "r"(v[1]) : "memory");
  }
  __device__ __forceinline__ uint32_t least() const { // not zero: all of them have come; one comparison after another would wait for itself
    uint32_t least = v[0];
#pragma unroll
    for (int j = 1; j < kMany; j++) least = min(least, v[j]);
    return least;
  }
};

// Where the sums of one vector lie, a line for each rank: columns, then maximum, norm and six ones. `at` among the `held` of its block,
// blocks of a group of heads side by side. A line is whole sectors of the L2, each written by one instruction: of one that is written in
// part the L2 fetches the rest when it is read, behind all that is asked of the memory.
template <int kWidth>
struct Lines {
  static constexpr int kSector = 8, kLine = kWidth + kSector, kMany = kWidth / 32;
  float *first;
  __device__ __forceinline__ Lines(const Attention &p, int group, int held, int at)
      : first(p.sums + ((static_cast<size_t>(blockIdx.y) * p.groups + group) * held + at) * kDealt * kLine) {}
  // By a thread, long before they are handed over: they were written a layer ago, and who looks for them too early is not to wait for the
  // memory either.
  __device__ __forceinline__ void foresee(int rank) const { prefetch_bulk(first + rank * kLine, kLine * sizeof(float)); }
  // By a warp.
  __device__ __forceinline__ void hand_over(int rank, const Columns<kWidth> &y, float top, float norm) const {
    const int lane = threadIdx.x & 31;
    Words<kMany> words;
#pragma unroll
    for (int j = 0; j < kMany; j++) words.v[j] = words.of(y.v[j]);
    words.store(first + rank * kLine + lane * kMany);
    if (lane < 2) Words<4>{{lane ? 1u : words.of(top), lane ? 1u : words.of(norm), 1u, 1u}}.store(first + rank * kLine + kWidth + lane * 4);
  }
};

constexpr int kNear = 8, kQuarters = kDealt / kNear; // ranks that a warp merges; warps of a vector
static_assert(kNear == kRanks, "the first of them have all of a short table, whose ranks are merged in the same order");

// A vector by kQuarters warps: each merges the sums of kNear ranks in ascending order, those that has(rank) says have any, the first of
// them then all of theirs. shared: [kQuarters, kWidth] and 2 of each; barrier: a number that no other vector has.
template <int kWidth, class Has>
__device__ __forceinline__ void merge_ranks(const Lines<kWidth> &lines, float *shared, int barrier, Has has, bf16 *to, float sink) {
  using Sum = Columns<kWidth>;
  constexpr int kMany = kWidth / 32;
  const int lane = threadIdx.x & 31, quarter = threadIdx.x / 32 % kQuarters;
  const unsigned live = __ballot_sync(kAll, has(lane)), own = live >> quarter * kNear;
  static_assert(kDealt == 32, "a rank a lane");
  float *const line = lines.first + quarter * kNear * lines.kLine, *const stat = line + lane % kNear * lines.kLine + kWidth;
  const bool asks = own >> lane % kNear & 1; // whether the rank whose maximum and norm this lane asks for has any
  uint32_t none[kNear]; // all ones of ranks that have none
#pragma unroll
  for (int i = 0; i < kNear; i++) none[i] = own >> i & 1 ? 0u : ~0u;
  Words<kMany> words[kNear] = {}; // none has come
  Words<2> stats = {};
  uint32_t least;
  do { // without a branch: below conditions ptxas waits for one after the other
    stats.load_if(stat, asks && stats.least() == 0);
#pragma unroll
    for (int i = 0; i < kNear; i++) words[i].load_if(line + i * lines.kLine + lane * kMany, (words[i].least() | none[i]) == 0);
    least = asks ? stats.least() : 1;
#pragma unroll
    for (int i = 0; i < kNear; i++) least = min(least, words[i].least() | none[i]);
  } while (__any_sync(kAll, least == 0));
  // zero again, also where nothing has come; not at the end, which the next kernel waits for
  if (lane < 2 * kNear) Words<4>{}.store(line + lane / 2 * lines.kLine + kWidth + lane % 2 * 4);
#pragma unroll
  for (int i = 0; i < kNear; i++) Words<kMany>{}.store(line + i * lines.kLine + lane * kMany);
  const float own_top = asks ? stats.get(0) : -INFINITY, own_norm = asks ? stats.get(1) : 0.f; // of nothing
  float2 of_rank[kNear];
#pragma unroll
  for (int i = 0; i < kNear; i++) of_rank[i] = make_float2(__shfl_sync(kAll, own_top, i), __shfl_sync(kAll, own_norm, i));
  float top, norm;
  const auto all = [](int) { return true; };
  Sum y = merge_partials<kWidth, kNear>(top, norm, all, [&](int i) { return of_rank[i]; }, [&](int i) {
    Sum part; // zeros of none
#pragma unroll
    for (int j = 0; j < kMany; j++) part.v[j] = __uint_as_float(~(words[i].v[j] | none[i]));
    return part;
  });
  float2 *const tops = reinterpret_cast<float2 *>(shared + kQuarters * kWidth);
  *reinterpret_cast<Sum *>(shared + quarter * kWidth + lane * kMany) = y;
  if (lane == 0) tops[quarter] = make_float2(top, norm);
  meet_at(barrier, kQuarters * 32);
  if (!quarter) {
    y = merge_partials<kWidth, kQuarters>(top, norm, all, [&](int q) { return tops[q]; },
                                          [&](int q) { return *reinterpret_cast<const Sum *>(shared + q * kWidth + lane * kMany); });
    finish<kWidth>(to, y, top, norm, sink);
  }
}

} // namespace eagle3
