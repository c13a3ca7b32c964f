// Grouped experts of few rows with biases over MXFP4 weights (kernels/experts_mxfp4.py): packed.cuh with codes of e2m1 and a
// power of two of each group, one byte. Gate and up rows lie in turn; sizes are whole groups.
#pragma once

#include "down_tiles.cuh"
#include "packed_down_spread.cuh"
#include "packed_tiles.cuh"

namespace eagle3 {

// gpt-oss: the gate at most 7, up between -7 and 7; (up + 1) gate sigmoid(1.702 gate). NaN stays NaN.
__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  gate = gate > 7.f ? 7.f : gate;
  up = up > 7.f ? 7.f : up < -7.f ? -7.f : up;
  return (up + 1.f) * gate / (1.f + __expf(-1.702f * gate));
}

struct Fp4Format {
  using Scale = uint8_t;
  using Factor = __nv_bfloat162;
  template <int kWarps, int kHalves>
  using Beside = NothingBeside<kWarps, kHalves>;
  static constexpr bool kBias = true;
  static constexpr uint32_t kMost = 128; // stored

  static __device__ __forceinline__ Factor twice(uint32_t exponent) {
    const uint32_t bits = exponent * 0x00800080u;
    return *reinterpret_cast<const __nv_bfloat162 *>(&bits);
  }
  static __device__ __forceinline__ uint32_t both(uint32_t stored) { return stored; }
  // 2^126 times the power of two that is stored, 2^127 at most; the rest of powers that no weight needs is a second factor.
  static __device__ __forceinline__ Factor factor(uint32_t stored) { return twice(min(stored, kMost) + 126); }
  static __device__ __forceinline__ bool large(uint32_t stored) { return stored > kMost; }
  // Bits 15 and 8-6 of each half of a pair's word are sign and magnitude of its codes, as bf16 has them but 2^126 too low
  // (subnormals too). Left shifts run beside the integer unit, which is busier.
  template <bool kLarge>
  static __device__ __forceinline__ uint4 decode(uint32_t word, Factor factor, uint32_t stored) {
    constexpr uint32_t kMask = 0x81c081c0u;
    const uint32_t sixth = static_cast<uint32_t>(static_cast<int32_t>(word) >> 6);
    uint32_t bits[4] = {word & kMask, word << 6 & kMask, __funnelshift_l(word, word, 12) & kMask, (word << 2 ^ sixth) & kMask};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&bits[i]), factor);
      if constexpr (kLarge) value = __hmul2(value, twice(max(stored, kMost) - kMost + 127));
      bits[i] = *reinterpret_cast<const uint32_t *>(&value);
    }
    return make_uint4(bits[0], bits[1], bits[2], bits[3]);
  }
  static __device__ __forceinline__ uint4 operand(const uint4 &v) { return v; }
  static __device__ __forceinline__ int place(int i) { return i; }
  static __device__ __forceinline__ int natural(int place) { return place; }
  static __device__ __forceinline__ float activation(float gate, float up) { return clamped_swiglu(gate, up); }

  // Of a gate, and of its up beside it.
  template <class P>
  static __device__ __forceinline__ const int *bias(const P &p, int expert, int unit) {
    return reinterpret_cast<const int *>(p.gate_up_bias) + static_cast<size_t>(expert) * p.width + unit;
  }
};

struct Fp4Experts {
  using Format = Fp4Format;
  const bf16 *x;                // [rows, columns] normed rows
  const int64_t *ids;           // [rows, choices]
  const float *weights;         // [rows, choices]
  const uint32_t *gate_up;      // [experts, 2 * width, columns / 8], gate 0, up 0, gate 1, …
  const uint8_t *gate_up_scale; // [experts, 2 * width, columns / 32]
  const bf16 *gate_up_bias;     // [experts, 2 * width]
  const uint32_t *down;         // [experts, columns, width / 8]
  const uint8_t *down_scale;    // [experts, columns, width / 32]
  const bf16 *down_bias;        // [experts, columns] or null
  bf16 *hidden;                 // [groups, 64, 8, width in whole units] scratch, paired
  const bf16 *residual;         // [rows, columns] or null
  bf16 *y;                      // [rows, columns]
  int rows, columns, width, experts, choices;
};

// Down by the width alone: gpt-oss halved has spans for every warp.
template <int kHalves>
inline cudaError_t fp4_down(const Fp4Experts &p, int spans, int grid, cudaStream_t stream) {
  if (spans > 12 && spans <= 24) return launch_packed_down_spread<12, 2, 2, kHalves>(p, grid, stream);
  if (spans > 8 && spans <= 12) return launch_packed_down_spread<12, 1, 2, kHalves>(p, grid, stream);
  return launch_packed_down<16, kHalves, 2, 1, 1>(p, nullptr, grid, stream);
}

inline cudaError_t fp4_experts(const Fp4Experts &p, int blocks, cudaStream_t stream) {
  if (!packed_serves(p)) return cudaErrorInvalidValue;
  cudaError_t e = cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: e = launch_packed_tiles<256, 2, 1, 1, 4>(p, blocks, stream); break;
  case 320: e = launch_packed_tiles<320, 2, 2, 2, 4>(p, blocks, stream); break;
  case 2880: e = launch_packed_tiles<2880, 6, 4, 2, 4>(p, blocks, stream); break;
  default: break;
  }
  if (e != cudaSuccess) return e;
  if (has_down_tiles<2880>(p, blocks)) // gpt-oss whole
    return launch_down_tiles<2880, 23, 3>(p, stream);
  // one block a multiprocessor where 32 outputs each are enough
  const int least = (p.columns + 31) / 32, share = blocks < p.columns ? blocks : p.columns, grid = share > least ? share : least;
  const int spans = (p.width + kSpan - 1) / kSpan;
  switch ((p.columns + grid - 1) / grid + 7 >> 3) {
  case 1: return fp4_down<1>(p, spans, grid, stream);
  case 2: return fp4_down<2>(p, spans, grid, stream);
  case 3: return fp4_down<3>(p, spans, grid, stream);
  default: return fp4_down<4>(p, spans, grid, stream);
  }
}

} // namespace eagle3
