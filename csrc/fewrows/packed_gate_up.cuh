// Gate, up and activation over four-bit codes: the first kernel of packed.cuh.
#pragma once

#include "packed.cuh"

namespace eagle3 {

// A walk over tiles of eight gates and their ups, dealt to the blocks in turn: place in the list of experts, tile of it.
struct TileWalk {
  int u, tile;
  const int each, more_u, more_tile; // tiles of an expert; a step
  __device__ __forceinline__ explicit TileWalk(int each)
      : u(static_cast<int>(blockIdx.x) / each), tile(static_cast<int>(blockIdx.x) % each), each(each),
        more_u(static_cast<int>(gridDim.x) / each), more_tile(static_cast<int>(gridDim.x) % each) {}
  __device__ __forceinline__ void next() {
    u += more_u, tile += more_tile;
    if (tile >= each) tile -= each, u++;
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

// Gate, up and activation. A tile is 8 gates on top of their ups; a warp does kSpans spans of the columns. The rows lie in shared
// memory: registers are for two tiles of codes on their way, since memory needs some 100 KB asked for on every multiprocessor to be
// busy. No register may be spilled: loads come in the order in which they were asked for, so what is loaded back waits for all
// codes under way. kMany: more rows than leave the carve-out alone.
template <class P, int kColumns, int kWarps, int kSpans, int kResident, bool kMany>
__global__ void __launch_bounds__(kWarps * 32, kResident) packed_gate_up(P p) {
  using F = typename P::Format;
  using Sums = GateSums<kWarps>;
  constexpr int kSlots = 2, kWords = kColumns / 8;
  constexpr int kChunks = kWarps * kSpans * 16, kPitch = kChunks + 4; // of 8 columns: rows lie on different banks
  constexpr int kOwn = (kSpans + 1) / 2;                             // chunks of a thread
  extern __shared__ uint4 packed_rows[];
  __shared__ Sums red[2];
  __shared__ GroupChoice choice;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int column = warp * kSpans * kSpan + t * kGroup, live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
  choice.template clear<kWarps * 32>();
  OwnPairs<kWarps * 32> own(p);
  TileWalk now(p.width / 8);
  __syncthreads();
  wait_for_predecessor();
  own.load(p);
#pragma unroll
  for (int k = 0; k < kOwn; k++) {
    const int c = threadIdx.x + k * kWarps * 32;
    uint4 v[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      v[r] = make_uint4(0, 0, 0, 0);
      if (r < live && c * 8 < kColumns) v[r] = load_rows(p.x + (static_cast<size_t>(blockIdx.y) * kRows + r) * kColumns + c * 8);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++)
      if (r < live && c < kChunks) packed_rows[r * kPitch + (c & ~15) + (c & 3) * 4 + (c >> 2 & 3)] = F::operand(v[r]);
  }
  const int count = choose_rows<kWarps * 32, false>(p, own, choice); // barriers for the rows too
  launch_dependents(); // the next kernel reads ids and weights before it waits: they are older than this one
  const uint4 *const b = packed_rows + (g < live ? g : 0) * kPitch + warp * kSpans * 16 + t; // rows that do not exist: of the first
  Slot<F, kSpans> top[kSlots], bottom[kSlots];
  typename F::Bias bias[kSlots];
  using Place = typename Slot<F, kSpans>::Place;
  const int below = F::kWoven ? kWords : p.width * kWords; // from a gate to its up
  auto aim = [&](int u, int tile) { // at the lane's columns of its gate
    const size_t before = static_cast<size_t>(choice.list[u]) * static_cast<unsigned>(2 * p.width * kWords);
    return Place(p.gate_up, p.gate_up_scale, before + ((tile * 8 + g) * (F::kWoven ? 2 : 1) * kWords + column / 8));
  };
  auto inside = [&](int q) { return kColumns == kChunks * 8 || column + q * kSpan < kColumns; };
  auto adder = [&](int d) { return static_cast<int>(threadIdx.x) - (kWarps >= 2 * Sums::kAdders ? d * Sums::kAdders * 32 : 0); }; // of a slot's sums
  auto unit_of = [&](int at) { return F::natural(at / Sums::kParts / kRows & 7); };
  auto fetch_bias = [&](int d, int u, int tile) { // by the warps that need it
    const int at = adder(d);
    if (at >= 0 && at < Sums::kAdders * 32) bias[d].fetch(p, choice.list[u], tile * 8 + unit_of(at));
  };
  TileWalk ahead = now;
#pragma unroll
  for (int d = 0; d < kSlots; d++, ahead.next()) {
    if (ahead.u >= count) continue;
    const Place gate = aim(ahead.u, ahead.tile);
    fetch_bias(d, ahead.u, ahead.tile);
    Place up = gate;
    up.move(below);
#pragma unroll
    for (int q = 0; q < kSpans; q++) top[d].fetch(q, gate, inside(q)), bottom[d].fetch(q, up, inside(q));
  }
  auto tile = [&](auto slot) { // the tile in this slot, and the next one into it
    constexpr int d = decltype(slot)::value;
    const int at = adder(d);
    TileWalk ahead = now;
    ahead.next(), ahead.next();
    const bool adds = at >= 0 && at < Sums::kAdders * 32, more = ahead.u < count;
    const typename F::Bias own = bias[d];
    if (more) fetch_bias(d, ahead.u, ahead.tile);
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c;
    const Place gate = aim(more ? ahead.u : now.u, ahead.tile);
    Place up = gate;
    up.move(below);
    auto multiply_all = [&](auto large) {
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
        multiply_words<F, decltype(large)::value, 4>(c, odd, top[d].words[q], top[d].scale(q), &bottom[d].words[q], bottom[d].scale(q), b + q * 16);
        top[d].fetch(q, gate, more && inside(q)), bottom[d].fetch(q, up, more && inside(q));
      }
    };
    multiply_by_need(top[d].large() | bottom[d].large(), multiply_all);
    red[d].of[warp][lane] = add(c, odd);
    __syncthreads();
    if (adds) {
      const int part = at % Sums::kParts, r = at / Sums::kParts % kRows, place = at / Sums::kParts / kRows, unit = unit_of(at);
      const float up = red[d].sum(unit, r, part, 2), value = F::activation(red[d].sum(unit, r, part, 0) + own.gate(), up + own.up());
      const float next = __shfl_xor_sync(kAll, value, kRows * Sums::kParts); // that of the next place
      if (part == 0 && place % 2 == 0 && choice.rows[now.u] >> r & 1)
        *reinterpret_cast<uint32_t *>(p.hidden + hidden_row(p, now.u, r) + hidden_place<F>(now.tile * 8) + place) = pack(value, next);
    }
    now.next();
  };
#pragma unroll 1
  while (now.u < count) {
    tile(Constant<0>());
    if (now.u < count) tile(Constant<1>());
  }
}

template <int kColumns, int kWarps, int kSpans, int kResident, class P>
inline cudaError_t launch_packed_gate_up(const P &p, int multiprocessors, cudaStream_t stream) {
  constexpr int kFew = 4, kMemory = 228; // rows of a kernel that keeps to the carve-out; KB of a multiprocessor's memory
  const dim3 grid(multiprocessors * kResident, (p.rows + kRows - 1) / kRows);
  const size_t row = (kWarps * kSpans * 16 + 4) * sizeof(uint4);
  if (p.rows <= kFew)
    return launch(packed_gate_up<P, kColumns, kWarps, kSpans, kResident, false>, grid, kWarps * 32, p.rows * row, stream, 1, p);
  const size_t most = kRows * row + 2 * sizeof(GateSums<kWarps>) + sizeof(GroupChoice) + 1024; // of a block
  const int carveout = static_cast<int>(kResident * most * 100 / (kMemory * 1024)) + 1;
  return launch_carved(carveout > kCarveout ? carveout : kCarveout, packed_gate_up<P, kColumns, kWarps, kSpans, kResident, true>, grid,
                       kWarps * 32, kRows * row, stream, 1, p);
}

} // namespace eagle3
