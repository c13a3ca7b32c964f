// A router inside the launch of gate and up that follows it, for one group of rows, and beside it a shared expert's gate and up:
// blocks score some experts each, hand the scores to one another as packets, and every block chooses for itself. All blocks are
// resident at once. The sums are those of router.cuh's kernel, in its order.
#pragma once

#include <algorithm>

#include "packed_rows.cuh"

namespace eagle3 {

// Tiles of weight rows, 8 at most, dealt to the blocks in turn: experts first, evenly over the blocks that the shared expert leaves,
// then that one's gates and ups in turn.
struct RouteTiles {
  int each, routing, count; // experts of a tile; tiles of experts; all
  RouteTiles(const Router &r, int blocks) { // by the host: divisions are long code
    const int beside = (2 * r.width + 7) / 8, left = std::max(blocks - beside, 1);
    each = std::max(std::min((r.experts + left - 1) / left, 8), 1);
    routing = (r.experts + each - 1) / each, count = routing + beside;
  }
  __device__ __forceinline__ int rows(const Router &r, int tile) const {
    return tile < routing ? min(each, r.experts - tile * each) : min(8, 2 * r.width - (tile - routing) * 8);
  }
  __device__ __forceinline__ const bf16 *row(const Router &r, int tile, int i) const {
    if (tile < routing) return r.gate + static_cast<size_t>(tile * each + i) * r.columns;
    return r.shared + static_cast<size_t>((tile - routing) * 4 + i / 2 + (i & 1) * r.width) * r.columns;
  }
};

// Rows of which gate and up has kernels with a router.
constexpr bool route_inside(int columns) { return columns == 256 || columns == 2880 || columns == 7168; }
template <class P>
inline bool routes_inside(const P &p, const Router &r) {
  return r.gate && p.rows <= kRows && route_inside(p.columns) && r.experts <= 32 * P::Format::kCandidates;
}

// kMany: 32 times as many experts at most; kHeld: rows at most.
template <class F, int kColumns, int kWarps, int kSpans, int kMany, int kHeld>
struct InnerRouter {
  static constexpr int kThreads = kWarps * 32, kPieces = kSpans * 4, kExperts = kMany * 32;
  static constexpr int kSlice = kColumns / route_threads(kColumns), kSlices = route_threads(kColumns) / 32; // a sum's parts: pieces, parts
  static_assert(kPieces % kSlice == 0 && kSlices <= kWarps * (kPieces / kSlice), "a warp has whole parts");
  union Memory { // in shared memory, one after the other
    TileSums<kSlices> sums;
    RowScores<kExperts, kHeld> scores;
  };
  const RouteTiles tiles;
  const bf16 *first = nullptr; // the lane's columns of its row of the block's first tile
  float bias;
  uint4 w[kPieces]; // of a tile
  // Of the first tile a quarter is asked for before the wait, another one behind the rows, the rest when those have come: scores wait
  // for the rows first, and they come behind all that is under way (common.cuh, await_load).
  static constexpr int kEarly = kPieces / 4, kBeside = kPieces / 2;

  // Before the wait.
  __device__ __forceinline__ explicit InnerRouter(const Router &r, const RouteTiles &tiles) : tiles(tiles) {
    if (static_cast<int>(blockIdx.x) < tiles.count) first = of_lane(r, blockIdx.x);
    fetch_first<0, kEarly>();
  }
  // Before `choose`, which awaits the copies. corrections: [kExperts].
  __device__ __forceinline__ void look_up(const Router &r, float *corrections) {
    bias = bias_of(r, blockIdx.x);
#pragma unroll
    for (int e = threadIdx.x; e < kExperts; e += kThreads) {
      if (r.correction && e < r.experts)
        copy_word(reinterpret_cast<int *>(corrections + e), reinterpret_cast<const int *>(r.correction + e));
      else
        corrections[e] = 0.f;
    }
    commit_copies();
  }
  // Of the expert whose scores this thread adds.
  __device__ __forceinline__ float bias_of(const Router &r, int tile) const {
    const int i = threadIdx.x >> 3;
    return r.bias && tile < tiles.routing && i < tiles.rows(r, tile) ? __bfloat162float(r.bias[tile * tiles.each + i]) : 0.f;
  }
  // Where the lane's columns of its row of a tile lie.
  static __device__ __forceinline__ int column() { return (fresh_thread() >> 5) * kPieces * kPiece + (fresh_thread() & 3) * 8; }
  __device__ __forceinline__ const bf16 *of_lane(const Router &r, int tile) const {
    return tiles.row(r, tile, min(fresh_thread() >> 2 & 7, tiles.rows(r, tile) - 1)) + column();
  }
  // Pieces [kFrom, kTo) of a tile.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void fetch(const bf16 *from) {
#pragma unroll
    for (int i = kFrom; i < kTo; i++) {
      w[i] = make_uint4(0, 0, 0, 0);
      if (kColumns == kThreads * kPieces || column() + i * kPiece < kColumns) w[i] = load_weights(from + i * kPiece);
    }
  }
  template <int kFrom, int kTo>
  __device__ __forceinline__ void fetch_first() {
    if (first) fetch<kFrom, kTo>(first);
  }
  // Products of the tile in w; row: where the lane's row begins.
  __device__ __forceinline__ void multiply(const uint4 *row, TileSums<kSlices> &sums) const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
    for (int part = 0; part < kPieces / kSlice; part++) {
      float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c;
      const int slice = warp * (kPieces / kSlice) + part;
      if (slice >= kSlices) continue;
#pragma unroll
      for (int i = part * kSlice; i < (part + 1) * kSlice; i++) { // as HalfTile multiplies
        const uint4 y = F::straight(row[warp * kPieces * 4 + i * 4 + t]);
        mma(c, w[i].x, w[i].y, w[i].z, w[i].w, y.x, y.z);
        mma(odd, w[i].x, w[i].y, w[i].z, w[i].w, y.y, y.w);
      }
      *reinterpret_cast<float2 *>(&sums.of[slice][(lane >> 2) * 8 + 2 * t]) = make_float2(c.x + odd.z, c.y + odd.w);
    }
  }
  // What a thread adds: expert or unit threadIdx.x / 8 of the tile for row threadIdx.x % 8.
  __device__ __forceinline__ void send(const Router &r, int tile, int live, float factor, float bias, const TileSums<kSlices> &sums, unsigned tag) const {
    const int i = threadIdx.x >> 3, row = threadIdx.x & 7;
    if (row >= live || i >= tiles.rows(r, tile)) return;
    if (tile < tiles.routing)
      store_packet(r.packets + row * kMostExperts + tile * tiles.each + i, score_of(r, factor, sums.sum(threadIdx.x), bias), tag);
    else if (i % 2 == 0)
      r.hidden[row * r.width + (tile - tiles.routing) * 4 + i / 2] = unit_of(factor, sums.sum(threadIdx.x), sums.sum(threadIdx.x + 8));
  }
  // Scores of the `live` rows, then their choice, noted in `choice`; the last block, which has no more tiles than others, publishes
  // it for the next kernel, which may begin when all blocks let it. row: the lane's; factor(row): of a norm; meanwhile(): what is done
  // while the scores are on their way, when the rows are read. A barrier follows.
  template <class Factor, class Meanwhile>
  __device__ __forceinline__ void choose(const Router &r, const uint4 *row, int live, unsigned tag, Factor factor, Memory &memory,
                                         const float *corrections, GroupChoice &choice, Meanwhile meanwhile) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    wait_copies<0>();
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
      const bool first = tile == static_cast<int>(blockIdx.x);
      if (!first) fetch<0, kPieces>(of_lane(r, tile));
      multiply(row, memory.sums);
      __syncthreads();
      if (threadIdx.x < 64) send(r, tile, live, factor(threadIdx.x & 7), first ? bias : bias_of(r, tile), memory.sums, tag);
      __syncthreads(); // the sums are read
    }
    if (static_cast<int>(blockIdx.x) >= tiles.count) __syncthreads(); // the corrections are there: a block without a tile has met nobody since
    meanwhile();
    await_scores<kThreads>(r, memory.scores, corrections, live, tag);
    __syncthreads();
#pragma unroll 1
    for (int own = kWarps - 1 - warp; own < live; own += kWarps) {
      const Chosen chosen = choose_row<kMany>(r, memory.scores, corrections, own, false);
      if (chosen.id < 0) continue;
      choice.note(own * r.choices + lane, chosen.id);
      if (blockIdx.x != gridDim.x - 1) continue;
      write_chosen(r, own, chosen);
      __threadfence();
    }
    __syncthreads();
  }
};

} // namespace eagle3
