// Gate, up and activation over four-bit codes: the first kernel of packed.cuh.
#pragma once

#include "packed.cuh"

namespace eagle3 {

// A walk over tiles of eight gates and their ups, dealt to the blocks in turn: place in the list of experts, tile of it.
struct TileWalk {
  int u, tile;
  int each, more_u, more_tile; // tiles of an expert; a step
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
  static constexpr int kParts = kWarps >= 16 ? 4 : kWarps >= 8 ? 2 : 1; // threads of a sum
  static constexpr int kAdders = 2 * kParts;                           // warps: a thread for each unit, row and part
  static_assert(kWarps % kParts == 0 && kAdders <= kWarps, "parts are even");
  float4 of[kWarps][33]; // parts lie on different banks

  // Of a gate (0) or its up (2): unit and row of thread `at` of the adders. All lanes of a warp call it.
  __device__ __forceinline__ float sum(int at, int which) const {
    const int o = at / kParts, part = at % kParts, lane = o / kRows * 4 + o % kRows / 2;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps / kParts; w++)
      total += reinterpret_cast<const float *>(&of[part * (kWarps / kParts) + w][lane])[which + (o & 1)];
#pragma unroll
    for (int i = 1; i < kParts; i <<= 1) total += __shfl_xor_sync(kAll, total, i);
    return total;
  }
};

// Gate, up and activation. A tile is 8 gates on top of their ups; a warp does kSpans spans of the columns. The rows lie in shared
// memory: registers are for kDepth tiles of codes on their way, since memory needs some 100 KB asked for on every multiprocessor
// to be busy. kMany: more rows than leave the carve-out alone.
template <class P, int kWarps, int kSpans, int kDepth, int kResident, bool kMany>
__global__ void __launch_bounds__(kWarps * 32, kResident) packed_gate_up(P p) {
  using F = typename P::Format;
  using Sums = GateSums<kWarps>;
  constexpr int kChunks = kWarps * kSpans * 16, kPitch = kChunks + 4; // of 8 columns: rows lie on different banks
  constexpr int kOwn = (kSpans + 1) / 2;                             // chunks of a thread
  extern __shared__ uint4 packed_rows[];                             // [rows][kPitch]: lane t of a span finds its eights 4 chunks apart
  __shared__ Sums red[2];
  __shared__ GroupChoice choice;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int column = warp * kSpans * kSpan + t * kGroup, live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
  choice.template clear<kWarps * 32>();
  OwnPairs<kWarps * 32> own(p);
  TileWalk now(p.width / 8), ahead = now;
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
      if (r < live && c * 8 < p.columns) v[r] = load_rows(p.x + (static_cast<size_t>(blockIdx.y) * kRows + r) * p.columns + c * 8);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++)
      if (r < live && c < kChunks) packed_rows[r * kPitch + (c & ~15) + (c & 3) * 4 + (c >> 2 & 3)] = F::operand(v[r]);
  }
  const int count = choose_rows<kWarps * 32, false>(p, own, choice); // barriers for the rows too
  launch_dependents(); // the next kernel reads ids and weights before it waits: they are older than this one
  const uint4 *const b = packed_rows + (g < live ? g : 0) * kPitch + warp * kSpans * 16 + t; // rows that do not exist: of the first
  Codes<F> top[kDepth][kSpans], bottom[kDepth][kSpans];
  const uint32_t *codes;
  const typename F::Scale *scales;
  int gate; // where the lane's columns of its gate begin, in words of an expert
  const int words = p.columns / 8, below = F::kWoven ? words : p.width * words; // from a gate to its up
  auto aim = [&] {
    const size_t before = static_cast<size_t>(choice.list[ahead.u]) * static_cast<unsigned>(2 * p.width * words);
    codes = p.gate_up + before, scales = p.gate_up_scale + before / 4;
    gate = (ahead.tile * 8 + g) * (F::kWoven ? 2 : 1) * words + column / 8;
  };
  auto fetch = [&](int d, int q) {
    const bool inside = column + q * kSpan < p.columns;
    top[d][q].fetch(codes, scales, gate + q * (kSpan / 8), inside);
    bottom[d][q].fetch(codes, scales, gate + below + q * (kSpan / 8), inside);
  };
#pragma unroll
  for (int d = 0; d < kDepth; d++, ahead.next())
    if (ahead.u < count) {
      aim();
#pragma unroll
      for (int q = 0; q < kSpans; q++) fetch(d, q);
    }
  int turn = 0;
  auto tile = [&](auto slot) { // the tile in this slot, and the next one into it
    constexpr int d = decltype(slot)::value;
    const int at = static_cast<int>(threadIdx.x) - turn % (kWarps / Sums::kAdders) * Sums::kAdders * 32; // adders take turns
    const bool adds = at >= 0 && at < Sums::kAdders * 32, more = ahead.u < count;
    const int unit = now.tile * 8 + at / Sums::kParts / kRows;
    const typename F::Bias bias(p, choice.list[now.u], unit, adds);
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c;
    if (more) aim();
    auto multiply_all = [&](auto large) {
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
        multiply_span<F, decltype(large)::value, 4>(c, odd, top[d][q], &bottom[d][q], b + q * 16);
        if (more) fetch(d, q);
      }
    };
    multiply_by_need(any_large(top[d]) | any_large(bottom[d]), multiply_all);
    Sums &sums = red[turn & 1];
    sums.of[warp][lane] = add(c, odd);
    __syncthreads();
    if (adds) {
      const float up = sums.sum(at, 2), value = F::activation(sums.sum(at, 0) + bias.gate(), up + bias.up());
      const int r = at / Sums::kParts % kRows;
      if (at % Sums::kParts == 0 && choice.rows[now.u] >> r & 1) p.hidden[hidden_row(p, now.u, r) + hidden_place<F>(unit)] = __float2bfloat16(value);
    }
    turn++, now.next(), ahead.next();
  };
#pragma unroll 1
  while (now.u < count) {
    tile(Constant<0>());
    if constexpr (kDepth > 1)
      if (now.u < count) tile(Constant<1>());
  }
}

template <int kWarps, int kSpans, int kDepth, int kResident, class P>
inline cudaError_t launch_packed_gate_up(const P &p, int multiprocessors, cudaStream_t stream) {
  constexpr int kFew = 4, kMemory = 228; // rows of a kernel that keeps to the carve-out; KB of a multiprocessor's memory
  const dim3 grid(multiprocessors * kResident, (p.rows + kRows - 1) / kRows);
  const size_t row = (kWarps * kSpans * 16 + 4) * sizeof(uint4);
  if (p.rows <= kFew)
    return launch(packed_gate_up<P, kWarps, kSpans, kDepth, kResident, false>, grid, kWarps * 32, p.rows * row, stream, 1, p);
  const size_t most = kRows * row + 2 * sizeof(GateSums<kWarps>) + sizeof(GroupChoice) + 1024; // of a block
  const int carveout = static_cast<int>(kResident * most * 100 / (kMemory * 1024)) + 1;
  return launch_carved(carveout > kCarveout ? carveout : kCarveout, packed_gate_up<P, kWarps, kSpans, kDepth, kResident, true>, grid,
                       kWarps * 32, kRows * row, stream, 1, p);
}

} // namespace eagle3
