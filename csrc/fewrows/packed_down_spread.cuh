// Down of packed_down.cuh for experts wide enough that every warp has columns of its own.
#pragma once

#include "packed_down.cuh"

namespace eagle3 {

// packed_down where every warp has kSpans spans of the width of its own: it passes all experts in ascending order, its weighted
// sums stay in registers, and the warps' totals are added in the end. Codes of kDepth experts are on their way.
template <class P, int kWarps, int kSpans, int kDepth, int kHalves>
__global__ void __launch_bounds__(kWarps * 32, 1) packed_down_spread(P p) {
  using F = typename P::Format;
  constexpr int kTiles = (kHalves + 1) / 2, kOwn = kHalves * 8; // outputs of the block
  static_assert(kOwn * kRows <= kWarps * 32, "a thread for each output and row");
  __shared__ float4 red[kWarps][kTiles][32];
  __shared__ GroupChoice choice;
  __shared__ bf16 biases[F::kBias ? kGroupChosen : 1][F::kBias ? kOwn : 1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first = share_begin(p.columns, blockIdx.x), last = share_begin(p.columns, blockIdx.x + 1);
  choice.template clear<kWarps * 32>();
  OwnPairs<kWarps * 32> own(p);
  own.load(p); // older than the kernel before this one
  __syncthreads();
  const int count = choose_rows<kWarps * 32, true>(p, own, choice);
  const int words = p.width / 8, group = warp * kSpans * 4 + t, padded = padded_width(p);
  int at[kHalves]; // where the lane's codes lie, in words of an expert; past the block's last output its last one's again
#pragma unroll
  for (int h = 0; h < kHalves; h++) at[h] = min(first + h * 8 + g, last - 1) * words + group * 4;
  Slot<F, kSpans> half[kDepth][kHalves];
  auto fetch = [&](int d, int u) {
    const size_t before = static_cast<size_t>(choice.list[u]) * static_cast<unsigned>(p.columns * words);
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      const typename Slot<F, kSpans>::Place place(p.down, p.down_scale, before + at[h]);
#pragma unroll
      for (int q = 0; q < kSpans; q++) half[d][h].fetch(q, place, (group + q * 4) * 4 < words);
    }
  };
#pragma unroll
  for (int d = 0; d < kDepth; d++)
    if (d < count) fetch(d, d);
  if constexpr (F::kBias)
#pragma unroll 1
    for (int i = threadIdx.x; p.down_bias && i < count * kOwn; i += kWarps * 32)
      biases[i / kOwn][i % kOwn] = p.down_bias[static_cast<size_t>(choice.list[i / kOwn]) * p.columns + min(first + i % kOwn, last - 1)];
  const bf16 *const hidden = p.hidden + hidden_row(p, 0, g) + warp * kSpans * kSpan + t * 8;
  wait_for_predecessor();
  launch_dependents();
  uint4 b[kSpans * 4] = {};
  auto rows = [&](int u, int q) { // where nothing is read, what was there meets zeros or is left out
    if ((group + q * 4) * 4 >= words || !(choice.rows[u] >> g & 1)) return;
#pragma unroll
    for (int i = 0; i < 4; i++) b[q * 4 + i] = load_rows(hidden + u * (kRows * padded) + q * kSpan + i * kPiece);
  };
  if (count)
#pragma unroll
    for (int q = 0; q < kSpans; q++) rows(0, q);
  const int o = threadIdx.x / kRows, r = threadIdx.x % kRows, row = blockIdx.y * kRows + r; // what this thread adds in the end
  const bool owner = o < kOwn && first + o < last && row < p.rows;
  const int to = row * p.columns + first + o;
  const float carried = owner && p.residual ? load_bf16(p.residual + to) : 0.f;
  float4 total[kTiles] = {};
  auto expert = [&](auto slot, int u) { // the expert in this slot, and the next one into it
    constexpr int d = decltype(slot)::value;
    float4 c[kTiles] = {}, odd[kTiles] = {};
    auto multiply_all = [&](auto large) {
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
        multiply_halves<F, decltype(large)::value>(c, odd, half[d], q, [&](int eight) { return b[q * 4 + eight]; });
        if (u + 1 < count) rows(u + 1, q); // before the codes that are needed later: loads come in the order in which they were asked for
      }
    };
    multiply_by_need(any_large(half[d]), multiply_all);
    if (u + kDepth < count) fetch(d, u + kDepth);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = 2 * t + i;
      if (!(choice.rows[u] >> r & 1)) continue;
      const float w = choice.weight[r][choice.rank[u][r]];
#pragma unroll
      for (int j = 0; j < kTiles; j++) {
        const float4 v = add(c[j], odd[j]);
        if (i)
          total[j].y = fmaf(w, v.y, total[j].y), total[j].w = fmaf(w, v.w, total[j].w);
        else
          total[j].x = fmaf(w, v.x, total[j].x), total[j].z = fmaf(w, v.z, total[j].z);
      }
    }
  };
#pragma unroll 1
  for (int u = 0; u < count; u += kDepth) {
    expert(Constant<0>(), u);
    if constexpr (kDepth > 1)
      if (u + 1 < count) expert(Constant<1>(), u + 1);
  }
#pragma unroll
  for (int j = 0; j < kTiles; j++) red[warp][j][lane] = total[j];
  __syncthreads();
  if (!owner) return;
  const int which = (o >> 3 & 1) * 2 + (r & 1), of = (o & 7) * 4 + r / 2;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) sum += reinterpret_cast<const float *>(&red[w][o / kOutputs][of])[which];
  if constexpr (F::kBias)
#pragma unroll
    for (int k = 0; k < kGroupChoices; k++) {
      if (k >= choice.owns[r] || !p.down_bias) break;
      sum = fmaf(choice.weight[r][k], __bfloat162float(biases[choice.place[r][k]][o]), sum);
    }
  p.y[to] = __float2bfloat16(sum + carried);
}

template <int kWarps, int kSpans, int kDepth, int kHalves, class P>
inline cudaError_t launch_packed_down_spread(const P &p, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks, (p.rows + kRows - 1) / kRows);
  return launch(packed_down_spread<P, kWarps, kSpans, kDepth, kHalves>, grid, kWarps * 32, 0, stream, 1, p);
}

} // namespace eagle3
