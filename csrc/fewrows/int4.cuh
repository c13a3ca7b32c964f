// Grouped experts of few rows over INT4 weights in groups of 32 columns (kernels/experts_int4.py): gate and up of every expert
// that a group of rows chose, then down with the weighted sum and the residual.
//
// A word holds eight codes of a row, the lowest bits first; a lane reads the four words of a group. `decode` turns a word into
// the A operands of two mma: bf16 pairs of columns (0, 4), (1, 5) and (2, 6), (3, 7) of the eight, each weight (code - 8) * scale,
// rounded once. B operands hold the rows in the same order ("paired"). Units of 256 columns travel through a warp's own ring.
#pragma once

#include "choice.cuh"

namespace eagle3 {

constexpr int kInt4Span = 256;    // columns of a unit: eight groups of 32
constexpr int kInt4Unit = 2304;   // bytes of a unit of 16 rows: codes 2048, scales 256
constexpr int kInt4Down = 8;      // warps of a block of int4_down

struct Int4Experts {
  const bf16 *x;             // [rows, columns] normed rows
  const int64_t *ids;        // [rows, choices]
  const float *weights;      // [rows, choices]
  const uint32_t *gate_up;   // [experts, 2 * width, columns / 8], gates first
  const bf16 *gate_up_scale; // [experts, 2 * width, columns / 32]
  const uint32_t *down;      // [experts, columns, width / 8]
  const bf16 *down_scale;    // [experts, columns, width / 32]
  bf16 *hidden;              // [groups, 64, 8, width] scratch, paired
  const bf16 *residual;      // [rows, columns] or null
  const bf16 *shared;        // [rows, shared_width], act(gate) * up of a shared expert, or null
  const bf16 *shared_down;   // [columns, shared_width]
  bf16 *y;                   // [rows, columns]
  int rows, columns, width, experts, choices, shared_width; // shared_width: a multiple of 256, 0: no shared expert
};

// Eight columns in natural order -> (0, 4), (1, 5), (2, 6), (3, 7).
__device__ __forceinline__ uint4 paired(const uint4 &v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}
// Where column i of a row of `hidden` lies: lane t of a span of 128 finds its group's eights 4 chunks apart, each paired.
__device__ __forceinline__ int paired_place(int i) {
  const int lane = i % 128 / 32, eight = i % 32 / 8, e = i % 8;
  return i / 128 * 128 + (eight * 4 + lane) * 8 + (e < 4 ? 2 * e : 2 * e - 7);
}

// 128 + each of two codes of a word, in bf16, whose last bit counts 1 there.
__device__ __forceinline__ uint32_t raised(uint32_t word) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(0x000f000fu), "r"(0x43004300u)); // (a & b) | c
  return out;
}

// A word of codes and the scale of its group (twice) -> a row's A operands.
__device__ __forceinline__ uint4 decode(uint32_t word, __nv_bfloat162 scale) {
  const __nv_bfloat162 offset = __float2bfloat162_rn(136.f);
  uint4 out;
  uint32_t *o = reinterpret_cast<uint32_t *>(&out);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t bits = raised(word >> (4 * i));
    const __nv_bfloat162 value = __hmul2(__hsub2(*reinterpret_cast<const __nv_bfloat162 *>(&bits), offset), scale);
    o[i] = *reinterpret_cast<const uint32_t *>(&value);
  }
  return out;
}

// A warp's unit in shared memory: 128 chunks of codes ([span of 128][top, bottom][lane]), then 16 rows of 8 scales.
struct Int4Unit {
  char *at;
  __device__ __forceinline__ uint4 *codes(int span, int half) const {
    return reinterpret_cast<uint4 *>(at) + (span * 2 + half) * 32 + (threadIdx.x & 31);
  }
  __device__ __forceinline__ bf16 *scales(int row) const { return reinterpret_cast<bf16 *>(at + 2048) + row * 8; }
};

// Ask for a unit: `top`, `bottom` are the words of this lane's rows g and g + 8 at the unit's first column; `scales` those of
// row `lane` of the 16, for lanes below 16.
__device__ __forceinline__ void int4_fetch(const Int4Unit &unit, const uint32_t *top, const uint32_t *bottom, bool has_top,
                                           bool has_bottom, const bf16 *scales, bool has_scales) {
  const int lane = threadIdx.x & 31, own = (lane & 3) * 4;
#pragma unroll
  for (int span = 0; span < 2; span++) {
    copy_async(unit.codes(span, 0), top + span * 16 + own, has_top);
    copy_async(unit.codes(span, 1), bottom + span * 16 + own, has_bottom);
  }
  if (lane < 16) copy_async(unit.scales(lane), scales, has_scales);
}

// c += a unit times 256 columns of a group of rows: b, paired, 8 chunks of this lane's two groups.
__device__ __forceinline__ void int4_multiply(float4 &c, const Int4Unit &unit, const uint4 *b) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int span = 0; span < 2; span++) {
    const uint4 top = *unit.codes(span, 0), bottom = *unit.codes(span, 1);
    const uint32_t *tops = reinterpret_cast<const uint32_t *>(&top), *bottoms = reinterpret_cast<const uint32_t *>(&bottom);
    const __nv_bfloat162 high_scale = __bfloat162bfloat162(unit.scales(g)[span * 4 + t]);
    const __nv_bfloat162 low_scale = __bfloat162bfloat162(unit.scales(g + 8)[span * 4 + t]);
#pragma unroll
    for (int eight = 0; eight < 4; eight++)
      mma_piece(c, decode(tops[eight], high_scale), decode(bottoms[eight], low_scale), b[span * 4 + eight]);
  }
}

// Sum of the warps' partial tiles in ascending order; `red`: [warps][32].
template <int kWarps>
__device__ __forceinline__ float4 int4_sum(const float4 *red) {
  float4 total = red[threadIdx.x & 31];
#pragma unroll
  for (int w = 1; w < kWarps; w++) total = add(total, red[w * 32 + (threadIdx.x & 31)]);
  return total;
}

// Gate, up and activation. Blocks share the (expert, unit of width) pairs evenly; a tile is 8 of them, gates on top of ups;
// each warp does kUnits units of the columns, the warps' sums are added in ascending order.
template <int kWarps, int kUnits>
__global__ void __launch_bounds__(kWarps * 32, 1) int4_gate_up(Int4Experts p) {
  extern __shared__ uint4 ring_memory[];
  __shared__ float4 red[2][kWarps * 32];
  __shared__ GroupChoice choice;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int column = warp * kUnits * kInt4Span, row = blockIdx.y * kRows + g;
  char *ring = reinterpret_cast<char *>(ring_memory) + warp * 2 * kUnits * kInt4Unit;
  uint4 b[kUnits * 8];
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < kUnits * 8; i++) {
    const bf16 *from = p.x + static_cast<size_t>(row) * p.columns + column + i / 4 * 128 + t * 32 + i % 4 * 8;
    b[i] = row < p.rows ? paired(load_rows(from)) : make_uint4(0, 0, 0, 0);
  }
  const unsigned pairs = choose_rows<kWarps * 32>(p, choice) * p.width; // times the blocks: below 2^32
  launch_dependents(); // the next kernel reads ids and weights before it waits: they are older than this one
  const int first = static_cast<int>(pairs * blockIdx.x / gridDim.x), last = static_cast<int>(pairs * (blockIdx.x + 1) / gridDim.x);
  const int tiles = (last - first + 7) / 8;
  auto fetch = [&](int tile) {
    if (tile < tiles) {
      const int pair = first + tile * 8 + g;
      const bool live = pair < last, scaled = first + tile * 8 + (lane & 7) < last;
      unsigned gates = 0; // row of gate_up that holds the pair's gate
      if (live) {
        const unsigned u = static_cast<unsigned>(pair) / p.width;
        gates = (choice.list[u] * 2 - u) * p.width + pair;
      }
      const uint32_t *gate = p.gate_up + static_cast<size_t>(gates) * (p.columns / 8) + column / 8;
      const uint32_t *up = gate + static_cast<size_t>(p.width) * (p.columns / 8);
      const unsigned own = __shfl_sync(kAll, gates, (lane & 7) * 4) + (lane & 8 ? p.width : 0);
      const bf16 *scales = p.gate_up_scale + static_cast<size_t>(own) * (p.columns / 32) + column / 32;
#pragma unroll
      for (int q = 0; q < kUnits; q++) {
        const Int4Unit unit = {ring + (tile % 2 * kUnits + q) * kInt4Unit};
        int4_fetch(unit, gate + q * 32, up + q * 32, live, live, scales + q * 8, scaled);
      }
    }
    commit_copies();
  };
#pragma unroll 1
  for (int tile = 0; tile < 2; tile++) fetch(tile);
  for (int tile = 0; tile < tiles; tile++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
    wait_copies<1>();
    __syncwarp(); // scales came by other lanes
#pragma unroll
    for (int q = 0; q < kUnits; q++) {
      const Int4Unit unit = {ring + (tile % 2 * kUnits + q) * kInt4Unit};
      int4_multiply(c, unit, b + q * 8);
    }
    __syncwarp(); // and are read
    fetch(tile + 2);
    red[tile & 1][threadIdx.x] = c;
    __syncthreads();
    if (warp == tile % kWarps) {
      const float4 sum = int4_sum<kWarps>(red[tile & 1]);
      const int pair = first + tile * 8 + g, r = 2 * t;
      if (pair < last) {
        const int u = pair / p.width, i = pair - u * p.width;
        bf16 *to = p.hidden + ((static_cast<size_t>(blockIdx.y) * kGroupChosen + u) * kRows + r) * p.width + paired_place(i);
        if (choice.rows[u] >> r & 1) to[0] = __float2bfloat16(silu(sum.x) * sum.z);
        if (choice.rows[u] >> (r + 1) & 1) to[p.width] = __float2bfloat16(silu(sum.y) * sum.w);
      }
    }
  }
}

// Down, weighted sum, shared expert, residual. Blocks share the outputs evenly, in one tile of 16 or two; a warp does the whole
// width of every eighth expert and an eighth of the shared one, each row adds its own experts in ascending order. kUnits: units
// of the width.
template <int kUnits>
__global__ void __launch_bounds__(kInt4Down * 32, 2) int4_down(Int4Experts p) {
  constexpr int kRing = 3;
  extern __shared__ uint4 ring_memory[];
  __shared__ GroupChoice choice;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  char *ring = reinterpret_cast<char *>(ring_memory) + warp * kRing * kInt4Unit;
  float4 *red = reinterpret_cast<float4 *>(reinterpret_cast<char *>(ring_memory) + kInt4Down * kRing * kInt4Unit);
  const unsigned columns = p.columns; // times the blocks: below 2^32
  const int first = static_cast<int>(columns * blockIdx.x / gridDim.x), last = static_cast<int>(columns * (blockIdx.x + 1) / gridDim.x);
  const int tiles = (last - first + kOutputs - 1) / kOutputs;
  // the shared expert's weights in slots of the thread's own, before everything else
  const int pieces = p.shared_width / (kInt4Down * kPiece), slice = warp * pieces * kPiece + t * 8;
  float4 *red_shared = red + (p.rows < kRows ? p.rows : kRows) * p.choices * tiles * 32; // past the most there can be
  uint4 *const beside = reinterpret_cast<uint4 *>(red_shared + kInt4Down * tiles * 32) + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < tiles * pieces; i++) {
    const int out = first + i / pieces * kOutputs + g;
    const bf16 *from = p.shared_down + static_cast<size_t>(out < last ? out : first) * p.shared_width + slice + i % pieces * kPiece;
    copy_async(beside + 2 * i * kInt4Down * 32, from, out < last);
    copy_async(beside + (2 * i + 1) * kInt4Down * 32, from + (out + 8 < last ? 8 * p.shared_width : 0), out + 8 < last);
  }
  const int chosen = choose_rows<kInt4Down * 32>(p, choice);
  const int units = (chosen - warp + kInt4Down - 1) / kInt4Down * tiles * kUnits; // by expert, tile, unit of the width
  auto fetch = [&](int n) {
    if (n < units) {
      const int part = n / kUnits, slot = tiles == 1 ? part : part >> 1, out = first + (part - slot * tiles) * kOutputs;
      const bool has_top = out + g < last, has_bottom = out + g + 8 < last, scaled = out + (lane & 15) < last;
      const size_t base = static_cast<size_t>(choice.list[warp + slot * kInt4Down]) * p.columns + out;
      const uint32_t *top = p.down + (base + (has_top ? g : 0)) * (p.width / 8) + n % kUnits * 32;
      const bf16 *scales = p.down_scale + (base + (scaled ? lane & 15 : 0)) * (p.width / 32) + n % kUnits * 8;
      const Int4Unit unit = {ring + n % kRing * kInt4Unit};
      int4_fetch(unit, top, top + (has_bottom ? p.width : 0), has_top, has_bottom, scales, scaled);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int n = 0; n < kRing; n++) fetch(n);
  wait_for_predecessor();
  launch_dependents();
  // a thread for each output and row in the end: the sums' owners are lanes, four to a lane
  const int tile = threadIdx.x >> 7, which = threadIdx.x >> 5 & 3, r = 2 * t + (which & 1);
  const int o = first + tile * kOutputs + g + (which & 2 ? 8 : 0), row = blockIdx.y * kRows + r;
  const bool owner = row < p.rows && o < last;
  const size_t at = static_cast<size_t>(row) * p.columns + o;
  float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
  uint4 b[8] = {}, next[8] = {};
  auto slot_of = [&](int n) { return tiles == 1 ? n / kUnits : n / kUnits >> 1; };
  auto rows = [&](int n) { // of unit n; a row that did not choose its expert keeps what it had: its sums are left out
    const int u = warp + slot_of(n) * kInt4Down;
    if (n >= units || !(choice.rows[u] >> g & 1)) return;
    const bf16 *from = p.hidden + ((static_cast<size_t>(blockIdx.y) * kGroupChosen + u) * kRows + g) * p.width + n % kUnits * kInt4Span + t * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) next[i] = load_rows(from + i * kPiece);
  };
  rows(0);
  const float carried = owner && p.residual ? load_bf16(p.residual + at) : 0.f;
  if (pieces) {
    const int own = blockIdx.y * kRows + g;
    const bf16 *from = p.shared + static_cast<size_t>(own < p.rows ? own : 0) * p.shared_width + slice;
    float4 sums[2] = {};
    wait_copies<kRing - 1>(); // the oldest ones
#pragma unroll 1
    for (int i = 0; i < pieces; i++) {
      const uint4 x = own < p.rows ? load_rows(from + i * kPiece) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (j < tiles) {
          const uint4 *w = beside + 2 * (j * pieces + i) * kInt4Down * 32;
          mma_piece(sums[j], w[0], w[kInt4Down * 32], x);
        }
    }
    red_shared[warp * tiles * 32 + lane] = sums[0];
    if (tiles > 1) red_shared[(warp * tiles + 1) * 32 + lane] = sums[1];
  }
#pragma unroll 1
  for (int n = 0; n < units; n++) {
    const int part = n / kUnits, slot = slot_of(n), u = warp + slot * kInt4Down;
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] = next[i];
    rows(n + 1);
    wait_copies<kRing - 1>();
    __syncwarp();
    int4_multiply(c, Int4Unit{ring + n % kRing * kInt4Unit}, b);
    __syncwarp();
    fetch(n + kRing);
    if (n % kUnits == kUnits - 1) {
      red[(u * tiles + part - slot * tiles) * 32 + lane] = c;
      c = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  __syncthreads();
  if (!owner) return;
  float total = 0.f;
#pragma unroll 1
  for (int u = 0; u < chosen; u++)
    if (choice.rows[u] >> r & 1)
      total = fmaf(choice.weight[u][r], reinterpret_cast<const float *>(red + (u * tiles + tile) * 32 + lane)[which], total);
#pragma unroll 1
  for (int w = 0; pieces && w < kInt4Down; w++) total += reinterpret_cast<const float *>(red_shared + (w * tiles + tile) * 32 + lane)[which];
  p.y[at] = __float2bfloat16(total + carried);
}

template <int kWarps, int kUnits>
inline cudaError_t launch_int4_gate_up(const Int4Experts &p, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks, (p.rows + kRows - 1) / kRows);
  return launch(int4_gate_up<kWarps, kUnits>, grid, kWarps * 32, static_cast<size_t>(kWarps) * 2 * kUnits * kInt4Unit, stream, 1, p);
}

template <int kUnits>
inline cudaError_t launch_int4_down(const Int4Experts &p, int blocks, cudaStream_t stream) {
  const int least = (p.columns + 2 * kOutputs - 1) / (2 * kOutputs), share = 2 * blocks < p.columns ? 2 * blocks : p.columns;
  const dim3 grid(share > least ? share : least, (p.rows + kRows - 1) / kRows);
  const int tiles = (p.columns + static_cast<int>(grid.x) - 1) / static_cast<int>(grid.x) > kOutputs ? 2 : 1;
  const int most = (p.rows < kRows ? p.rows : kRows) * p.choices * tiles; // of experts of a group and tiles
  size_t shared = static_cast<size_t>(kInt4Down) * 3 * kInt4Unit + static_cast<size_t>(most) * 32 * sizeof(float4);
  if (p.shared_width) shared += static_cast<size_t>(tiles) * kInt4Down * 32 * (sizeof(float4) + p.shared_width / (kInt4Down * kPiece) * 2 * sizeof(uint4));
  return launch(int4_down<kUnits>, grid, kInt4Down * 32, shared, stream, 1, p);
}

inline cudaError_t int4_experts(const Int4Experts &p, int blocks, cudaStream_t stream) {
  if (p.choices > 8 || p.choices > p.experts || p.shared_width % (kInt4Down * kPiece)) return cudaErrorInvalidValue;
  cudaError_t e = cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: e = launch_int4_gate_up<1, 1>(p, blocks, stream); break;
  case 512: e = launch_int4_gate_up<2, 1>(p, blocks, stream); break;
  case 2048: e = launch_int4_gate_up<8, 1>(p, blocks, stream); break;
  case 4096: e = launch_int4_gate_up<8, 2>(p, blocks, stream); break;
  case 7168: e = launch_int4_gate_up<14, 2>(p, blocks, stream); break;
  default: break;
  }
  if (e != cudaSuccess) return e;
  switch (p.width) {
  case 256: return launch_int4_down<1>(p, blocks, stream);
  case 512: return launch_int4_down<2>(p, blocks, stream);
  case 768: return launch_int4_down<3>(p, blocks, stream);
  case 1024: return launch_int4_down<4>(p, blocks, stream);
  case 1536: return launch_int4_down<6>(p, blocks, stream);
  case 2048: return launch_int4_down<8>(p, blocks, stream);
  default: return cudaErrorInvalidValue;
  }
}

} // namespace eagle3
