// Gate, up and activation over four-bit codes: the first kernel of packed.cuh.
#pragma once

#include "digits.cuh"
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

// The warps' sums of a tile and one row, of gates and their ups in turn, and their sum by one warp: a lane has one of 16, one of kParts.
template <int kWarps>
struct GateSums {
  static constexpr int kParts = 2;
  static_assert(kWarps % kParts == 0, "parts are even");
  float of[kWarps][16];
  // A warp's own: of the lane's four groups in turn.
  __device__ __forceinline__ void put(float gate, float up) {
    const int lane = threadIdx.x & 31, t = lane & 3;
    float own = (t & 1 ? up : gate) + __shfl_xor_sync(kAll, t & 1 ? gate : up, 1);
    own += __shfl_xor_sync(kAll, own, 2);
    if (t < 2) of[threadIdx.x >> 5][(lane >> 2) * 2 + t] = own;
  }
  __device__ __forceinline__ float sum() const {
    const int lane = threadIdx.x & 31, part = lane & 1;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps / kParts; w++) total += of[part * (kWarps / kParts) + w][lane >> 1];
    return total + __shfl_xor_sync(kAll, total, 1);
  }
};

constexpr int kFewRows = 4; // of a kernel that keeps to the carve-out

// What a block needs one after the other.
template <class F, int kColumns, int kWarps, int kSpans, bool kMany, bool kRoute>
union PackedScratch {
  GateSums<kWarps> red[2][kMany ? kRows : kFewRows];
};
template <class F, int kColumns, int kWarps, int kSpans, bool kMany>
union PackedScratch<F, kColumns, kWarps, kSpans, kMany, true> {
  GateSums<kWarps> red[2][kMany ? kRows : kFewRows];
  typename InnerRouter<F, kColumns, kWarps, kSpans, F::kCandidates, kMany ? kRows : kFewRows>::Memory router;
};

// Gate, up and activation. A tile is 8 gates on top of their ups; a warp does kSpans spans of the columns, for one row after the other
// of those that chose the expert. The rows lie in shared memory, first for the router, then as digits: registers are for two tiles of
// codes on their way, since memory needs some 100 KB asked for on every multiprocessor to be busy. No register may be spilled: loads come
// in the order in which they were asked for, so what is loaded back waits for all codes under way.
// kMany: more rows than leave the carve-out alone. kRoute: the router is in this launch.
template <class P, int kColumns, int kWarps, int kSpans, int kResident, bool kMany, bool kRoute>
__global__ void __launch_bounds__(kWarps * 32, kResident) packed_gate_up(P p, Router router, RouteTiles tiles) {
  using F = typename P::Format;
  using Rows = typename F::template Rows<kColumns, kWarps, kSpans>;
  using Digits = DigitRows<kWarps, kSpans, kMany ? kRows : kFewRows>;
  constexpr int kSlots = 2, kWords = kColumns / 8, kChunks = Rows::kChunks;
  extern __shared__ uint4 packed_rows[];
  __shared__ PackedScratch<F, kColumns, kWarps, kSpans, kMany, kRoute> scratch;
  __shared__ GroupChoice choice;
  __shared__ typename Rows::Squares squares;
  __shared__ float factors[kRows];
  __shared__ alignas(16) typename Digits::Powers powers;
  __shared__ uint4 zeros[kSpans * 16]; // digits of other lanes' groups
  __shared__ volatile TileWalk::Steps held; // where registers are short
  auto &red = scratch.red;
  const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
  const bf16 *const x = p.x + static_cast<size_t>(blockIdx.y) * kRows * kColumns;
  Rows rows(packed_rows, squares, router.gamma);
  auto prepare = [&] { // a barrier follows
    choice.template clear<kWarps * 32>();
    if (threadIdx.x < kSpans * 16) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x) return;
    const unsigned each = p.width / 8;
    held.u = blockIdx.x / each, held.tile = blockIdx.x % each, held.each = each, held.more_u = gridDim.x / each, held.more_tile = gridDim.x % each;
  };
  auto make_digits = [&] {
    if (threadIdx.x < kRows) factors[threadIdx.x] = rows.factor(threadIdx.x, router.eps);
    Digits::make(packed_rows, powers, live);
  };
  if constexpr (kRoute) {
    using Inner = InnerRouter<F, kColumns, kWarps, kSpans, F::kCandidates, kMany ? kRows : kFewRows>;
    __shared__ float correction[Inner::kExperts];
    __shared__ volatile int8_t pair_row[kGroupChosen]; // where registers are short
    Inner inner(router, tiles);
    wait_for_predecessor();
    const unsigned tag = load_int(reinterpret_cast<const int *>(router.launches));
    // The kernel before this one has most often ended when this one begins: what needs no rows is done while they come.
    auto beside = [&] {
      inner.template fetch_first<Inner::kEarly, Inner::kBeside>();
      __syncwarp(); // or ptxas asks for them behind what follows
      inner.look_up(router, correction);
      prepare();
      if (threadIdx.x < kGroupChosen) pair_row[threadIdx.x] = static_cast<int8_t>(OwnPairs<kWarps * 32>(p).row[0]);
    };
    rows.stage(x, live, beside, [&] { inner.template fetch_first<Inner::kBeside, Inner::kPieces>(); });
    inner.choose(router, packed_rows + rows.of_lane(live), live, tag, [&](int r) { return rows.factor(r, router.eps); }, scratch.router, correction,
                 choice, make_digits);
    OwnPairs<kWarps * 32> own;
    own.row[0] = threadIdx.x < kGroupChosen ? pair_row[threadIdx.x] : -1;
    own.take(choice);
    list_chosen<kWarps * 32, false>(p, own, choice);
  } else {
    prepare();
    OwnPairs<kWarps * 32> own(p);
    __syncthreads();
    wait_for_predecessor();
    own.load(p);
    rows.stage(x, live);
    make_digits();
    choose_rows<kWarps * 32, false>(p, own, choice);
  }
  launch_dependents(); // the next kernel reads ids and weights before it waits: they are older than this one, or published
  const int thread = fresh_thread(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3, column = warp * kSpans * kSpan + t * kGroup;
  Slot<F, kSpans> top[kSlots], bottom[kSlots];
  using Place = typename Slot<F, kSpans>::Place;
  const int below = p.width * kWords; // from a gate to its up
  auto aim = [&](int u, int tile) { // at the lane's columns of its gate
    const size_t before = static_cast<size_t>(choice.list[u]) * static_cast<unsigned>(2 * p.width * kWords);
    const int thread = fresh_thread(); // registers are short
    return Place(p.gate_up, p.gate_up_scale, before + ((tile * 8 + (thread >> 2 & 7)) * kWords + (thread >> 5) * kSpans * 16 + (thread & 3) * 4));
  };
  auto inside = [&](int q) { return kColumns == kChunks * 8 || column + q * kSpan < kColumns; };
  auto experts = [&] { return *static_cast<const volatile int *>(&choice.count); }; // where registers are short
  TileWalk now = {held.u, held.tile}, ahead = now;
#pragma unroll
  for (int d = 0; d < kSlots; d++, ahead.next(held)) {
    if (ahead.u >= experts()) continue;
    const Place gate = aim(ahead.u, ahead.tile);
    Place up = gate;
    up.move(below);
#pragma unroll
    for (int q = 0; q < kSpans; q++) top[d].fetch(q, gate, inside(q)), bottom[d].fetch(q, up, inside(q));
  }
  const uint32_t upper = 0xf0f0f0f0u * gridDim.z; // of which there is one
  auto tile = [&](auto slot) { // the tile in this slot, and the next one into it
    constexpr int d = decltype(slot)::value;
    TileWalk ahead = now;
    ahead.next(held), ahead.next(held);
    const bool more = ahead.u < experts();
    const Place gate = aim(more ? ahead.u : now.u, ahead.tile);
    Place up = gate;
    up.move(below);
    const unsigned chose = choice.rows[now.u];
    unsigned left = chose;
#pragma unroll 1
    for (int k = 0; left; k++) { // a row of those that chose the expert
      const int r = __ffs(left) - 1;
      left &= left - 1;
      const bool asks = more && !left;
      const uint4 *const own = has_digits(lane) ? packed_rows + r * Digits::kPitch + warp * kSpans * 16 + g : zeros;
      const float *const power = powers[r][warp][t];
      float above = 0.f, under = 0.f;
      const auto gates = top[d].scales(), ups = bottom[d].scales();
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
        const WholeSums sums(top[d].words[q], bottom[d].words[q], upper, own + q * 16);
        above = fmaf(sums.top, gates.of(q) * power[q], above);
        under = fmaf(sums.bottom, ups.of(q) * power[q], under);
        top[d].fetch(q, gate, asks && inside(q)), bottom[d].fetch(q, up, asks && inside(q));
      }
      red[d][k].put(above, under);
    }
    const int many = __popc(chose);
    __syncthreads();
    constexpr int kTurns = kWarps < 8 ? 1 : 8; // warps that begin in turn
    int turn = (fresh_thread() >> 5) - (now.u + now.tile / 4) % kTurns; // which row's sums are the warp's
    turn += turn < 0 ? kWarps : 0;
#pragma unroll 1
    for (; turn < many; turn += kWarps) {
      const int lane = fresh_thread() & 31;
      unsigned own = chose;
#pragma unroll 1
      for (int i = 0; i < turn; i++) own &= own - 1;
      const int r = __ffs(own) - 1;
      const float value = fmaf(factors[r], red[d][turn].sum(), 0.f); // never minus zero
      const float unit = F::activation(value, __shfl_xor_sync(kAll, value, 2));
      const float next = __shfl_xor_sync(kAll, unit, 16); // four units further
      bf16 *const to = p.hidden + hidden_row(p, eagle3::held(now.u), r) + hidden_place<F>(eagle3::held(now.tile) * 8);
      if (lane < 16 && (lane & 3) == 0) *reinterpret_cast<uint32_t *>(to + lane / 2) = pack(unit, next);
    }
    now.next(held);
  };
#pragma unroll 1
  while (now.u < experts()) {
    tile(Constant<0>());
    if (now.u < experts()) tile(Constant<1>());
  }
}

template <int kColumns, int kWarps, int kSpans, int kResident, bool kRoute, class P>
inline cudaError_t launch_packed_gate_up(const P &p, const Router &router, int multiprocessors, cudaStream_t stream) {
  using F = typename P::Format;
  constexpr int kMemory = 228; // KB of a multiprocessor
  const dim3 grid(multiprocessors * kResident, (p.rows + kRows - 1) / kRows);
  const RouteTiles tiles(router, grid.x);
  const size_t row = F::template Rows<kColumns, kWarps, kSpans>::kPitch * sizeof(uint4);
  if (p.rows <= kFewRows)
    return launch(packed_gate_up<P, kColumns, kWarps, kSpans, kResident, false, kRoute>, grid, kWarps * 32, p.rows * row, stream, 1, p, router, tiles);
  size_t most = kRows * row + sizeof(PackedScratch<F, kColumns, kWarps, kSpans, true, kRoute>) + sizeof(GroupChoice) + 1024; // of a block
  most += sizeof(typename DigitRows<kWarps, kSpans, kRows>::Powers) + kSpans * 16 * sizeof(uint4);
  if constexpr (kRoute) most += F::kCandidates * 32 * sizeof(float) + 1024;
  const int carveout = static_cast<int>(kResident * most * 100 / (kMemory * 1024)) + 1;
  return launch_carved(carveout > kCarveout ? carveout : kCarveout, packed_gate_up<P, kColumns, kWarps, kSpans, kResident, true, kRoute>, grid,
                       kWarps * 32, kRows * row, stream, 1, p, router, tiles);
}
// inside: the router is in this launch, where its sizes have such a kernel.
template <int kColumns, int kWarps, int kSpans, int kResident, class P>
inline cudaError_t launch_packed_gate_up(const P &p, const Router &router, bool inside, int multiprocessors, cudaStream_t stream) {
  if constexpr (route_inside(kColumns))
    if (inside) return launch_packed_gate_up<kColumns, kWarps, kSpans, kResident, true>(p, router, multiprocessors, stream);
  return launch_packed_gate_up<kColumns, kWarps, kSpans, kResident, false>(p, router, multiprocessors, stream);
}

} // namespace eagle3
