// Grouped experts of few rows over four-bit codes in groups of 32 columns: gate and up of every expert that a group of rows
// chose, then down with the weighted sum, a shared expert and the residual. int4.cuh and fp4.cuh say what the codes mean.
//
// A word holds eight codes of a row. A lane reads the four words of a group, a warp the four groups of a span for 8 rows; codes
// and scales wait in registers, the next ones are asked for where the last ones were. Everything but the rows is asked for
// before the wait wherever it is known, and shared memory stays small: half of it is left to L1, where loads in flight live.
//
// P: parameters of a kernel; its P::Format has
//   Scale: as stored; both(stored): twice in a word where that serves; Factor, factor(both): what codes of a group are multiplied
//   by; decode<false>(word, factor, both): a row's A operands of two mma; decode<true>: the same for any scale, where one of
//   them is large(stored);
//   operand(natural): eight columns in the order of decode, straight(operand): back again, place(i): where one of eight lies in that
//   order; kCandidates: 32 times as many experts a router inside gate and up has at most;
//   bias(p, expert, unit): where those of a gate and its up are, if there are any; kBias: down has biases; Beside: a shared expert's
//   part of down, SharedDown or NothingBeside; activation(gate, up).
#pragma once

#include "choice.cuh"

namespace eagle3 {

constexpr int kGroup = 32, kSpan = 128; // columns that share a scale; that a quad of lanes reads at once
constexpr int kUnitSpans = 2;           // of a unit, in which the width of an expert is divided
constexpr int kUnit = kUnitSpans * kSpan;

// A number that is not found anew where it is needed.
__device__ __forceinline__ int held(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Where column i of a row of `hidden` lies: lane t of a span finds its group's eights 4 chunks apart, each in F's order.
template <class F>
__device__ __forceinline__ int hidden_place(int i) {
  return i / kSpan * kSpan + (i % kGroup / 8 * 4 + i % kSpan / kGroup) * 8 + F::place(i % 8);
}

// As load_weights_if.
__device__ __forceinline__ void load_scale_if(uint32_t &r, const uint8_t *p, bool live) {
  asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %2, 0;\n@live ld.global.u8 %0, [%1];}" : "+r"(r) : "l"(p), "r"(static_cast<int>(live)));
}
__device__ __forceinline__ void load_scale_if(uint32_t &r, const uint16_t *p, bool live) {
  asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %2, 0;\n@live ld.global.u16 %0, [%1];}" : "+r"(r) : "l"(p), "r"(static_cast<int>(live)));
}
__device__ __forceinline__ void load_scales_if(uint32_t &r, const void *p, bool live) {
  asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %2, 0;\n@live ld.global.u32 %0, [%1];}" : "+r"(r) : "l"(p), "r"(static_cast<int>(live)));
}
__device__ __forceinline__ void load_scales_if(uint32_t &r, uint32_t &s, const void *p, bool live) {
  asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %3, 0;\n@live ld.global.v2.u32 {%0,%1}, [%2];}"
               : "+r"(r), "+r"(s)
               : "l"(p), "r"(static_cast<int>(live)));
}

// Rows' parts in a lane's kSpans spans, for kernels whose warps read whole spans of a row one after the other. Scales of two bytes
// are loaded together, each lane some of the warp's own that follow one another, and go to who multiplies by them: half the
// registers and a quarter of the loads.
template <class F, int kSpans>
struct Slot {
  using Scale = typename F::Scale;
  static constexpr bool kPaired = sizeof(Scale) == 2 && kSpans % 2 == 0;
  static constexpr int kStored = kPaired ? kSpans / 2 : kSpans;
  uint4 words[kSpans] = {};
  uint32_t stored[kStored] = {};
  // Where a row's part of the lane lies: its first span's word (a group has four) and the scale of the first that it loads.
  struct Place {
    const uint32_t *codes, *first; // first: of the matrix
    const Scale *scales;           // of the matrix, where they are paired
    __device__ __forceinline__ Place(const uint32_t *codes, const Scale *scales, size_t at)
        : codes(codes + at), first(codes), scales(kPaired ? scales : scales + (at >> 2)) {}
    __device__ __forceinline__ void move(int words) {
      codes += words;
      if constexpr (!kPaired) scales += words >> 2;
    }
    __device__ __forceinline__ const Scale *pairs() const { // found when they are asked for: it takes registers
      int64_t at = codes - first;
      asm volatile("" : "+l"(at));
      return scales + (at >> 2) + (threadIdx.x & 3) * (kSpans - 1);
    }
  };
  // Span q of a row, where `live`; else what was there stays, and meets zeros or nobody.
  __device__ __forceinline__ void fetch(int q, const Place &at, bool live) {
    load_weights_if(words[q], at.codes + q * (kSpan / 8), live);
    if constexpr (!kPaired)
      load_scale_if(stored[q], at.scales + q * 4, live);
    else if (q == kSpans - 1)
      fetch_pairs<kStored>(0, at.pairs(), live);
  }
  // The lane's kPairs pairs of scales.
  template <int kPairs>
  __device__ __forceinline__ void fetch_pairs(int i, const Scale *from, bool live) {
    if constexpr (kPairs == 2)
      load_scales_if(stored[i], stored[i + 1], from, live);
    else
      load_scales_if(stored[i], from, live);
  }
  // The scale of span q that the lane multiplies by, as F::factor takes it. All lanes call it.
  __device__ __forceinline__ uint32_t scale(int q) const {
    static_assert(!kPaired || kSpans == 2 || kSpans == 4, "a lane's scales");
    if constexpr (!kPaired)
      return F::both(stored[q]);
    else if constexpr (kSpans == 4)
      return __byte_perm(__shfl_sync(kAll, stored[0], q, 4), __shfl_sync(kAll, stored[1], q, 4), 0x1010 + 0x2222 * (threadIdx.x & 3));
    else
      return pair_scale(stored[0], q);
  }
  // The same from pairs of a row's two spans.
  static __device__ __forceinline__ uint32_t pair_scale(uint32_t pairs, int q) {
    return __byte_perm(__shfl_sync(kAll, pairs, 2 * q + (threadIdx.x >> 1 & 1), 4), 0, 0x1010 + 0x2222 * (threadIdx.x & 1));
  }
  // Those of the lane's own group of each span, in bf16 all of them. All lanes call it.
  struct Scales {
    uint32_t pairs[(kSpans + 1) / 2];
    __device__ __forceinline__ float of(int q) const { return __uint_as_float(q & 1 ? pairs[q / 2] & 0xffff0000u : pairs[q / 2] << 16); }
  };
  __device__ __forceinline__ Scales scales() const {
    Scales own;
    if constexpr (kPaired && kSpans == 4) { // a lane has a span's: it exchanges with the one that is two further, then with its neighbour
      const int t = threadIdx.x & 3;
      const uint32_t kept = t < 2 ? stored[0] : stored[1], got = __shfl_xor_sync(kAll, t < 2 ? stored[1] : stored[0], 2);
      const unsigned mine = t & 1 ? 0x7632u : 0x5410u;
      const uint32_t same = __byte_perm(kept, got, mine), other = __shfl_xor_sync(kAll, __byte_perm(kept, got, mine ^ 0x2222u), 1);
      // spans t, t ^ 2 and t ^ 1, t ^ 3
      own.pairs[0] = __byte_perm(same, other, t == 0 ? 0x5410u : t == 1 ? 0x1054u : t == 2 ? 0x7632u : 0x3276u);
      own.pairs[1] = __byte_perm(same, other, t == 0 ? 0x7632u : t == 1 ? 0x3276u : t == 2 ? 0x5410u : 0x1054u);
    } else if constexpr (kPaired && kSpans == 2) {
      const int t = threadIdx.x & 3;
      own.pairs[0] = __byte_perm(__shfl_sync(kAll, stored[0], t >> 1, 4), __shfl_sync(kAll, stored[0], 2 + (t >> 1), 4), t & 1 ? 0x7632u : 0x5410u);
    } else {
#pragma unroll
      for (int q = 0; q < kSpans; q += 2) own.pairs[q / 2] = q + 1 < kSpans ? __byte_perm(scale(q), scale(q + 1), 0x5410) : scale(q);
    }
    return own;
  }
  static __device__ __forceinline__ bool large(uint32_t stored) {
    return kPaired ? F::large(stored & 0xffffu) | F::large(stored >> 16) : F::large(stored);
  }
  __device__ __forceinline__ bool large() const { // any of them
    bool any = false;
#pragma unroll
    for (int i = 0; i < kStored; i++) any |= large(stored[i]);
    return any;
  }
};

// Products of a span of rows g (and g + 8, where there is a bottom) with the group's rows, b(eight): the lane's columns, as
// P::Format::operand orders them. kLarge: scales may be too large for one multiplication.
template <class F, bool kLarge, class Rows>
__device__ __forceinline__ void multiply_words(float4 &c, float4 &odd, const uint4 &top, uint32_t top_scale, const uint4 *bottom,
                                               uint32_t bottom_scale, Rows b) {
  const typename F::Factor first = F::factor(top_scale), second = F::factor(bottom_scale);
  const uint32_t *tops = reinterpret_cast<const uint32_t *>(&top), *bottoms = reinterpret_cast<const uint32_t *>(bottom ? bottom : &top);
#pragma unroll
  for (int eight = 0; eight < 4; eight++) {
    const uint4 above = F::template decode<kLarge>(tops[eight], first, top_scale);
    uint4 below = make_uint4(0, 0, 0, 0);
    if (bottom) below = F::template decode<kLarge>(bottoms[eight], second, bottom_scale);
    const uint4 v = b(eight);
    mma(c, above.x, below.x, above.y, below.y, v.x, v.y);
    mma(odd, above.z, below.z, above.w, below.w, v.z, v.w);
  }
}
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Whether one of several rows' scales is too large for one multiplication.
template <class F, int kHalves, int kSpans>
__device__ __forceinline__ bool any_large(const Slot<F, kSpans> (&rows)[kHalves]) {
  bool large = false;
#pragma unroll
  for (int h = 0; h < kHalves; h++) large |= rows[h].large();
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
  return p.choices <= kGroupChoices && p.choices <= p.experts && p.experts <= kMostExperts && p.width % kGroup == 0;
}

} // namespace eagle3
