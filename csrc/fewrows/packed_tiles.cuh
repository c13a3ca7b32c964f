// Gate, up and activation over four-bit codes where a tile of eight gates and their ups is one piece of memory: the first kernel of
// packed.cuh for formats whose rows are woven, with scales of a byte and biases. Tiles come by bulk copies; rows stay in registers.
#pragma once

#include "bulk.cuh"
#include "packed_gate_up.cuh"

namespace eagle3 {

// A tile in shared memory: 16 weight rows of codes, gate 0, up 0, gate 1, up 1 …, and then their scales, both as they lie in memory.
// Slots begin at whole lines of shared memory, as rows of codes do in memory: copies that straddle lines are slower.
template <int kColumns>
struct TileSlot {
  static constexpr int kRow = kColumns / 2, kScales = kColumns / kGroup, kCodes = 16 * kRow, kBytes = kCodes + 16 * kScales,
                       kPitch = (kBytes + 127) / 128 * 128;
  static_assert(kRow % 16 == 0, "bulk copies are of whole sixteens");
};

// A ring whose slots several warps fill together.
template <int kSlots>
struct JointRing : Ring<kSlots> {
  using Ring<kSlots>::full, Ring<kSlots>::empty, Ring<kSlots>::parity;
  // One thread calls it, a barrier of the block follows.
  __device__ __forceinline__ void open(int readers, int writers) {
    for (int s = 0; s < kSlots; s++) init_barrier(full + s, writers), init_barrier(empty + s, readers);
    publish_barriers();
  }
  // Before a warp's part of the nth filling is stored, and by a whole warp that has stored it.
  __device__ __forceinline__ void await_empty(int n) {
    if (n >= kSlots) await(empty + n % kSlots, parity(n) ^ 1);
  }
  __device__ __forceinline__ void end(int n) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(full + n % kSlots);
  }
};

constexpr int kAdders = 8 * kRows; // threads that add up a tile, one for each unit and row
constexpr int kSums = 2;           // tiles whose parts are held for them
constexpr int kBiases = 8;         // of such a thread, on their way: they wait for memory longer than a tile takes

// What the warps of a block tell one another. kWarps: that multiply a tile.
template <int kWarps, int kSlots>
struct TileShared {
  Ring<kSlots> ring;
  JointRing<kSums> sums;
  float4 red[kSums][kWarps][33];
  int biases[kBiases][kAdders]; // of a gate and its up, a thread's own
  GroupChoice choice;
};

// Asks for the block's tiles, kSlots ahead. By a whole warp.
template <int kColumns, int kWarps, int kSlots, class P>
__device__ __forceinline__ void ask_tiles(const P &p, TileShared<kWarps, kSlots> &shared, uint4 *memory, TileWalk now, const TileWalk::Steps &steps,
                                          int count) {
  using Tile = TileSlot<kColumns>;
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int n = 0; now.u < count; n++, now.next(steps)) {
    const size_t row = (static_cast<size_t>(shared.choice.list[now.u]) * p.width + now.tile * 8) * 2;
    if (n >= kPaced && n < kSlots) shared.ring.await_full(n - kPaced); // rows are still to come
    shared.ring.begin(n, Tile::kBytes);
    char *const to = reinterpret_cast<char *>(memory) + n % kSlots * Tile::kPitch;
    uint64_t *const full = shared.ring.full + n % kSlots;
    if (lane == 0) copy_bulk(to, p.gate_up + row * (kColumns / 8), Tile::kCodes, full);
    if (lane == 1) copy_bulk(to + Tile::kCodes, p.gate_up_scale + row * Tile::kScales, 16 * Tile::kScales, full);
  }
}

// Adds up what the warps have of the block's tiles, and activates. thread: of those that add.
template <int kWarps, int kSlots, class P>
__device__ __forceinline__ void add_tiles(const P &p, TileShared<kWarps, kSlots> &shared, TileWalk now, const TileWalk::Steps &steps, int count, int thread) {
  using F = typename P::Format;
  const int r = thread % kRows, place = thread / kRows, unit = F::natural(place);
  TileWalk ahead = now;
  auto fetch = [&](int n) {
    if (ahead.u < count) copy_word(&shared.biases[n % kBiases][thread], F::bias(p, shared.choice.list[ahead.u], ahead.tile * 8 + unit));
    commit_copies();
    ahead.next(steps);
  };
#pragma unroll 1
  for (int n = 0; n < kBiases; n++) fetch(n);
#pragma unroll 1
  for (int n = 0; now.u < count; n++, now.next(steps)) {
    shared.sums.await_full(n);
    const float *const parts = reinterpret_cast<const float *>(&shared.red[n % kSums][0][unit * 4 + r / 2]) + (r & 1);
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) gate += parts[w * 33 * 4], up += parts[w * 33 * 4 + 2];
    shared.sums.leave(n);
    wait_copies<kBiases - 1>();
    const uint32_t bias = shared.biases[n % kBiases][thread];
    fetch(n + kBiases);
    const float value = F::activation(gate + low(bias), up + high(bias));
    const float next = __shfl_xor_sync(kAll, value, kRows); // that of the next place
    if (place % 2 == 0 && shared.choice.rows[now.u] >> r & 1)
      *reinterpret_cast<uint32_t *>(p.hidden + hidden_row(p, now.u, r) + hidden_place<F>(now.tile * 8) + place) = pack(value, next);
  }
}

// Multiplies every kTeams-th of the block's `tiles` tiles, from the team's own on, by the rows b, [kSpans * 4] of the lane's row and
// groups; `group` is the first of those. `warp`: of the team.
template <class F, int kColumns, int kSpans, int kTeams, int kWarps, int kSlots>
__device__ __forceinline__ void multiply_tiles(TileShared<kWarps, kSlots> &shared, const uint4 *memory, const uint4 *b, int group, int tiles,
                                               int team, int warp) {
  using Tile = TileSlot<kColumns>;
  static_assert(kSlots % kTeams == 0 && kSums % kTeams == 0, "a team has slots of its own");
  static_assert(kWarps * kSpans * kSpan / 2 - Tile::kRow <= 16 * Tile::kScales, "codes behind the last row's lie in the slot");
  const int lane = threadIdx.x & 31, g = lane >> 2;
  // Of the lane's gate in a slot, in bytes. Groups that do not exist meet zeros: any codes, and scales of another group.
  const int codes = held(2 * g * Tile::kRow + group * 16);
  int scales[kSpans];
#pragma unroll
  for (int q = 0; q < kSpans; q++) scales[q] = held(Tile::kCodes + 2 * g * Tile::kScales + ((group + q * 4) * kGroup < kColumns ? group + q * 4 : 0));
  int slot = team, parity = 0;
#pragma unroll 1
  for (int n = team, tile = blockIdx.x + team * gridDim.x; tile < tiles; n += kTeams, tile += kTeams * gridDim.x) {
    const char *const from = reinterpret_cast<const char *>(memory) + slot * Tile::kPitch;
    Slot<F, kSpans> top, bottom;
    auto fetch = [&](int q) {
      top.words[q] = *reinterpret_cast<const uint4 *>(from + codes + q * (kSpan / 2));
      bottom.words[q] = *reinterpret_cast<const uint4 *>(from + codes + q * (kSpan / 2) + Tile::kRow);
    };
    await(shared.ring.full + slot, parity);
#pragma unroll
    for (int q = 0; q < kSpans; q++) {
      top.stored[q] = *reinterpret_cast<const uint8_t *>(from + scales[q]);
      bottom.stored[q] = *reinterpret_cast<const uint8_t *>(from + scales[q] + Tile::kScales);
      if (q < 2) fetch(q);
    }
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c;
    multiply_by_need(top.large() | bottom.large(), [&](auto large) {
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
        multiply_words<F, decltype(large)::value>(c, odd, top.words[q], top.scale(q), &bottom.words[q], bottom.scale(q),
                                                  [&](int eight) { return b[q * 4 + eight]; });
        if (q + 2 < kSpans) fetch(q + 2);
      }
    });
    __syncwarp();
    if (lane == 0) arrive(shared.ring.empty + slot);
    if ((slot += kTeams) >= kSlots) slot = team, parity ^= 1;
    shared.sums.await_empty(n);
    shared.red[n % kSums][warp][lane] = add(c, odd);
    shared.sums.end(n);
  }
}

// Teams of kWarps warps take tiles in turn, every warp has kSpans spans of the columns of its own. One warp more asks for tiles, others
// add up and activate, so that nobody who multiplies waits but for a tile.
template <int kWarps, int kTeams>
constexpr int kTileThreads = kWarps * kTeams * 32 + 32 + kAdders;

template <class P, int kColumns, int kWarps, int kSpans, int kTeams, int kSlots>
__global__ void __launch_bounds__(kTileThreads<kWarps, kTeams>, 1) packed_tiles(P p) {
  using F = typename P::Format;
  static_assert(sizeof(typename F::Scale) == 1, "scales of a byte");
  constexpr int kThreads = kTileThreads<kWarps, kTeams>;
  extern __shared__ __align__(128) uint4 tile_memory[]; // [kSlots]
  __shared__ TileShared<kWarps, kSlots> shared;
  const int all = threadIdx.x >> 5, team = all / kWarps, warp = all % kWarps, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows), adder = static_cast<int>(threadIdx.x) - (kThreads - kAdders);
  const unsigned each = p.width / 8; // divided before any wait
  const TileWalk::Steps steps = {static_cast<int>(blockIdx.x / each), static_cast<int>(blockIdx.x % each), static_cast<int>(each),
                                 static_cast<int>(gridDim.x / each), static_cast<int>(gridDim.x % each)};
  shared.choice.template clear<kThreads>();
  OwnPairs<kThreads> own(p);
  if (threadIdx.x == 0) shared.ring.open(kWarps), shared.sums.open(kAdders / 32, kWarps);
  const int group = warp * kSpans * 4 + t; // of the lane's first span
  __syncthreads();
  wait_for_predecessor();
  own.load(p);
  uint4 b[kSpans * 4]; // the row of the lane's sums, its columns; zeros where there is none
  const bf16 *const x = p.x + (static_cast<size_t>(blockIdx.y) * kRows + g) * kColumns + group * kGroup;
#pragma unroll
  for (int i = 0; i < kSpans * 4; i++) {
    b[i] = make_uint4(0, 0, 0, 0);
    if (team < kTeams && g < live && (group + i / 4 * 4) * kGroup < kColumns) b[i] = load_rows(x + i / 4 * kSpan + i % 4 * 8);
  }
  const int count = choose_rows<kThreads, false>(p, own, shared.choice);
  launch_dependents(); // the next kernel reads ids and weights before it waits: they are older than this one
  const TileWalk first = {steps.u, steps.tile};
  if (team < kTeams)
    multiply_tiles<F, kColumns, kSpans, kTeams>(shared, tile_memory, b, group, count * static_cast<int>(each), team, warp);
  else if (adder < 0)
    ask_tiles<kColumns>(p, shared, tile_memory, first, steps, count);
  else
    add_tiles(p, shared, first, steps, count, adder);
}

template <int kColumns, int kWarps, int kSpans, int kTeams, int kSlots, class P>
inline cudaError_t launch_packed_tiles(const P &p, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks, (p.rows + kRows - 1) / kRows);
  return launch(packed_tiles<P, kColumns, kWarps, kSpans, kTeams, kSlots>, grid, kTileThreads<kWarps, kTeams>, kSlots * TileSlot<kColumns>::kPitch, stream, 1, p);
}

} // namespace eagle3
