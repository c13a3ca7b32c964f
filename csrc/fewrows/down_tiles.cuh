// Down over four-bit codes where a block's share of an expert, 24 outputs, is one piece of memory: the second kernel of packed.cuh for
// formats with scales of a byte whose sizes allow it. Shares come by bulk copies, so what a warp loads meanwhile, its rows, is not
// queued behind them, and registers are few: twice the warps hide what each of them waits for.
#pragma once

#include "bulk.cuh"
#include "packed_down.cuh"

namespace eagle3 {

// A block's share of an expert in shared memory: rows of codes, then their scales, both as they lie in memory. As of TileSlot.
template <int kWidth>
struct DownSlot {
  static constexpr int kOwn = 24, kHalves = kOwn / 8, kTiles = (kHalves + 1) / 2; // outputs; of 8; of 16
  static constexpr int kRow = kWidth / 2, kScales = kWidth / kGroup, kCodes = kOwn * kRow, kBytes = kCodes + kOwn * kScales,
                       kPitch = (kBytes + 127) / 128 * 128;
  static_assert(kCodes % 16 == 0 && kOwn * kScales % 16 == 0, "bulk copies are of whole sixteens");
  static_assert(2 * kRow % 128 == 64, "so rows two apart are on the other banks");
  // Which output of eight a lane's g multiplies: neighbours are rows two apart. Its own inverse.
  static __device__ __forceinline__ int output(int g) { return (g & 4) | (g & 1) << 1 | (g >> 1 & 1); }
};

// As load_rows; where it is not live, r stays as it is.
__device__ __forceinline__ void load_rows_at(uint4 &r, const void *p, bool live) {
  asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %5, 0;\n@live ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
               : "l"(p), "r"(static_cast<int>(live))
               : "memory");
}
// Products of one word of rows g (and g + 8) with the group's eight columns v: a quarter of multiply_words.
template <class F, bool kLarge>
__device__ __forceinline__ void multiply_word(float4 &c, float4 &odd, const Slot<F, 1> &top, const Slot<F, 1> *bottom, int eight, const uint4 &v) {
  const auto word = [&](const Slot<F, 1> &of) {
    return F::template decode<kLarge>(reinterpret_cast<const uint32_t *>(&of.words[0])[eight], F::factor(of.scale(0)), of.scale(0));
  };
  const uint4 above = word(top);
  uint4 below = make_uint4(0, 0, 0, 0);
  if (bottom) below = word(*bottom);
  mma(c, above.x, below.x, above.y, below.y, v.x, v.y);
  mma(odd, above.z, below.z, above.w, below.w, v.z, v.w);
}

// Every multiplying warp has a span of the width of its own: it passes all experts in ascending order, its weighted sums stay in
// registers, and the warps' totals are added in the end. One warp more asks for weights.
template <class P, int kWidth, int kWarps, int kSlots>
__global__ void __launch_bounds__(kWarps * 32 + 32, 1) down_tiles(P p) {
  using F = typename P::Format;
  using Slots = DownSlot<kWidth>;
  constexpr int kThreads = kWarps * 32 + 32, kHalves = Slots::kHalves, kTiles = Slots::kTiles, kOwn = Slots::kOwn;
  constexpr int kPadded = (kWidth + kUnit - 1) / kUnit * kUnit; // columns of a row of `hidden`
  static_assert(kWarps * kSpan >= kWidth && kOwn * kRows <= kWarps * 32, "all spans; a thread for each output and row");
  static_assert(kWarps * kTiles * 32 * sizeof(float4) <= kSlots * Slots::kBytes, "totals lie where weights were");
  extern __shared__ __align__(128) uint4 down_memory[]; // [kSlots], then the warps' totals
  __shared__ Ring<kSlots> ring;
  __shared__ GroupChoice choice;
  __shared__ alignas(16) bf16 biases[kGroupChosen][kOwn];
  __shared__ float weights[kGroupChosen][kRows]; // of an expert's rows
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = blockIdx.x * kOwn;
  choice.template clear<kThreads>();
  OwnPairs<kThreads> own(p);
  own.load(p); // older than the kernel before this one
  if (threadIdx.x == 0) ring.open(kWarps);
  __syncthreads();
  const int count = choose_rows<kThreads, true>(p, own, choice);
  if (warp == kWarps) {
#pragma unroll 1
    for (int u = 0; u < count; u++) {
      const size_t row = static_cast<size_t>(choice.list[u]) * p.columns + first;
      char *const to = reinterpret_cast<char *>(down_memory) + u % kSlots * Slots::kPitch;
      uint64_t *const full = ring.full + u % kSlots;
      if (u >= kPaced && u < kSlots) ring.await_full(u - kPaced); // gate and up have not ended
      ring.begin(u, Slots::kBytes + (p.down_bias ? kOwn * static_cast<int>(sizeof(bf16)) : 0));
      if (lane == 0) copy_bulk(to, p.down + row * (kWidth / 8), Slots::kCodes, full);
      if (lane == 1) copy_bulk(to + Slots::kCodes, p.down_scale + row * Slots::kScales, kOwn * Slots::kScales, full);
      if (lane == 2 && p.down_bias) copy_bulk(biases[u], p.down_bias + row, kOwn * sizeof(bf16), full);
    }
    __syncthreads();
    __syncthreads();
    return;
  }
  for (int i = threadIdx.x; i < count * kRows; i += kWarps * 32) // where a row has no rank, any
    weights[i / kRows][i % kRows] = choice.weight[i % kRows][choice.rank[i / kRows][i % kRows] % kGroupChoices];
  meet_at(1, kWarps * 32);
  const int group = warp * 4 + t; // of the lane's span
  // its group among all of a share; of what does not exist another's codes meet zeros
  const int of_lane = held(Slots::output(g) * Slots::kScales + (group * kGroup < kWidth ? group : 0));
  const uint32_t own_row = group * kGroup < kWidth ? 1u << g : 0;
  const bf16 *hidden = p.hidden + (static_cast<size_t>(blockIdx.y) * kGroupChosen * kRows + g) * kPadded + warp * kSpan + t * 8;
  wait_for_predecessor();
  launch_dependents();
  uint4 b[4] = {};
  unsigned chosen = choice.rows[0];
  bool reads = count && chosen & own_row; // where nothing is read, what was there meets zeros or is left out
#pragma unroll
  for (int i = 0; i < 4; i++) load_rows_at(b[i], hidden + i * kPiece, reads);
  const int o = threadIdx.x / kRows, r = threadIdx.x % kRows, row = blockIdx.y * kRows + r; // what this thread adds in the end
  const bool owner = o < kOwn && row < p.rows;
  const int to = row * p.columns + first + o;
  const float carried = owner && p.residual ? load_bf16(p.residual + to) : 0.f;
  float4 total[kTiles] = {};
  int slot = 0, parity = 0;
#pragma unroll 1
  for (int u = 0; u < count; u++) {
    const char *const from = reinterpret_cast<const char *>(down_memory) + slot * Slots::kPitch;
    const float2 w = *reinterpret_cast<const float2 *>(weights[u] + 2 * t);
    const unsigned next = u + 1 < count ? choice.rows[u + 1] : 0;
    hidden += kRows * kPadded;
    reads = next & own_row;
    await(ring.full + slot, parity);
    Slot<F, 1> half[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      half[h].stored[0] = *reinterpret_cast<const uint8_t *>(from + of_lane + Slots::kCodes + h * 8 * Slots::kScales);
      half[h].words[0] = *reinterpret_cast<const uint4 *>(from + of_lane * 16 + h * 8 * Slots::kRow);
    }
    float4 c[kTiles] = {}, odd[kTiles] = {};
    multiply_by_need(any_large(half), [&](auto large) {
#pragma unroll
      for (int eight = 0; eight < 4; eight++) {
#pragma unroll
        for (int h = 0; h < kHalves; h += 2) {
          const bool both = h + 1 < kHalves;
          multiply_word<F, decltype(large)::value>(c[h / 2], odd[h / 2], half[h], both ? &half[both ? h + 1 : h] : nullptr, eight, b[eight]);
        }
        load_rows_at(b[eight], hidden + eight * kPiece, reads); // as soon as they have room: they take longer than anything else here
      }
    });
    __syncwarp();
    if (lane == 0) arrive(ring.empty + slot);
    if (++slot == kSlots) slot = 0, parity ^= 1;
    const bool even = chosen >> (2 * t) & 1, odd_row = chosen >> (2 * t + 1) & 1;
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
      const float4 v = add(c[j], odd[j]);
      if (even) total[j].x = fmaf(w.x, v.x, total[j].x), total[j].z = fmaf(w.x, v.z, total[j].z);
      if (odd_row) total[j].y = fmaf(w.y, v.y, total[j].y), total[j].w = fmaf(w.y, v.w, total[j].w);
    }
    chosen = next;
  }
  float4 *const red = reinterpret_cast<float4 *>(down_memory);
  __syncthreads(); // nobody reads weights any more
#pragma unroll
  for (int j = 0; j < kTiles; j++) red[(warp * kTiles + j) * 32 + lane] = total[j];
  __syncthreads();
  if (!owner) return;
  const int which = (o >> 3 & 1) * 2 + (r & 1), of = Slots::output(o & 7) * 4 + r / 2;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) sum += reinterpret_cast<const float *>(red + (w * kTiles + o / kOutputs) * 32 + of)[which];
#pragma unroll
  for (int k = 0; k < kGroupChoices; k++) {
    if (k >= choice.owns[r] || !p.down_bias) break;
    sum = fmaf(choice.weight[r][k], __bfloat162float(biases[choice.place[r][k]][o]), sum);
  }
  p.y[to] = __float2bfloat16(sum + carried);
}

// Whether a GPU of so many multiprocessors does all shares at once.
template <int kWidth, class P>
inline bool has_down_tiles(const P &p, int blocks) {
  return p.width == kWidth && p.columns % DownSlot<kWidth>::kOwn == 0 && p.columns / DownSlot<kWidth>::kOwn <= blocks;
}
template <int kWidth, int kWarps, int kSlots, class P>
inline cudaError_t launch_down_tiles(const P &p, cudaStream_t stream) {
  const dim3 grid(p.columns / DownSlot<kWidth>::kOwn, (p.rows + kRows - 1) / kRows);
  return launch(down_tiles<P, kWidth, kWarps, kSlots>, grid, kWarps * 32 + 32, kSlots * DownSlot<kWidth>::kPitch, stream, 1, p);
}

} // namespace eagle3
