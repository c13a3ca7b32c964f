// Rows as whole numbers, for products of int8 with the four-bit codes of INT4: sums are exact, and a word of codes takes half the
// instructions that weights in bf16 take.
//
// A column of a row is a whole number times a power of two that the 32 columns of a group share: the largest of them counts 2^13 to
// 2^14, so what is 64 times smaller keeps the 8 bits of a bf16, and what is smaller still is rounded by less than 2^-14 of the largest.
// A number is 256 * upper + lower, two signed digits of 8 bits.
//
// A product of 16 weight rows with a span of one row has eight columns of B, two digits for each of its four groups: a lane's codes
// are of one group, and it has zeros in the columns of the others. So every group has a sum of its own, in the lane that has its scale,
// which is multiplied once a span and weight row; and weights stay as they were loaded.
//
// Law 1: a row's numbers follow from the row alone, whole sums do not depend on an order, and the floats that they become are added
// in one order. A group with an infinite number or a NaN is NaN.
#pragma once

#include "packed_rows.cuh"

namespace eagle3 {

// c[16, 8] += a[16, 32] b[32, 8], whole numbers. Lane (g, t) has columns 4t to 4t + 3 and 16 more of a's rows g and g + 8 and of b's
// column g; c as mma has it.
__device__ __forceinline__ void mma_whole(int4 &c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c.x), "+r"(c.y), "+r"(c.z), "+r"(c.w)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four codes of a word, q + 8 each, as bytes 16 * q: those at its even places, or at its odd ones. upper: 0xf0f0f0f0, a number that the
// assembler does not know, which makes two operations of one with two known ones.
__device__ __forceinline__ uint32_t odd_codes(uint32_t word, uint32_t upper) { return (word & upper) ^ 0x80808080u; }
__device__ __forceinline__ uint32_t even_codes(uint32_t word, uint32_t upper) { return odd_codes(word * 16u, upper); }
__device__ __forceinline__ void mma_codes(int4 &c, uint32_t top, uint32_t bottom, uint32_t upper, uint32_t even, uint32_t odd) {
  mma_whole(c, even_codes(top, upper), even_codes(bottom, upper), odd_codes(top, upper), odd_codes(bottom, upper), even, odd);
}

// Eight columns as digits: of two numbers of four each, those at even places and at odd ones; the power is a sixteenth, since codes
// count 16.
struct Digits {
  uint2 upper, lower;
  float power;
};
// v: pairs (0, 4), (1, 5), (2, 6), (3, 7) in bf16; four neighbouring lanes have a group. All lanes call it.
__device__ __forceinline__ Digits digits_of(const uint4 &v) {
  constexpr uint32_t kSize = 0x7fff7fffu;
  const uint32_t *pairs = &v.x;
  uint32_t top = __vmaxu2(__vmaxu2(v.x & kSize, v.y & kSize), __vmaxu2(v.z & kSize, v.w & kSize));
  top = max(top >> 16, top & 0xffffu);
  top = max(top, __shfl_xor_sync(kAll, top, 1));
  top = max(top, __shfl_xor_sync(kAll, top, 2));
  constexpr unsigned kLeast = 24; // what is smaller is far below what a sum of floats holds
  const unsigned exponent = max(top >> 7, kLeast);
  const float factor = __uint_as_float((267u - exponent) << 23); // 2^13 by the power of the largest
  uint32_t number[8];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    constexpr float kWhole = 12582912.f + 128.f; // bits end with the number and 128 there: so the upper digit is rounded
    number[j] = __float_as_uint(fmaf(low(pairs[j]), factor, kWhole));
    number[j + 4] = __float_as_uint(fmaf(high(pairs[j]), factor, kWhole));
  }
  Digits d;
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    const uint32_t a = __byte_perm(number[odd], number[2 + odd], 0x5140), b = __byte_perm(number[4 + odd], number[6 + odd], 0x5140);
    (odd ? d.lower.y : d.lower.x) = __byte_perm(a, b, 0x5410) ^ 0x80808080u;
    (odd ? d.upper.y : d.upper.x) = __byte_perm(a, b, 0x7632);
  }
  d.power = __uint_as_float(exponent == 255 ? 0x7fc00000u : (exponent - 17u) << 23);
  return d;
}
// A span's digits lie in 16 pieces of 16 bytes: the first two eights of every group and then the other two, of each the upper digits
// and the lower ones. c: which eight of the span.
__device__ __forceinline__ void store_digits(uint4 *span, int c, const Digits &d) {
  uint2 *const to = reinterpret_cast<uint2 *>(span + (c >> 1 & 1) * 8 + (c >> 2 & 3) * 2) + (c & 1);
  to[0] = d.upper, to[2] = d.lower;
}
// Whether the lane's column of B has digits of the lane's own group: pieces lane / 4 and 8 more of a span. Others have zeros.
__device__ __forceinline__ bool has_digits(int lane) { return (lane & 3) == lane >> 3; }

// Sums of a span of rows g and g + 8 of codes with one row's digits, from `digits` on, over the lane's group.
struct WholeSums {
  float top, bottom;
  __device__ __forceinline__ WholeSums(const uint4 &above, const uint4 &below, uint32_t upper, const uint4 *digits) {
    const uint4 first = digits[0], second = digits[8];
    int4 c = make_int4(0, 0, 0, 0);
    mma_codes(c, above.x, below.x, upper, first.x, first.y);
    mma_codes(c, above.y, below.y, upper, first.z, first.w);
    mma_codes(c, above.z, below.z, upper, second.x, second.y);
    mma_codes(c, above.w, below.w, upper, second.z, second.w);
    top = __int2float_rn(c.x * 256 + c.y), bottom = __int2float_rn(c.z * 256 + c.w);
  }
};

template <int kWarps, int kSpans, int kHeld>
struct DigitRows {
  static constexpr int kThreads = kWarps * 32, kChunks = kWarps * kSpans * 16, kPitch = kChunks + 4;
  static constexpr int kOwn = kChunks / kThreads; // chunks of a thread
  static_assert(kOwn * kThreads == kChunks, "a warp has whole spans");
  using Powers = float[kHeld][kWarps][4][kSpans]; // of rows, warps, lanes and their spans

  // Rows as GainedRows<Int4Format, …> lays them out, in their own place: a span passes through half a warp. A barrier of the block
  // precedes and another one follows.
  static __device__ __forceinline__ void make(uint4 *rows, Powers &powers, int live) {
#pragma unroll 1
    for (int i = 0; i < live * kOwn; i++) {
      const int r = i / kOwn, c = threadIdx.x + i % kOwn * kThreads;
      uint4 *const row = rows + r * kPitch;
      const Digits own = digits_of(row[c]);
      __syncwarp();
      store_digits(row + c / 16 * 16, c % 16, own);
      if ((c & 3) == 0) powers[r][c / 16 / kSpans][c >> 2 & 3][c / 16 % kSpans] = own.power;
    }
  }
};

} // namespace eagle3
