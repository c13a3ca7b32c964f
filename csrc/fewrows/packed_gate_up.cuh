// Gate, up and activation over four-bit codes: the first kernel of packed.cuh.
#pragma once

#include "packed_route.cuh"

namespace eagle3 {

// A walk over tiles of eight gates and their ups, dealt to the blocks in turn: place in the list of experts, tile of it.
struct TileWalk {
  struct Steps {
    int u, tile, each, more_u, more_tile; // the first; tiles of an expert; a step
  };
  int u, tile;
  template <class Steps>
  __device__ __forceinline__ void next(const Steps &by) {
    u += by.more_u, tile += by.more_tile;
    if (tile >= by.each) tile -= by.each, u++;
  }
};

// The warps' partial tiles of gate and up, and their sums by many threads, so that no warp is late for the next tile.
template <int kWarps>
struct GateSums {
  static constexpr int kParts = kWarps >= 8 ? 2 : 1; // threads of a sum
  static constexpr int kAdders = 2 * kParts;        // warps: a thread for each unit, row and part
  static_assert(kWarps % kParts == 0 && kAdders <= kWarps, "parts are even");
  float4 of[kWarps][33]; // parts lie on different banks

  // Of a gate (0) or its up (2), unit 0 to 7 of row r; part: of the adding threads, neighbours. All lanes of a warp call it.
  __device__ __forceinline__ float sum(int unit, int r, int part, int which) const {
    const int lane = unit * 4 + r / 2;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps / kParts; w++)
      total += reinterpret_cast<const float *>(&of[part * (kWarps / kParts) + w][lane])[which + (r & 1)];
#pragma unroll
    for (int i = 1; i < kParts; i <<= 1) total += __shfl_xor_sync(kAll, total, i);
    return total;
  }
};

constexpr int kFewRows = 4; // of a kernel that keeps to the carve-out

// What a block needs one after the other.
template <class F, int kColumns, int kWarps, int kSpans, bool kMany, bool kRoute>
union PackedScratch {
  GateSums<kWarps> red[2];
};
template <class F, int kColumns, int kWarps, int kSpans, bool kMany>
union PackedScratch<F, kColumns, kWarps, kSpans, kMany, true> {
  GateSums<kWarps> red[2];
  typename InnerRouter<F, kColumns, kWarps, kSpans, F::kCandidates, kMany ? kRows : kFewRows>::Memory router;
};

// Gate, up and activation. A tile is 8 gates on top of their ups; a warp does kSpans spans of the columns. The rows lie in shared
// memory: registers are for two tiles of codes on their way, since memory needs some 100 KB asked for on every multiprocessor to be
// busy. No register may be spilled: loads come in the order in which they were asked for, so what is loaded back waits for all
// codes under way. kMany: more rows than leave the carve-out alone. kRoute: the router is in this launch.
template <class P, int kColumns, int kWarps, int kSpans, int kResident, bool kMany, bool kRoute>
__global__ void __launch_bounds__(kWarps * 32, kResident) packed_gate_up(P p, Router router) {
  using F = typename P::Format;
  using Sums = GateSums<kWarps>;
  using Rows = typename F::template Rows<kColumns, kWarps, kSpans>;
  constexpr int kSlots = 2, kWords = kColumns / 8, kChunks = Rows::kChunks;
  extern __shared__ uint4 packed_rows[];
  __shared__ PackedScratch<F, kColumns, kWarps, kSpans, kMany, kRoute> scratch;
  __shared__ GroupChoice choice;
  __shared__ typename Rows::Squares squares;
  __shared__ float factors[kRows];
  __shared__ volatile TileWalk::Steps held; // where registers are short
  Sums *const red = scratch.red;
  const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
  const bf16 *const x = p.x + static_cast<size_t>(blockIdx.y) * kRows * kColumns;
  choice.template clear<kWarps * 32>();
  OwnPairs<kWarps * 32> own(p);
  const unsigned each = p.width / 8; // divided before any wait
  const TileWalk::Steps steps = {static_cast<int>(blockIdx.x / each), static_cast<int>(blockIdx.x % each), static_cast<int>(each),
                                 static_cast<int>(gridDim.x / each), static_cast<int>(gridDim.x % each)};
  if (threadIdx.x == 0)
    held.u = steps.u, held.tile = steps.tile, held.each = steps.each, held.more_u = steps.more_u, held.more_tile = steps.more_tile;
  Rows rows(packed_rows, squares, router.gamma);
  int count;
  if constexpr (kRoute) {
    using Inner = InnerRouter<F, kColumns, kWarps, kSpans, F::kCandidates, kMany ? kRows : kFewRows>;
    __shared__ float correction[Inner::kExperts];
    Inner inner(router);
    wait_for_predecessor();
    const unsigned tag = load_int(reinterpret_cast<const int *>(router.launches));
    rows.stage(x, live);
    inner.choose(router, packed_rows + rows.of_lane(live), live, tag, [&](int r) { return rows.factor(r, router.eps); }, scratch.router, correction, choice);
    own.take(choice);
    count = list_chosen<kWarps * 32, false>(p, own, choice);
  } else {
    __syncthreads();
    wait_for_predecessor();
    own.load(p);
    rows.stage(x, live);
    count = choose_rows<kWarps * 32, false>(p, own, choice);
  }
  launch_dependents(); // the next kernel reads ids and weights before it waits: they are older than this one, or published
  if (threadIdx.x < kRows) factors[threadIdx.x] = rows.factor(threadIdx.x, router.eps); // read after the first tile's barrier
  const int thread = fresh_thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3, column = warp * kSpans * kSpan + t * kGroup;
  const int b = rows.of_lane(live) + warp * kSpans * 16 + Rows::of_group(t);
  Slot<F, kSpans> top[kSlots], bottom[kSlots];
  using Place = typename Slot<F, kSpans>::Place;
  const int below = p.width * kWords; // from a gate to its up
  auto aim = [&](int u, int tile) { // at the lane's columns of its gate
    const size_t before = static_cast<size_t>(choice.list[u]) * static_cast<unsigned>(2 * p.width * kWords);
    return Place(p.gate_up, p.gate_up_scale, before + ((tile * 8 + g) * kWords + column / 8));
  };
  auto inside = [&](int q) { return kColumns == kChunks * 8 || column + q * kSpan < kColumns; };
  auto adder = [&](int d) { return static_cast<int>(threadIdx.x) - (kWarps >= 2 * Sums::kAdders ? d * Sums::kAdders * 32 : 0); }; // of a slot's sums
  auto unit_of = [&](int at) { return F::natural(at / Sums::kParts / kRows & 7); };
  TileWalk now = {held.u, held.tile}, ahead = now;
#pragma unroll
  for (int d = 0; d < kSlots; d++, ahead.next(held)) {
    if (ahead.u >= count) continue;
    const Place gate = aim(ahead.u, ahead.tile);
    Place up = gate;
    up.move(below);
#pragma unroll
    for (int q = 0; q < kSpans; q++) top[d].fetch(q, gate, inside(q)), bottom[d].fetch(q, up, inside(q));
  }
  auto tile = [&](auto slot) { // the tile in this slot, and the next one into it
    constexpr int d = decltype(slot)::value;
    const int at = adder(d);
    TileWalk ahead = now;
    ahead.next(held), ahead.next(held);
    const bool adds = at >= 0 && at < Sums::kAdders * 32, more = ahead.u < count;
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c;
    const Place gate = aim(more ? ahead.u : now.u, ahead.tile);
    Place up = gate;
    up.move(below);
    auto multiply_all = [&](auto large) {
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
        const int at = Rows::fresh(b);
        multiply_words<F, decltype(large)::value>(c, odd, top[d].words[q], top[d].scale(q), &bottom[d].words[q], bottom[d].scale(q),
                                                   [&](int eight) { return packed_rows[Rows::eighth(at, eight) + q * 16]; });
        top[d].fetch(q, gate, more && inside(q)), bottom[d].fetch(q, up, more && inside(q));
      }
    };
    multiply_by_need(top[d].large() | bottom[d].large(), multiply_all);
    red[d].of[warp][lane] = add(c, odd);
    __syncthreads();
    if (adds) {
      const int part = at % Sums::kParts, r = at / Sums::kParts % kRows, place = at / Sums::kParts / kRows, unit = unit_of(at);
      const float lacking = factors[r], up = fmaf(lacking, red[d].sum(unit, r, part, 2), 0.f); // never minus zero
      const float value = F::activation(fmaf(lacking, red[d].sum(unit, r, part, 0), 0.f), up);
      const float next = __shfl_xor_sync(kAll, value, kRows * Sums::kParts); // that of the next place
      if (part == 0 && place % 2 == 0 && choice.rows[now.u] >> r & 1)
        *reinterpret_cast<uint32_t *>(p.hidden + hidden_row(p, now.u, r) + hidden_place<F>(now.tile * 8) + place) = pack(value, next);
    }
    now.next(held);
  };
#pragma unroll 1
  while (now.u < count) {
    tile(Constant<0>());
    if (now.u < count) tile(Constant<1>());
  }
}

template <int kColumns, int kWarps, int kSpans, int kResident, bool kRoute, class P>
inline cudaError_t launch_packed_gate_up(const P &p, const Router &router, int multiprocessors, cudaStream_t stream) {
  using F = typename P::Format;
  constexpr int kMemory = 228; // KB of a multiprocessor
  const dim3 grid(multiprocessors * kResident, (p.rows + kRows - 1) / kRows);
  const size_t row = F::template Rows<kColumns, kWarps, kSpans>::kPitch * sizeof(uint4);
  if (p.rows <= kFewRows)
    return launch(packed_gate_up<P, kColumns, kWarps, kSpans, kResident, false, kRoute>, grid, kWarps * 32, p.rows * row, stream, 1, p, router);
  size_t most = kRows * row + sizeof(PackedScratch<F, kColumns, kWarps, kSpans, true, kRoute>) + sizeof(GroupChoice) + 1024; // of a block
  if constexpr (kRoute) most += F::kCandidates * 32 * sizeof(float) + 1024;
  const int carveout = static_cast<int>(kResident * most * 100 / (kMemory * 1024)) + 1;
  return launch_carved(carveout > kCarveout ? carveout : kCarveout, packed_gate_up<P, kColumns, kWarps, kSpans, kResident, true, kRoute>, grid,
                       kWarps * 32, kRows * row, stream, 1, p, router);
}
// inside: the router is in this launch, where its sizes have such a kernel.
template <int kColumns, int kWarps, int kSpans, int kResident, class P>
inline cudaError_t launch_packed_gate_up(const P &p, const Router &router, bool inside, int multiprocessors, cudaStream_t stream) {
  if constexpr (route_inside(kColumns))
    if (inside) return launch_packed_gate_up<kColumns, kWarps, kSpans, kResident, true>(p, router, multiprocessors, stream);
  return launch_packed_gate_up<kColumns, kWarps, kSpans, kResident, false>(p, router, multiprocessors, stream);
}

} // namespace eagle3
