// Grouped experts of few rows over four-bit codes in groups of 32 columns: gate and up of every expert that a group of rows
// chose, then down with the weighted sum, a shared expert and the residual. int4.cuh and fp4.cuh say what the codes mean.
//
// A word holds eight codes of a row. A lane reads the four words of a group, a warp the four groups of a span for 8 rows; codes
// and scales wait in registers, the next ones are asked for where the last ones were. Everything but the rows is asked for
// before the wait wherever it is known, and shared memory stays small: half of it is left to L1, where loads in flight live.
//
// P: parameters of a kernel; its P::Format has
//   Scale: as stored; Factor, factor(stored): what codes of a group are multiplied by; decode<false>(word, factor, stored): a
//   row's A operands of two mma; decode<true>: the same for any scale, where one of them is large(stored);
//   operand(natural): eight columns in the order of decode, place(i): where one of eight lies in that order;
//   kWoven: gate and up rows lie in turn; Bias: of a gate and its up; kBias: down has biases; Beside: a shared expert's part of
//   down, SharedDown or NothingBeside; activation(gate, up).
#pragma once

#include "choice.cuh"

namespace eagle3 {

constexpr int kGroup = 32, kSpan = 128; // columns that share a scale; that a quad of lanes reads at once
constexpr int kUnitSpans = 2;           // of a unit, in which the width of an expert is divided
constexpr int kUnit = kUnitSpans * kSpan;

// Where column i of a row of `hidden` lies: lane t of a span finds its group's eights 4 chunks apart, each in F's order.
template <class F>
__device__ __forceinline__ int hidden_place(int i) {
  return i / kSpan * kSpan + (i % kGroup / 8 * 4 + i % kSpan / kGroup) * 8 + F::place(i % 8);
}

// One row's part in a lane's span: 32 codes and their scale. Zeros where `live` is false.
template <class F>
struct Codes {
  uint4 words;
  uint32_t stored;
  // at: of the word, a group has four
  __device__ __forceinline__ void fetch(const uint32_t *codes, const typename F::Scale *scales, int at, bool live) {
    words = live ? load_weights(codes + at) : make_uint4(0, 0, 0, 0);
    stored = live ? __ldg(scales + (at >> 2)) : 0;
  }
};

// Products of a span of rows g (and g + 8, where there is a bottom) with the group's rows, b: the lane's columns, as
// P::Format::operand orders them, eights kStride apart. kLarge: scales may be too large for one multiplication.
template <class F, bool kLarge, int kStride>
__device__ __forceinline__ void multiply_span(float4 &c, float4 &odd, const Codes<F> &top, const Codes<F> *bottom, const uint4 *b) {
  const typename F::Factor first = F::factor(top.stored), second = F::factor(bottom ? bottom->stored : 0);
  const uint32_t *tops = reinterpret_cast<const uint32_t *>(&top.words);
  const uint32_t *bottoms = reinterpret_cast<const uint32_t *>(&(bottom ? bottom->words : top.words));
#pragma unroll
  for (int eight = 0; eight < 4; eight++) {
    const uint4 above = F::template decode<kLarge>(tops[eight], first, top.stored);
    uint4 below = make_uint4(0, 0, 0, 0);
    if (bottom) below = F::template decode<kLarge>(bottoms[eight], second, bottom->stored);
    const uint4 v = b[eight * kStride];
    mma(c, above.x, below.x, above.y, below.y, v.x, v.y);
    mma(odd, above.z, below.z, above.w, below.w, v.z, v.w);
  }
}

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Whether one of several spans' scales is too large for one multiplication.
template <class F, int kSpans>
__device__ __forceinline__ bool any_large(const Codes<F> (&codes)[kSpans]) {
  bool large = false;
#pragma unroll
  for (int q = 0; q < kSpans; q++) large |= F::large(codes[q].stored);
  return large;
}
template <class F, int kHalves, int kSpans>
__device__ __forceinline__ bool any_large(const Codes<F> (&codes)[kHalves][kSpans]) {
  bool large = false;
#pragma unroll
  for (int h = 0; h < kHalves; h++) large |= any_large(codes[h]);
  return large;
}
// multiply(Constant<true>) where a lane of the warp has such a scale, else multiply(Constant<false>), which is cheaper.
template <class Multiply>
__device__ __forceinline__ void multiply_by_need(bool large, Multiply multiply) {
  if (__any_sync(kAll, large))
    multiply(Constant<true>());
  else
    multiply(Constant<false>());
}

// Columns of a row of `hidden`: whole units.
template <class P>
__host__ __device__ __forceinline__ int padded_width(const P &p) {
  return (p.width + kUnit - 1) / kUnit * kUnit;
}
template <class P>
__device__ __forceinline__ size_t hidden_row(const P &p, int u, int r) {
  return ((static_cast<size_t>(blockIdx.y) * kGroupChosen + u) * kRows + r) * padded_width(p);
}

template <class P>
inline bool packed_serves(const P &p) {
  return p.choices <= kGroupChoices && p.choices <= p.experts && p.experts <= kGroupExperts && p.width % kGroup == 0;
}

} // namespace eagle3
