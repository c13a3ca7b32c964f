// Grouped experts of few rows with biases over MXFP4 weights (kernels/experts_mxfp4.py): int4.cuh with other codes. Gate and up
// rows lie in turn; a group of 32 has a power of two, one byte; sizes need not be whole spans, only whole groups.
#pragma once

#include "int4.cuh"

namespace eagle3 {

constexpr int kFp4Unit = 2048; // bytes of a unit of 16 rows and 256 columns

struct Fp4Experts {
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

// Scales of a lane's groups in a unit: [span of 128][top, bottom], as stored.
struct Fp4Scales {
  uint32_t of[2][2];
};

// A word of codes and the factor of its group (twice) -> a row's A operands, as `decode` orders them. Sign, exponent and
// mantissa fall into bf16's places; 2^126 brings the exponents up, subnormals too.
__device__ __forceinline__ uint4 decode_fp4(uint32_t word, __nv_bfloat162 factor) {
  const uint32_t raise_bits = 0x7e807e80u; // 2^126, twice
  const __nv_bfloat162 raise = *reinterpret_cast<const __nv_bfloat162 *>(&raise_bits);
  uint4 out;
  uint32_t *o = reinterpret_cast<uint32_t *>(&out);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t magnitude = 4 * i < 6 ? word << (4 * i < 6 ? 6 - 4 * i : 0) : word >> (4 * i < 6 ? 0 : 4 * i - 6);
    const uint32_t bits = (magnitude & 0x01c001c0u) | (word << (12 - 4 * i) & 0x80008000u);
    const __nv_bfloat162 value = __hmul2(__hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&bits), raise), factor);
    o[i] = *reinterpret_cast<const uint32_t *>(&value);
  }
  return out;
}
__device__ __forceinline__ __nv_bfloat162 power(uint32_t stored) {
  const uint32_t bits = stored == 0 ? 0x00400040u : stored << 7 | stored << 23; // 2^-127 is no normal number
  return *reinterpret_cast<const __nv_bfloat162 *>(&bits);
}

__device__ __forceinline__ uint4 *fp4_codes(char *unit, int span, int half) {
  return reinterpret_cast<uint4 *>(unit) + (span * 2 + half) * 32 + (threadIdx.x & 31);
}

// Ask for a unit: rows `top` and `bottom` from the unit's first column on; `left`: groups that the rows have from there.
__device__ __forceinline__ void fp4_fetch(char *unit, const uint32_t *top, const uint32_t *bottom, bool has_top, bool has_bottom, int left) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int span = 0; span < 2; span++) {
    const int group = span * 4 + t;
    copy_async(fp4_codes(unit, span, 0), top + group * 4, has_top && group < left);
    copy_async(fp4_codes(unit, span, 1), bottom + group * 4, has_bottom && group < left);
  }
}
__device__ __forceinline__ Fp4Scales fp4_scales(const uint8_t *top, const uint8_t *bottom, bool has_top, bool has_bottom, int left) {
  const int t = threadIdx.x & 3;
  Fp4Scales s;
#pragma unroll
  for (int span = 0; span < 2; span++) {
    const int group = span * 4 + t;
    s.of[span][0] = has_top && group < left ? top[group] : 0;
    s.of[span][1] = has_bottom && group < left ? bottom[group] : 0;
  }
  return s;
}
// c += a unit times 256 columns of a group of rows: b as int4_multiply takes it, zeros past the last column.
__device__ __forceinline__ void fp4_multiply(float4 &c, char *unit, const Fp4Scales &s, const uint4 *b) {
#pragma unroll
  for (int span = 0; span < 2; span++) {
    const uint4 top = *fp4_codes(unit, span, 0), bottom = *fp4_codes(unit, span, 1);
    const uint32_t *tops = reinterpret_cast<const uint32_t *>(&top), *bottoms = reinterpret_cast<const uint32_t *>(&bottom);
    const __nv_bfloat162 first = power(s.of[span][0]), second = power(s.of[span][1]);
#pragma unroll
    for (int eight = 0; eight < 4; eight++)
      mma_piece(c, decode_fp4(tops[eight], first), decode_fp4(bottoms[eight], second), b[span * 4 + eight]);
  }
}

// gpt-oss: the gate at most 7, up between -7 and 7; (up + 1) gate sigmoid(1.702 gate). NaN stays NaN.
__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  gate = gate > 7.f ? 7.f : gate;
  up = up > 7.f ? 7.f : up < -7.f ? -7.f : up;
  return (up + 1.f) * gate / (1.f + __expf(-1.702f * gate));
}

// Gate, up and activation, as int4_gate_up; a warp does one unit of the columns.
template <int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) fp4_gate_up(Fp4Experts p) {
  constexpr int kRing = 3;
  extern __shared__ uint4 ring_memory[];
  __shared__ float4 red[2][kWarps * 32];
  __shared__ GroupChoice choice;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int column = warp * kInt4Span, row = blockIdx.y * kRows + g, left = p.columns / 32 - warp * 8;
  const int padded = (p.width + kInt4Span - 1) / kInt4Span * kInt4Span;
  char *ring = reinterpret_cast<char *>(ring_memory) + warp * kRing * kFp4Unit;
  uint4 b[8];
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const bf16 *from = p.x + static_cast<size_t>(row) * p.columns + column + i / 4 * 128 + t * 32 + i % 4 * 8;
    b[i] = row < p.rows && i / 4 * 4 + t < left ? paired(load_rows(from)) : make_uint4(0, 0, 0, 0);
  }
  const unsigned pairs = choose_rows<kWarps * 32>(p, choice) * p.width; // times the blocks: below 2^32
  launch_dependents(); // the next kernel reads ids and weights before it waits: they are older than this one
  const int first = static_cast<int>(pairs * blockIdx.x / gridDim.x), last = static_cast<int>(pairs * (blockIdx.x + 1) / gridDim.x);
  const int tiles = (last - first + 7) / 8;
  auto place = [&](int tile, bool &live) { // row of gate_up that holds this lane's gate
    const int pair = first + tile * 8 + g;
    live = pair < last;
    const int u = live ? pair / p.width : 0, i = live ? pair - u * p.width : 0;
    return (static_cast<size_t>(choice.list[u]) * p.width + i) * 2;
  };
  auto fetch = [&](int tile) {
    if (tile < tiles) {
      bool live;
      const uint32_t *gate = p.gate_up + place(tile, live) * (p.columns / 8) + column / 8;
      fp4_fetch(ring + tile % kRing * kFp4Unit, gate, gate + p.columns / 8, live, live, left);
    }
    commit_copies();
  };
  auto scales = [&](int tile) {
    bool live = false;
    const uint8_t *gate = p.gate_up_scale;
    if (tile < tiles) gate += place(tile, live) * (p.columns / 32) + column / 32;
    return fp4_scales(gate, gate + p.columns / 32, live, live, left);
  };
#pragma unroll 1
  for (int n = 0; n < kRing; n++) fetch(n);
  Fp4Scales next = scales(0);
  for (int tile = 0; tile < tiles; tile++) {
    const Fp4Scales now = next;
    next = scales(tile + 1);
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
    wait_copies<kRing - 1>();
    fp4_multiply(c, ring + tile % kRing * kFp4Unit, now, b);
    fetch(tile + kRing);
    red[tile & 1][threadIdx.x] = c;
    __syncthreads();
    if (warp == tile % kWarps) {
      const float4 sum = int4_sum<kWarps>(red[tile & 1]);
      const int pair = first + tile * 8 + g, r = 2 * t;
      if (pair < last) {
        const int u = pair / p.width, i = pair - u * p.width;
        const bf16 *bias = p.gate_up_bias + (static_cast<size_t>(choice.list[u]) * p.width + i) * 2;
        const float gate = load_bf16(bias), up = load_bf16(bias + 1);
        bf16 *to = p.hidden + ((static_cast<size_t>(blockIdx.y) * kGroupChosen + u) * kRows + r) * padded + paired_place(i);
        if (choice.rows[u] >> r & 1) to[0] = __float2bfloat16(clamped_swiglu(sum.x + gate, sum.z + up));
        if (choice.rows[u] >> (r + 1) & 1) to[padded] = __float2bfloat16(clamped_swiglu(sum.y + gate, sum.w + up));
      }
    }
  }
}

// Down, bias, weighted sum, residual, as int4_down. kWarps: that share the experts; any width of whole groups.
template <int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 2) fp4_down(Fp4Experts p) {
  constexpr int kRing = 4;
  extern __shared__ uint4 ring_memory[];
  __shared__ GroupChoice choice;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int spans = (p.width + kInt4Span - 1) / kInt4Span, padded = spans * kInt4Span;
  char *ring = reinterpret_cast<char *>(ring_memory) + warp * kRing * kFp4Unit;
  float4 *red = reinterpret_cast<float4 *>(reinterpret_cast<char *>(ring_memory) + kWarps * kRing * kFp4Unit);
  const int chosen = choose_rows<kWarps * 32>(p, choice), out = blockIdx.x * kOutputs;
  const int units = (chosen - warp + kWarps - 1) / kWarps * spans;
  const bool has_top = out + g < p.columns, has_bottom = out + g + 8 < p.columns;
  auto place = [&](int n, int &span) { // row of down that holds this lane's first output
    const int u = n / spans;
    span = n - u * spans;
    return static_cast<size_t>(choice.list[warp + u * kWarps]) * p.columns + out + (has_top ? g : 0);
  };
  auto fetch = [&](int n) {
    if (n < units) {
      int span;
      const uint32_t *top = p.down + place(n, span) * (p.width / 8) + span * 32;
      const uint32_t *bottom = top + (has_bottom ? p.width : 0);
      fp4_fetch(ring + n % kRing * kFp4Unit, top, bottom, has_top, has_bottom, p.width / 32 - span * 8);
    }
    commit_copies();
  };
  auto scales = [&](int n) {
    int span = 0;
    const bool there = n < units;
    const uint8_t *top = p.down_scale;
    if (there) top += place(n, span) * (p.width / 32) + span * 8;
    return fp4_scales(top, top + p.width / 4, there && has_top, there && has_bottom, p.width / 32 - span * 8);
  };
#pragma unroll 1
  for (int n = 0; n < kRing; n++) fetch(n);
  Fp4Scales next = scales(0);
  wait_for_predecessor();
  launch_dependents();
  float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
  uint4 b[8] = {};
  for (int n = 0; n < units; n++) {
    const int slot = n / spans, span = n - slot * spans, u = warp + slot * kWarps;
    const int groups = choice.rows[u] >> g & 1 ? p.width / 32 - span * 8 - t : 0; // of the unit, from this lane's first on
    const bf16 *from = p.hidden + ((static_cast<size_t>(blockIdx.y) * kGroupChosen + u) * kRows + g) * padded + span * kInt4Span + t * 8;
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (half * 4 < groups) { // where there is nothing to read, or nothing chosen, what was there meets zeros or is left out
#pragma unroll
        for (int i = 0; i < 4; i++) b[half * 4 + i] = load_rows(from + (half * 4 + i) * kPiece);
      }
    const Fp4Scales now = next;
    next = scales(n + 1);
    wait_copies<kRing - 1>();
    fp4_multiply(c, ring + n % kRing * kFp4Unit, now, b);
    fetch(n + kRing);
    if (span == spans - 1) {
      red[u * 32 + lane] = c;
      c = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  __syncthreads();
  if (threadIdx.x >= 128) return;
  // a thread for each output and row: the sums' owners are lanes, four to a lane
  const int part = threadIdx.x >> 5, r = 2 * t + (part & 1), o = out + g + (part & 2 ? 8 : 0);
  const int row = blockIdx.y * kRows + r;
  if (row >= p.rows || o >= p.columns) return;
  float total = 0.f;
  for (int u = 0; u < chosen; u++) {
    if (!(choice.rows[u] >> r & 1)) continue;
    const float bias = p.down_bias ? load_bf16(p.down_bias + static_cast<size_t>(choice.list[u]) * p.columns + o) : 0.f;
    total = fmaf(choice.weight[u][r], reinterpret_cast<const float *>(red + u * 32 + lane)[part] + bias, total);
  }
  const size_t at = static_cast<size_t>(row) * p.columns + o;
  p.y[at] = __float2bfloat16(total + (p.residual ? load_bf16(p.residual + at) : 0.f));
}

template <int kWarps>
inline cudaError_t launch_fp4_gate_up(const Fp4Experts &p, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks, (p.rows + kRows - 1) / kRows);
  return launch(fp4_gate_up<kWarps>, grid, kWarps * 32, static_cast<size_t>(kWarps) * 3 * kFp4Unit, stream, 1, p);
}

inline cudaError_t fp4_experts(const Fp4Experts &p, int blocks, cudaStream_t stream) {
  if (p.choices > 8 || p.choices > p.experts || p.width % 32) return cudaErrorInvalidValue;
  cudaError_t e = cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: e = launch_fp4_gate_up<1>(p, blocks, stream); break;
  case 320: e = launch_fp4_gate_up<2>(p, blocks, stream); break;
  case 2880: e = launch_fp4_gate_up<12>(p, blocks, stream); break;
  default: break;
  }
  if (e != cudaSuccess) return e;
  constexpr int kWarps = 4; // as many as a row chooses experts
  const dim3 grid((p.columns + kOutputs - 1) / kOutputs, (p.rows + kRows - 1) / kRows);
  const int most = (p.rows < kRows ? p.rows : kRows) * p.choices; // experts of a group
  const size_t shared = static_cast<size_t>(kWarps) * 4 * kFp4Unit + static_cast<size_t>(most) * 32 * sizeof(float4);
  return launch(fp4_down<kWarps>, grid, kWarps * 32, shared, stream, 1, p);
}

} // namespace eagle3
