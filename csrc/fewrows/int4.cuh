// Grouped experts of few rows over INT4 weights (kernels/experts_int4.py): packed.cuh with codes q + 8, the lowest bits first,
// and a bf16 scale of each group. Products are whole numbers (digits.cuh); in down of experts wider than a unit they are of bf16, where a
// weight is (code - 8) * scale, rounded once.
#pragma once

#include "packed_down_digits.cuh"
#include "packed_gate_up.cuh"

namespace eagle3 {

// 128 + each of two codes of a word, in bf16, whose last bit counts 1 there.
__device__ __forceinline__ uint32_t raised(uint32_t word) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(0x000f000fu), "r"(0x43004300u)); // (a & b) | c
  return out;
}

struct Int4Format {
  using Scale = uint16_t; // bf16
  template <int kWarps, int kHalves>
  using Beside = SharedDown<kWarps, kHalves>;
  template <int kColumns, int kWarps, int kSpans>
  using Rows = GainedRows<Int4Format, kColumns, kWarps, kSpans>;
  static constexpr bool kBias = false;
  static constexpr int kCandidates = 12;

  // The lowest 8 bits of a bf16 alone are their number times 2^-133 (the last of them is the exponent's 1, where the numbers go on
  // as they began), and 8 scales are exact: one fused operation makes a pair of weights of codes where they lie in a byte.
  struct Factor {
    __nv_bfloat162 lower, upper, offset; // scale * 2^133 and * 2^129, -8 * scale
  };
  static __device__ __forceinline__ uint32_t both(uint32_t stored) { return stored * 0x10001u; }
  static __device__ __forceinline__ __nv_bfloat162 pair(uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162 *>(&bits); }
  static __device__ __forceinline__ Factor factor(uint32_t both) {
    return {pair(both + 133u * 0x00800080u), pair(both + 129u * 0x00800080u), pair(both + 0x81808180u)};
  }
  // Scales that are no normal numbers below 1/32.
  static __device__ __forceinline__ bool large(uint32_t stored) { return stored - 0x80u >= 0x3c80u; }
  // bf16 pairs of columns (0, 4), (1, 5), (2, 6), (3, 7)
  template <bool kLarge>
  static __device__ __forceinline__ uint4 decode(uint32_t word, Factor scale, uint32_t both) {
    uint4 out;
    uint32_t *o = reinterpret_cast<uint32_t *>(&out);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      __nv_bfloat162 value;
      if constexpr (kLarge) {
        const uint32_t bits = raised(word >> (4 * i));
        value = __hmul2(__hsub2(*reinterpret_cast<const __nv_bfloat162 *>(&bits), __float2bfloat162_rn(136.f)), pair(both));
      } else {
        const uint32_t bits = (i < 2 ? word : word >> 8) & (i & 1 ? 0x00f000f0u : 0x000f000fu);
        value = __hfma2(pair(bits), i & 1 ? scale.upper : scale.lower, scale.offset);
      }
      o[i] = *reinterpret_cast<const uint32_t *>(&value);
    }
    return out;
  }
  static __device__ __forceinline__ uint4 operand(const uint4 &v) {
    return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                      __byte_perm(v.y, v.w, 0x7632));
  }
  static __device__ __forceinline__ uint4 straight(const uint4 &v) {
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
  }
  static __device__ __forceinline__ int place(int i) { return i < 4 ? 2 * i : 2 * i - 7; }
  static __device__ __forceinline__ int natural(int place) { return place / 2 + place % 2 * 4; }
  static __device__ __forceinline__ float activation(float gate, float up) { return silu(gate) * up; }
};

constexpr int kInt4Warps = 8; // of a block of down

struct Int4Experts {
  using Format = Int4Format;
  const bf16 *x;             // [rows, columns] normed rows
  const int64_t *ids;        // [rows, choices]
  const float *weights;      // [rows, choices]
  const uint32_t *gate_up;   // [experts, 2 * width, columns / 8], gates first
  const uint16_t *gate_up_scale; // bf16 [experts, 2 * width, columns / 32]
  const uint32_t *down;      // [experts, columns, width / 8]
  const uint16_t *down_scale; // bf16 [experts, columns, width / 32]
  bf16 *hidden;              // [groups, 64, 8, width] scratch, paired
  const bf16 *residual;      // [rows, columns] or null
  const bf16 *shared;        // [rows, shared_width], act(gate) * up of a shared expert, or null
  const bf16 *shared_down;   // [columns, shared_width]
  bf16 *y;                   // [rows, columns]
  int rows, columns, width, experts, choices, shared_width; // shared_width: a multiple of 256, 0: no shared expert
};

// Down by the width alone: one unit is all that a row's expert has, and is multiplied by digits, or many spans follow one another.
template <int kHalves>
inline cudaError_t int4_down(const Int4Experts &p, unsigned *launches, int grid, cudaStream_t stream) {
  return p.width == kUnit ? launch_packed_down_digits<kInt4Warps, kHalves, 2>(p, launches, grid, stream)
                          : launch_packed_down<kInt4Warps, kHalves, 1, 3, 2>(p, launches, grid, stream);
}

// Gate and up by the columns, down by what the blocks' shares are: two blocks of 8 warps a multiprocessor, or as many blocks as
// two tiles each ask for. router: with a gate, rows are routed first, in the launch of gate and up where that has such a kernel;
// without, they come routed.
inline cudaError_t int4_experts(const Int4Experts &p, const Router &router, int blocks, cudaStream_t stream) {
  if (!packed_serves(p) || p.shared_width % (kInt4Warps * kPiece)) return cudaErrorInvalidValue;
  const bool inside = routes_inside(p, router);
  unsigned *const launches = inside ? router.launches : nullptr;
  cudaError_t e = router.gate && !inside ? routed(router, blocks, stream) : cudaSuccess;
  if (e != cudaSuccess) return e;
  e = cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: e = launch_packed_gate_up<256, 2, 2, 2>(p, router, inside, blocks, stream); break;
  case 512: e = launch_packed_gate_up<512, 2, 2, 2>(p, router, inside, blocks, stream); break;
  case 2048: e = launch_packed_gate_up<2048, 8, 2, 2>(p, router, inside, blocks, stream); break;
  case 4096: e = launch_packed_gate_up<4096, 16, 2, 1>(p, router, inside, blocks, stream); break;
  case 7168: e = launch_packed_gate_up<7168, 14, 4, 1>(p, router, inside, blocks, stream); break;
  default: break;
  }
  if (e != cudaSuccess) return e;
  const int least = (p.columns + 31) / 32, share = 2 * blocks < p.columns ? 2 * blocks : p.columns, grid = share > least ? share : least;
  return (p.columns + grid - 1) / grid <= kOutputs ? int4_down<2>(p, launches, grid, stream) : int4_down<4>(p, launches, grid, stream);
}

} // namespace eagle3
