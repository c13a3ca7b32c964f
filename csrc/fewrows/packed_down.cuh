// Down, a shared expert, the weighted sum and the residual over four-bit codes: the second kernel of packed.cuh.
#pragma once

#include "packed.cuh"

namespace eagle3 {

// How down divides the width of an expert: parts of `per` spans each, so that one row's experts are work for all warps. By the
// model's sizes alone.
struct DownParts {
  int spans, per, parts;
  __host__ __device__ __forceinline__ DownParts(int width, int choices, int warps) : spans((width + kSpan - 1) / kSpan) {
    const int units = (spans + kUnitSpans - 1) / kUnitSpans, most = warps / choices < 1 ? 1 : warps / choices;
    per = (units + most - 1) / most * kUnitSpans;
    parts = (spans + per - 1) / per;
  }
};

// A warp's walk over the spans of its jobs, kSpans at a time: a job is a part of an expert, every kWarps-th is this warp's.
template <int kWarps, int kSpans>
struct DownWalk {
  int job, u, part, span, end; // end: of the part's spans
  __device__ __forceinline__ void begin(const DownParts &d, int own) {
    job = own, u = static_cast<int>(static_cast<unsigned>(job) / static_cast<unsigned>(d.parts)), part = job - u * d.parts;
    span = part * d.per, end = min(d.spans, span + d.per);
  }
  __device__ __forceinline__ void next(const DownParts &d) {
    span += kSpans;
    if (span >= end) begin(d, job + kWarps);
  }
};

// The shared expert's part of down: every warp a slice of its width, weights in slots of a thread's own from before the wait.
template <int kWarps, int kHalves>
struct SharedDown {
  static constexpr int kTiles = (kHalves + 1) / 2;
  const int pieces; // of a warp
  float4 *const red; // [warps][tiles][32]
  uint4 *const slots;
  static constexpr int kPieces = 2; // at most
  uint4 x[kPieces];
  template <class P>
  __device__ __forceinline__ SharedDown(const P &p, float *memory)
      : pieces(p.shared_width / (kWarps * kPiece)), red(reinterpret_cast<float4 *>(memory)),
        slots(reinterpret_cast<uint4 *>(red + kWarps * kTiles * 32) + threadIdx.x) {}
  template <class P>
  static size_t bytes(const P &p) {
    return p.shared_width ? static_cast<size_t>(kWarps) * 32 * kTiles * (sizeof(float4) + p.shared_width / (kWarps * kPiece) * 2 * sizeof(uint4)) : 0;
  }
  template <class P>
  __device__ __forceinline__ void fetch(const P &p, int first, int last) { // before the wait
    if (!pieces) return;
    const int lane = threadIdx.x & 31, slice = (threadIdx.x >> 5) * pieces * kPiece + (lane & 3) * 8;
#pragma unroll 1
    for (int i = 0; i < 2 * kTiles * pieces; i++) { // [tile][piece][half]
      const int out = min(first + i / (2 * pieces) * kOutputs + (i & 1) * 8 + (lane >> 2), last - 1);
      copy_async(slots + i * kWarps * 32, p.shared_down + static_cast<size_t>(out) * p.shared_width + slice + i / 2 % pieces * kPiece, true);
    }
    commit_copies();
  }
  template <class P>
  __device__ __forceinline__ void rows(const P &p) { // behind it
    if (!pieces) return;
    const int lane = threadIdx.x & 31, slice = (threadIdx.x >> 5) * pieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + (lane >> 2);
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (i < pieces && row < p.rows) x[i] = load_rows(p.shared + static_cast<size_t>(row) * p.shared_width + slice + i * kPiece);
    }
  }
  // This warp's slice, into shared memory.
  __device__ __forceinline__ void multiply() const {
    if (!pieces) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float4 sums[kTiles] = {};
    wait_copies<0>();
#pragma unroll
    for (int i = 0; i < kPieces; i++)
#pragma unroll
      for (int j = 0; j < kTiles; j++) {
        if (i >= pieces) continue;
        const uint4 *w = slots + 2 * (j * pieces + i) * kWarps * 32;
        mma_piece(sums[j], w[0], w[kWarps * 32], x[i]);
      }
#pragma unroll
    for (int j = 0; j < kTiles; j++) red[(warp * kTiles + j) * 32 + lane] = sums[j];
  }
  // Of output `o` of the block and row r: the warps' sums in ascending order.
  __device__ __forceinline__ float sum(int o, int r) const {
    const int which = (o >> 3 & 1) * 2 + (r & 1), lane = (o & 7) * 4 + r / 2;
    float total = 0.f;
    if (!pieces) return total;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += reinterpret_cast<const float *>(red + (w * kTiles + o / kOutputs) * 32 + lane)[which];
    return total;
  }
};

template <int kWarps, int kHalves>
struct NothingBeside {
  template <class P>
  __device__ __forceinline__ NothingBeside(const P &, float *) {}
  template <class P>
  static size_t bytes(const P &) { return 0; }
  template <class P>
  __device__ __forceinline__ void fetch(const P &, int, int) const {}
  template <class P>
  __device__ __forceinline__ void rows(const P &) const {}
  __device__ __forceinline__ void multiply() const {}
  __device__ __forceinline__ float sum(int, int) const { return 0.f; }
};

// Products of span q of the block's outputs, in `half` by eights, with b(eight) of the rows, on top of those of eights above and below.
template <class F, bool kLarge, int kHalves, int kSpans, int kTiles, class Rows>
__device__ __forceinline__ void multiply_halves(float4 (&c)[kTiles], float4 (&odd)[kTiles], const Slot<F, kSpans> (&half)[kHalves], int q, Rows b) {
#pragma unroll
  for (int h = 0; h < kHalves; h += 2) {
    const bool both = h + 1 < kHalves;
    multiply_words<F, kLarge>(c[h / 2], odd[h / 2], half[h].words[q], half[h].scale(q), both ? &half[both ? h + 1 : h].words[q] : nullptr,
                              both ? half[both ? h + 1 : h].scale(q) : 0, b);
  }
}

// What row r's experts make together, of(k) being what its k-th one does.
template <class Of>
__device__ __forceinline__ float weighted_sum(const GroupChoice &choice, int r, Of of) {
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < kGroupChoices; k++) {
    if (k >= choice.owns[r]) break;
    total = fmaf(choice.weight[r][k], of(k), total);
  }
  return total;
}

// Behind the wait: the kernel whose blocks read this number (packed_route.cuh) is done. launches: null where there was none.
__device__ __forceinline__ void count_launch(unsigned *launches) {
  if (launches && blockIdx.x == 0 && threadIdx.x == 0) ++*launches;
}

// Down, bias, weighted sum, shared expert, residual. Blocks share the outputs evenly, kHalves times 8 at most; the warps of a
// block share the experts and the parts of their width, codes of kDepth times kSpans spans are on their way. Sums lie in shared
// memory by a row's own experts, in ascending order.
template <class P, int kWarps, int kHalves, int kSpans, int kDepth, int kResident>
__global__ void __launch_bounds__(kWarps * 32, kResident) packed_down(P p, unsigned *launches) {
  using F = typename P::Format;
  constexpr int kTiles = (kHalves + 1) / 2, kOwn = kHalves * 8; // outputs of the block
  static_assert(kOwn * kRows <= kWarps * 32, "a thread for each output and row");
  extern __shared__ uint4 down_memory[];
  __shared__ GroupChoice choice;
  __shared__ bf16 biases[F::kBias ? kGroupChosen : 1][F::kBias ? kOwn : 1];
  float *const sums = reinterpret_cast<float *>(down_memory); // [parts][choices][kOwn][8]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const DownParts parts(p.width, p.choices, kWarps);
  const int first = share_begin(p.columns, blockIdx.x), last = share_begin(p.columns, blockIdx.x + 1);
  choice.template clear<kWarps * 32>();
  OwnPairs<kWarps * 32> own(p);
  own.load(p); // older than the kernel before this one
  typename F::template Beside<kWarps, kHalves> beside(p, sums + parts.parts * p.choices * kOwn * kRows);
  beside.fetch(p, first, last);
  __syncthreads();
  const int count = choose_rows<kWarps * 32, true>(p, own, choice), jobs = count * parts.parts;
  DownWalk<kWarps, kSpans> now, ahead;
  now.begin(parts, warp), ahead = now;
  using Place = typename Slot<F, kSpans>::Place;
  Slot<F, kSpans> half[kDepth][kHalves];
  const int words = p.width / 8;
  int out[kHalves]; // where the lane's rows begin, in words of an expert; past the block's last output its last one again
#pragma unroll
  for (int h = 0; h < kHalves; h++) out[h] = min(first + h * 8 + g, last - 1) * words + t * 4;
  auto fetch = [&](int d) { // what does not exist is zeros
    const size_t before = static_cast<size_t>(choice.list[ahead.u]) * static_cast<unsigned>(p.columns * words);
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      const Place at(p.down, p.down_scale, before + (out[h] + ahead.span * (kSpan / 8)));
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
        const bool live = ((ahead.span + q) * 4 + t) * 4 < words;
        if (!live) half[d][h].words[q] = make_uint4(0, 0, 0, 0);
        half[d][h].fetch(q, at, live);
      }
    }
  };
#pragma unroll
  for (int d = 0; d < kDepth; d++)
    if (ahead.job < jobs) fetch(d), ahead.next(parts);
  if constexpr (F::kBias)
#pragma unroll 1
    for (int i = threadIdx.x; p.down_bias && i < count * kOwn; i += kWarps * 32)
      biases[i / kOwn][i % kOwn] = p.down_bias[static_cast<size_t>(choice.list[i / kOwn]) * p.columns + min(first + i % kOwn, last - 1)];
  const int padded = padded_width(p);
  const bf16 *const hidden = p.hidden + hidden_row(p, 0, g) + t * 8;
  wait_for_predecessor();
  launch_dependents();
  count_launch(launches);
  beside.rows(p);
  uint4 b[kSpans * 4] = {};
  auto rows = [&](const DownWalk<kWarps, kSpans> &at, int q) { // where nothing is read, what was there meets zeros or is left out
    if (at.job >= jobs || !(choice.rows[at.u] >> g & 1) || ((at.span + q) * 4 + t) * 4 >= words) return;
    const bf16 *from = hidden + at.u * (kRows * padded) + (at.span + q) * kSpan;
#pragma unroll
    for (int i = 0; i < 4; i++) b[q * 4 + i] = load_rows(from + i * kPiece);
  };
#pragma unroll
  for (int q = 0; q < kSpans; q++) rows(now, q);
  const int o = threadIdx.x / kRows, r = threadIdx.x % kRows, row = blockIdx.y * kRows + r; // what this thread adds in the end
  const bool owner = o < kOwn && first + o < last && row < p.rows;
  const int to = row * p.columns + first + o;
  const float carried = owner && p.residual ? load_bf16(p.residual + to) : 0.f;
  beside.multiply();
  float4 c[kTiles] = {}, odd[kTiles] = {};
  auto unit = [&](auto slot) { // the spans in this slot, and the next ones into it
    constexpr int d = decltype(slot)::value;
    const DownWalk<kWarps, kSpans> old = now;
    now.next(parts);
    auto multiply_all = [&](auto large) {
#pragma unroll
      for (int q = 0; q < kSpans; q++) {
        multiply_halves<F, decltype(large)::value>(c, odd, half[d], q, [&](int eight) { return b[q * 4 + eight]; });
        rows(now, q); // before the codes that are needed later: loads come in the order in which they were asked for
      }
    };
    multiply_by_need(any_large(half[d]), multiply_all);
    if (ahead.job < jobs) fetch(d), ahead.next(parts);
    if (now.job == old.job) return;
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
      const float4 v = add(c[j], odd[j]);
      const float *of = &v.x;
#pragma unroll
      for (int i = 0; i < (2 * j + 1 < kHalves ? 4 : 2); i++) {
        const int r = 2 * t + (i & 1);
        if (choice.rows[old.u] >> r & 1) sums[((old.part * p.choices + choice.rank[old.u][r]) * kOwn + j * kOutputs + (i & 2) * 4 + g) * kRows + r] = of[i];
      }
      c[j] = odd[j] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
#pragma unroll 1
  while (now.job < jobs) {
    unit(Constant<0>());
    if constexpr (kDepth > 1)
      if (now.job < jobs) unit(Constant<1>());
    if constexpr (kDepth > 2)
      if (now.job < jobs) unit(Constant<2>());
  }
  __syncthreads();
  if (!owner) return;
  const float total = weighted_sum(choice, r, [&](int k) {
    float sum = 0.f;
#pragma unroll 4
    for (int part = 0; part < parts.parts; part++) sum += sums[((part * p.choices + k) * kOwn + o) * kRows + r];
    if constexpr (F::kBias)
      if (p.down_bias) sum += __bfloat162float(biases[choice.place[r][k]][o]);
    return sum;
  });
  p.y[to] = __float2bfloat16(total + beside.sum(o, r) + carried);
}

template <int kWarps, int kHalves, int kSpans, int kDepth, int kResident, class P>
inline cudaError_t launch_packed_down(const P &p, unsigned *launches, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks, (p.rows + kRows - 1) / kRows);
  size_t shared = static_cast<size_t>(DownParts(p.width, p.choices, kWarps).parts) * p.choices * kHalves * 8 * kRows * sizeof(float);
  shared += P::Format::template Beside<kWarps, kHalves>::bytes(p);
  return launch(packed_down<P, kWarps, kHalves, kSpans, kDepth, kResident>, grid, kWarps * 32, shared, stream, 1, p, launches);
}

} // namespace eagle3
