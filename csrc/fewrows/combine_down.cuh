// Down of few rows, with the weighted sum over a row's experts and the residual. A block does 16 outputs of every expert that its rows
// chose: one warp asks for their weights, bulk copies of whole rows, the others multiply, each a slice of every expert's width. Of 2 to 8
// rows the first experts are multiplied while gate and up work on the last ones, so that slots are free sooner.
#pragma once

#include "bulk.cuh"
#include "softmax_choice.cuh"

namespace eagle3 {

// What a block has on its way or at hand: an expert's 16 weight rows a slot, in two copies of 8. Lanes of even g multiply rows of the
// first one, those of odd g rows of the second, which begins on the other banks.
template <int kThreads, int kPieces>
struct DownRing {
  static constexpr int kWidth = kThreads * kPieces, kRowBytes = kWidth * 2; // columns: of a warp kPieces times 32
  static constexpr int kHalf = kOutputs / 2, kHalfBytes = kHalf * kRowBytes;
  static constexpr int kSlotBytes = 2 * kHalfBytes + 64;
  static_assert(kHalfBytes % 128 == 0, "so 64 bytes more are the other banks");
  // Which of the block's outputs a lane's upper and lower row of an mma's A is.
  static __device__ __forceinline__ int output(int g, bool lower) { return (g & 1) * kHalf + (g >> 1) + (lower ? kHalf / 2 : 0); }
  static constexpr int kFit = 104 * 1024 / kSlotBytes, kSlots = kFit > 8 ? 8 : kFit; // of the carve-out's 132 KB
  static_assert(kSlots > 1, "one is multiplied while another comes");
  static constexpr int kBytes = kSlots * kSlotBytes;
  static constexpr int kClose = 32 * 1024, kCloser = 4 * 1024; // of what follows: a block's part that is brought into the L2, a lane's
  // Slots under way at a time, of those that are free (common.cuh, await_load): the end of gate and up waits behind all of them.
  static constexpr int kEnough = (48 * 1024 + kSlotBytes / 2) / kSlotBytes, kAhead = kEnough < 2 ? 2 : kEnough > kSlots ? kSlots : kEnough;
};

// kFirst: how many of the first experts' rows are read before the wait. None where a single row has few experts: there it gains nothing.
template <int kThreads, int kPieces, int kGroups, int kFirst>
__global__ void __launch_bounds__(kThreads + 32, 1) combine_down(Experts p) {
  using Slots = DownRing<kThreads, kPieces>;
  // rows of so many experts are on their way
  constexpr int kDepth = kPieces < 4 ? 4 / kPieces : 1, kOwn = (kGroups * 128 + kThreads - 1) / kThreads;
  constexpr int kChosen = Block<kGroups>::kChosen, kHeld = Block<kGroups>::kHeld;
  extern __shared__ uint4 down_memory[]; // [kSlots][kSlotBytes]
  __shared__ Ring<Slots::kSlots> ring;
  __shared__ float share[kChosen * kHeld]; // of expert u in row r at u * kHeld + r; -1: the row did not choose it
  __shared__ int list[kChosen];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const Block<kGroups> block(p);
  // the choice is older than the kernel before this one lets it begin
  const int *const listed = p.chosen + static_cast<size_t>(blockIdx.y) * (1 + kChosen);
  const int header = load_int(listed), chosen = header >> 1;
  if (warp == kThreads / 32) { // asks for weights, and needs nobody's end
    int id[kChosen / 32]; // on their way while the barriers are made
#pragma unroll
    for (int k = 0; k < kChosen / 32; k++) id[k] = load_int(listed + 1 + lane + k * 32);
    if (lane == 0) ring.open(kThreads / 32);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kChosen / 32; k++) list[lane + k * 32] = id[k];
    __syncwarp();
    auto ask = [&](int u) {
      ring.begin(u, kOutputs * Slots::kRowBytes);
      const bf16 *from = p.down + (static_cast<size_t>(list[u]) * p.columns + blockIdx.x * kOutputs + lane * Slots::kHalf) * Slots::kWidth;
      char *to = reinterpret_cast<char *>(down_memory) + u % Slots::kSlots * Slots::kSlotBytes + lane * (Slots::kHalfBytes + 64);
      if (lane < 2) copy_bulk(to, from, Slots::kHalfBytes, ring.full + u % Slots::kSlots); // two: lanes ask one after another
    };
#pragma unroll 1
    for (int u = 0; u < chosen; u++) {
      if (u >= Slots::kAhead) ring.await_full(u - Slots::kAhead);
      ask(u);
    }
    // The memory is idle from here until the next kernel has begun. Sooner, this would be in the way of what is still to come.
    if (chosen) ring.await_full(chosen - 1);
    const int from = blockIdx.x * Slots::kClose + lane * Slots::kCloser;
    if (blockIdx.y == 0 && lane < Slots::kClose / Slots::kCloser && from + Slots::kCloser <= p.ahead) prefetch_bulk(p.following + from, Slots::kCloser);
    __syncthreads();
    return;
  }
  const int column = warp * kPieces * kPiece + t * 8;
  const float *const shares = p.shares + static_cast<size_t>(blockIdx.y) * kChosen * kHeld;
  constexpr int kShares = (kChosen * kHeld + kThreads - 1) / kThreads;
  float own_share[kShares]; // all on their way at once
#pragma unroll
  for (int k = 0; k < kShares; k++) own_share[k] = threadIdx.x + k * kThreads < kChosen * kHeld ? load_float(shares + threadIdx.x + k * kThreads) : 0.f;
  __syncthreads(); // the ring's barriers are made
  auto keep_shares = [&] {
#pragma unroll
    for (int k = 0; k < kShares; k++)
      if (threadIdx.x + k * kThreads < kChosen * kHeld) share[threadIdx.x + k * kThreads] = own_share[k];
    meet_at(1, kThreads);
  };
  uint4 b[kDepth][kGroups][kPieces];
  // this lane's row of the first group, of expert 0
  const bf16 *hidden = p.hidden + (static_cast<size_t>(blockIdx.y) * kChosen * kHeld + g) * Slots::kWidth + column;
  asm volatile("" : "+l"(hidden)); // before the wait
  const bf16 *const early = early_of(p, header) + g * Slots::kWidth + column;
  bool live[kGroups];
  auto rows = [&](int d, int u) { // zeros where it is not live
#pragma unroll
    for (int group = 0; group < kGroups; group++)
      load_group(b[d][group], u < kFirst ? early + u * kRows * Slots::kWidth : hidden + static_cast<size_t>(u * kHeld + group * kRows) * Slots::kWidth,
                 live[group]);
  };
  auto choose_rows = [&](int u) {
#pragma unroll
    for (int group = 0; group < kGroups; group++) live[group] = share[u * kHeld + group * kRows + g] >= 0.f;
  };
  auto wait = [&] {
    wait_for_predecessor();
    launch_dependents();
  };
  const int waits = max(min(kFirst, chosen) - kDepth, 0); // behind which expert
  if (kFirst) {
    keep_shares();
#pragma unroll
    for (int d = 0; d < kDepth; d++) choose_rows(d), rows(d, d);
  } else {
#pragma unroll
    for (int group = 0; group < kGroups; group++) live[group] = group * kRows + g < block.live;
    wait();
    // before the shares have come, and so of rows that did not choose the expert too: what those multiply nobody adds
#pragma unroll
    for (int d = 0; d < kDepth; d++) rows(d, d);
    __syncwarp(); // so that ptxas leaves the shares, which it would wait for, behind them
  }
  uint32_t before[kOwn]; // the residual of the outputs that this thread will write
#pragma unroll
  for (int k = 0; k < kOwn; k++) {
    const int own = threadIdx.x + k * kThreads, which = own >> 5 & 3, row = (own >> 7) * kRows + 2 * (own & 3) + (which & 1);
    const int o = blockIdx.x * kOutputs + Slots::output(own >> 2 & 7, which & 2);
    before[k] = own < kGroups * 128 && row < block.live && p.residual
                    ? load_half(p.residual + static_cast<size_t>(block.first + row) * p.columns + o) : 0;
  }
  auto count = [&] { // the kernel that reads these is done
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      atomicAdd(p.launch, 1u);
      if (kFirst) atomicAdd(p.turn, 1u);
    }
  };
  if (!kFirst) count(), keep_shares();
  const uint4 *const weights = down_memory + ((g & 1) * (Slots::kHalfBytes + 64) + (g >> 1) * Slots::kRowBytes) / 16 + column / 8;
  float4 total[kGroups];
#pragma unroll
  for (int group = 0; group < kGroups; group++) total[group] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int first = 0; first < chosen; first += kDepth)
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      const int u = first + d;
      if (u >= chosen) continue;
      ring.await_full(u);
      if (u < kFirst) {
        auto here = [&] {
          bool all = true;
#pragma unroll
          for (int i = 0; i < kPieces; i++) all &= have_come(b[d][0][i]);
          return __all_sync(kAll, all);
        };
        while (!here()) choose_rows(u), rows(d, u);
      }
      const uint4 *top = weights + u % Slots::kSlots * Slots::kSlotBytes / 16;
      float4 c[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; group++) c[group] = make_float4(0.f, 0.f, 0.f, 0.f);
      uint4 upper[kPieces], lower[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; i++) upper[i] = top[i * 4], lower[i] = top[i * 4 + Slots::kHalfBytes / 32];
      ring.leave(u); // before the products: who asks waits for the slowest warp
#pragma unroll
      for (int i = 0; i < kPieces; i++)
#pragma unroll
        for (int group = 0; group < kGroups; group++) mma_piece(c[group], upper[i], lower[i], b[d][group][i]);
      if (kFirst && u == waits) wait(), count();
      if (u + kDepth < chosen) choose_rows(u + kDepth), rows(d, u + kDepth);
#pragma unroll
      for (int group = 0; group < kGroups; group++) {
        const float *own = share + u * kHeld + group * kRows + 2 * t;
        const float w0 = own[0], w1 = own[1];
        if (w0 >= 0.f) total[group].x = fmaf(w0, c[group].x, total[group].x), total[group].z = fmaf(w0, c[group].z, total[group].z);
        if (w1 >= 0.f) total[group].y = fmaf(w1, c[group].y, total[group].y), total[group].w = fmaf(w1, c[group].w, total[group].w);
      }
    }
  static_assert(kGroups * 4 * kThreads * 4 <= Slots::kBytes, "partial sums take the weights' place");
  float *const red = reinterpret_cast<float *>(down_memory);
  meet_at(1, kThreads); // all weights are read
#pragma unroll
  for (int group = 0; group < kGroups; group++) store_partial<kThreads>(red + group * 4 * kThreads, total[group]);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kOwn; k++) {
    asm volatile("" : "+r"(before[k])); // made a number here: earlier, who loaded it would wait for it
    const int own = threadIdx.x + k * kThreads, which = own >> 5 & 3, group = own >> 7, row = group * kRows + 2 * (own & 3) + (which & 1);
    const int o = blockIdx.x * kOutputs + Slots::output(own >> 2 & 7, which & 2);
    if (group >= kGroups || row >= block.live) continue;
    const float sum = sum_partials<kThreads>(red + group * 4 * kThreads, which, own & 31);
    p.y[static_cast<size_t>(block.first + row) * p.columns + o] = __float2bfloat16(sum + low(before[k]));
  }
}

template <int kThreads, int kPieces, int kGroups, int kFirst>
inline cudaError_t launch_down(const Experts &p, cudaStream_t stream) {
  constexpr int kHeld = Block<kGroups>::kHeld;
  if (p.columns % kOutputs) return cudaErrorInvalidValue;
  const dim3 grid(p.columns / kOutputs, (p.rows + kHeld - 1) / kHeld);
  return launch(combine_down<kThreads, kPieces, kGroups, kFirst>, grid, kThreads + 32, DownRing<kThreads, kPieces>::kBytes, stream, 1, p);
}

} // namespace eagle3
