// Down of packed_down.cuh by whole numbers, where one unit is all that a row's expert has: a warp takes an expert at a time, and of the
// rows that chose it one after the other.
#pragma once

#include "digits.cuh"
#include "packed_down.cuh"

namespace eagle3 {

template <class P, int kWarps, int kHalves, int kResident>
__global__ void __launch_bounds__(kWarps * 32, kResident) packed_down_digits(P p, unsigned *launches) {
  using F = typename P::Format;
  constexpr int kOwn = kHalves * 8, kSpans = kUnitSpans, kWords = kUnit / 8; // outputs of the block
  static_assert(kHalves % 2 == 0 && kHalves <= 4, "a lane of four has a half");
  static_assert(kOwn * kRows <= kWarps * 32, "a thread for each output and row");
  extern __shared__ uint4 down_memory[];
  __shared__ GroupChoice choice;
  __shared__ uint4 digits[kWarps][kSpans * 16], zeros[kSpans * 16];
  float *const sums = reinterpret_cast<float *>(down_memory); // [choices][kOwn][8]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first = share_begin(p.columns, blockIdx.x), last = share_begin(p.columns, blockIdx.x + 1);
  choice.template clear<kWarps * 32>();
  if (threadIdx.x < kSpans * 16) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
  OwnPairs<kWarps * 32> own(p);
  own.load(p); // older than the kernel before this one
  typename F::template Beside<kWarps, kHalves> beside(p, sums + p.choices * kOwn * kRows);
  beside.fetch(p, first, last);
  __syncthreads();
  const int count = choose_rows<kWarps * 32, true>(p, own, choice);
  using Place = typename Slot<F, kSpans>::Place;
  Slot<F, kSpans> half[kHalves];
  int out[kHalves]; // where the lane's rows begin, in words of an expert; past the block's last output its last one again
#pragma unroll
  for (int h = 0; h < kHalves; h++) out[h] = min(first + h * 8 + g, last - 1) * kWords + t * 4;
  auto fetch = [&](int u) {
    const size_t before = static_cast<size_t>(choice.list[u < count ? u : 0]) * static_cast<unsigned>(p.columns * kWords);
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      const Place at(p.down, p.down_scale, before + out[h]);
#pragma unroll
      for (int q = 0; q < kSpans; q++) half[h].fetch(q, at, u < count);
    }
  };
  fetch(warp);
  // the lane's eight of a row
  const bf16 *const hidden = p.hidden + hidden_row(p, 0, 0) + ((lane & 16) + (lane & 3) * 4 + (lane >> 2 & 3)) * 8;
  wait_for_predecessor();
  launch_dependents();
  count_launch(launches);
  uint4 row; // the next one
  auto ask = [&](int u, int r) { row = load_rows(hidden + (u * kRows + r) * kUnit); };
  if (warp < count) ask(warp, __ffs(choice.rows[warp]) - 1);
  beside.rows(p);
  const int o = threadIdx.x / kRows, r = threadIdx.x % kRows, row_of = blockIdx.y * kRows + r; // what this thread adds in the end
  const bool owner = o < kOwn && first + o < last && row_of < p.rows;
  const int to = row_of * p.columns + first + o;
  const float carried = owner && p.residual ? load_bf16(p.residual + to) : 0.f;
  beside.multiply();
  const uint32_t upper = 0xf0f0f0f0u * gridDim.z; // of which there is one
  const uint4 *const b = has_digits(lane) ? digits[warp] + g : zeros;
#pragma unroll 1
  for (int u = warp; u < count; u += kWarps) {
    unsigned left = choice.rows[u];
    typename Slot<F, kSpans>::Scales scales[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; h++) scales[h] = half[h].scales();
#pragma unroll 1
    while (left) {
      const int r = __ffs(left) - 1;
      left &= left - 1;
      const Digits own = digits_of(row);
      const float power[kSpans] = {__shfl_sync(kAll, own.power, t * 4), __shfl_sync(kAll, own.power, 16 + t * 4)};
      store_digits(digits[warp] + (lane & 16), lane & 15, own);
      __syncwarp();
      const int next = left ? u : u + kWarps;
      if (next < count) ask(next, __ffs(left ? left : choice.rows[next]) - 1);
      float sum[kHalves] = {};
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
#pragma unroll
        for (int h = 0; h < kHalves; h += 2) {
          const WholeSums s(half[h].words[q], half[h + 1].words[q], upper, b + q * 16);
          sum[h] = fmaf(s.top, scales[h].of(q) * power[q], sum[h]);
          sum[h + 1] = fmaf(s.bottom, scales[h + 1].of(q) * power[q], sum[h + 1]);
        }
      }
      __syncwarp(); // the digits are read
      // of the four groups of a span: each lane half of the outputs, then a quarter
#pragma unroll
      for (int n = kHalves / 2, o = 2; n; n >>= 1, o >>= 1)
#pragma unroll
        for (int h = 0; h < n; h++) sum[h] = (t & o ? sum[h + n] : sum[h]) + __shfl_xor_sync(kAll, t & o ? sum[h] : sum[h + n], o);
      if constexpr (kHalves == 2) sum[0] += __shfl_xor_sync(kAll, sum[0], 1);
      const int h = kHalves == 2 ? t >> 1 : t;
      if (kHalves == 4 || !(t & 1)) sums[(choice.rank[u][r] * kOwn + h * 8 + g) * kRows + r] = sum[0];
    }
    fetch(u + kWarps);
  }
  __syncthreads();
  if (!owner) return;
  const float total = weighted_sum(choice, r, [&](int k) { return sums[(k * kOwn + o) * kRows + r]; });
  p.y[to] = __float2bfloat16(total + beside.sum(o, r) + carried);
}

template <int kWarps, int kHalves, int kResident, class P>
inline cudaError_t launch_packed_down_digits(const P &p, unsigned *launches, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks, (p.rows + kRows - 1) / kRows);
  const size_t shared = static_cast<size_t>(p.choices) * kHalves * 8 * kRows * sizeof(float) + P::Format::template Beside<kWarps, kHalves>::bytes(p);
  return launch(packed_down_digits<P, kWarps, kHalves, kResident>, grid, kWarps * 32, shared, stream, 1, p, launches);
}

} // namespace eagle3
