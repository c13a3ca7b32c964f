// Grouped experts of few rows with biases over MXFP4 weights (kernels/experts_mxfp4.py): int4.cuh with other codes. Gate and up
// rows lie in turn; a group of 32 has a power of two, one byte; sizes need not be whole spans, only whole groups.
#pragma once

#include "int4.cuh"

namespace eagle3 {

// Bytes of a unit of 16 rows and 256 columns: codes; of each row, the 32 aligned bytes that hold its eight scales; where in
// those they begin.
constexpr int kFp4Codes = 2048, kFp4Scales = 512, kFp4Unit = kFp4Codes + kFp4Scales + 16;
constexpr int kFp4Down = 8; // warps of a block of fp4_down

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

// A word of codes and the factor of its group (twice) -> a row's A operands, as `decode` orders them. Sign, exponent and
// mantissa fall into bf16's places, 2^126 too low, subnormals too; the factor brings the exponents up.
__device__ __forceinline__ uint4 decode_fp4(uint32_t word, __nv_bfloat162 factor) {
  uint4 out;
  uint32_t *o = reinterpret_cast<uint32_t *>(&out);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t magnitude = 4 * i < 6 ? word << (4 * i < 6 ? 6 - 4 * i : 0) : word >> (4 * i < 6 ? 0 : 4 * i - 6);
    const uint32_t bits = (magnitude & 0x01c001c0u) | (word << (12 - 4 * i) & 0x80008000u);
    const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&bits), factor);
    o[i] = *reinterpret_cast<const uint32_t *>(&value);
  }
  return out;
}
// 2^126 times the power of two that is stored, 2^127 at most, and what is left of it (1 but for powers that no weight needs).
__device__ __forceinline__ __nv_bfloat162 twice(uint32_t exponent) {
  const uint32_t bits = exponent << 7 | exponent << 23;
  return *reinterpret_cast<const __nv_bfloat162 *>(&bits);
}
constexpr uint32_t kFp4Most = 128; // stored
__device__ __forceinline__ __nv_bfloat162 raised_power(uint32_t stored) { return twice(min(stored, kFp4Most) + 126); }
__device__ __forceinline__ void enlarge(uint4 &a, uint32_t stored) {
  const __nv_bfloat162 rest = twice(max(stored, kFp4Most) - kFp4Most + 127);
  uint32_t *v = reinterpret_cast<uint32_t *>(&a);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&v[i]), rest);
    v[i] = *reinterpret_cast<const uint32_t *>(&value);
  }
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
// Ask for a unit's scales. `top`: where in `scales` (`bytes` long) this lane's row g has its first of the unit; row g + 8 is
// `below` bytes further. A row begins anywhere, copies do not: two aligned ones hold what is wanted. The whole warp calls it.
__device__ __forceinline__ void fp4_fetch_scales(char *unit, const uint8_t *scales, size_t bytes, size_t top, size_t below,
                                                 bool has_top, bool has_bottom) {
  const int lane = threadIdx.x & 31, owner = (lane >> 1 & 7) * 4;
  const size_t from = (__shfl_sync(kAll, top, owner) + (lane & 16 ? below : 0)) / 16 * 16 + (lane & 1) * 16;
  const int has = __shfl_sync(kAll, has_top | has_bottom << 1, owner) >> (lane >> 4) & 1;
  copy_async(unit + kFp4Codes + lane * 16, scales + from, has && from < bytes);
  if ((lane & 3) < 2) unit[kFp4Codes + kFp4Scales + (lane >> 2) + 8 * (lane & 3)] = static_cast<char>((top + (lane & 1 ? below : 0)) % 16);
}
// c += a unit times 256 columns of a group of rows: b as int4_multiply takes it, zeros past the last column; `left` as above.
__device__ __forceinline__ void fp4_multiply(float4 &c, char *unit, int left, const uint4 *b) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint8_t *scales = reinterpret_cast<const uint8_t *>(unit) + kFp4Codes, *starts = scales + kFp4Scales;
  const uint8_t *high_scale = scales + g * 32 + starts[g] + t, *low_scale = scales + (g + 8) * 32 + starts[g + 8] + t;
#pragma unroll
  for (int span = 0; span < 2; span++) {
    const uint4 top = *fp4_codes(unit, span, 0), bottom = *fp4_codes(unit, span, 1);
    const uint32_t *tops = reinterpret_cast<const uint32_t *>(&top), *bottoms = reinterpret_cast<const uint32_t *>(&bottom);
    const bool there = span * 4 + t < left; // past a row's last group lie another row's scales
    const uint32_t high_stored = there ? high_scale[span * 4] : 0, low_stored = there ? low_scale[span * 4] : 0;
    const __nv_bfloat162 first = raised_power(high_stored), second = raised_power(low_stored);
    const bool large = __any_sync(kAll, max(high_stored, low_stored) > kFp4Most);
#pragma unroll
    for (int eight = 0; eight < 4; eight++) {
      uint4 high_rows = decode_fp4(tops[eight], first), low_rows = decode_fp4(bottoms[eight], second);
      if (large) enlarge(high_rows, high_stored), enlarge(low_rows, low_stored);
      mma_piece(c, high_rows, low_rows, b[span * 4 + eight]);
    }
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
  const size_t bytes = static_cast<size_t>(p.experts) * 2 * p.width * (p.columns / 32);
  auto fetch = [&](int tile) {
    if (tile < tiles) {
      bool live;
      const size_t gates = place(tile, live);
      const uint32_t *gate = p.gate_up + gates * (p.columns / 8) + column / 8;
      char *unit = ring + tile % kRing * kFp4Unit;
      fp4_fetch(unit, gate, gate + p.columns / 8, live, live, left);
      fp4_fetch_scales(unit, p.gate_up_scale, bytes, gates * (p.columns / 32) + column / 32, p.columns / 32, live, live);
    }
    commit_copies();
  };
  uint32_t bias = 0; // gate's and up's, of the tile whose sums this warp adds next: a load takes longer than a tile
  auto biases = [&](int tile) {
    bool live = false;
    const size_t gates = tile < tiles ? place(tile, live) : 0;
    if (live) bias = *reinterpret_cast<const uint32_t *>(p.gate_up_bias + gates);
  };
#pragma unroll 1
  for (int n = 0; n < kRing; n++) fetch(n);
  biases(warp);
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
    wait_copies<kRing - 1>();
    __syncwarp(); // scales came by other lanes
    fp4_multiply(c, ring + tile % kRing * kFp4Unit, left, b);
    __syncwarp(); // and are read
    fetch(tile + kRing);
    red[tile & 1][threadIdx.x] = c;
    __syncthreads();
    if (warp == tile % kWarps) {
      const float4 sum = int4_sum<kWarps>(red[tile & 1]);
      const int pair = first + tile * 8 + g, r = 2 * t;
      if (pair < last) {
        const int u = pair / p.width, i = pair - u * p.width;
        const float gate = low(bias), up = high(bias);
        bf16 *to = p.hidden + ((static_cast<size_t>(blockIdx.y) * kGroupChosen + u) * kRows + r) * padded + paired_place(i);
        if (choice.rows[u] >> r & 1) to[0] = __float2bfloat16(clamped_swiglu(sum.x + gate, sum.z + up));
        if (choice.rows[u] >> (r + 1) & 1) to[padded] = __float2bfloat16(clamped_swiglu(sum.y + gate, sum.w + up));
      }
      biases(tile + kWarps);
    }
  }
}

// How fp4_down divides the width of an expert: parts of `per` spans of 256 columns each. By the model's sizes alone.
struct Fp4Parts {
  int spans, per, parts;
  __host__ __device__ __forceinline__ Fp4Parts(int width, int choices) : spans((width + kInt4Span - 1) / kInt4Span) {
    const int most = choices > 4 ? 2 : 4; // sums of all parts have to fit into shared memory
    per = (spans + most - 1) / most;
    parts = (spans + per - 1) / per;
  }
};

// A warp's walk over the units of its jobs: a job is a part of an expert and a tile, every kFp4Down-th is this warp's.
struct Fp4Walk {
  int job, span, u, tile, end; // end: of the job's spans
  __device__ __forceinline__ void begin(const Fp4Parts &parts, int tiles, int own) {
    job = own;
    const int part = job % parts.parts, rest = job / parts.parts;
    u = rest / tiles, tile = rest - u * tiles;
    span = part * parts.per, end = min(parts.spans, span + parts.per);
  }
  __device__ __forceinline__ void next(const Fp4Parts &parts, int tiles) {
    if (++span == end) begin(parts, tiles, job + kFp4Down);
  }
};

// Down, bias, weighted sum, residual. Blocks share the outputs evenly, in one tile of 16 or two; the warps of a block share the
// experts and parts of the width, whose sums are added in ascending order.
__global__ void __launch_bounds__(kFp4Down * 32, 1) fp4_down(Fp4Experts p) {
  constexpr int kRing = 3;
  extern __shared__ uint4 ring_memory[];
  __shared__ GroupChoice choice;
  __shared__ bf16 biases[kGroupChosen][2 * kOutputs];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const Fp4Parts parts(p.width, p.choices);
  char *ring = reinterpret_cast<char *>(ring_memory) + warp * kRing * kFp4Unit;
  float4 *red = reinterpret_cast<float4 *>(reinterpret_cast<char *>(ring_memory) + kFp4Down * kRing * kFp4Unit);
  const int first = share_begin(p.columns, blockIdx.x), last = share_begin(p.columns, blockIdx.x + 1);
  const int tiles = (last - first + kOutputs - 1) / kOutputs;
  const int chosen = choose_rows<kFp4Down * 32>(p, choice), jobs = chosen * tiles * parts.parts;
  const size_t bytes = static_cast<size_t>(p.experts) * p.columns * (p.width / 32);
  Fp4Walk ahead, now;
  ahead.begin(parts, tiles, warp), now = ahead;
  int slot = 0; // of the ring, the next one that is filled
  auto fetch = [&] {
    if (ahead.job < jobs) {
      const int out = first + ahead.tile * kOutputs + g, left = p.width / 32 - ahead.span * 8;
      const bool has_top = out < last, has_bottom = out + 8 < last;
      const size_t row = static_cast<size_t>(choice.list[ahead.u]) * p.columns + (has_top ? out : first);
      const uint32_t *top = p.down + row * (p.width / 8) + ahead.span * 32;
      char *unit = ring + slot * kFp4Unit;
      fp4_fetch(unit, top, top + (has_bottom ? p.width : 0), has_top, has_bottom, left);
      fp4_fetch_scales(unit, p.down_scale, bytes, row * (p.width / 32) + ahead.span * 8, p.width / 4, has_top, has_bottom);
      ahead.next(parts, tiles);
    }
    commit_copies();
    slot = slot + 1 == kRing ? 0 : slot + 1;
  };
#pragma unroll 1
  for (int n = 0; n < kRing; n++) fetch();
#pragma unroll 1
  for (int i = threadIdx.x; p.down_bias && i < chosen * 2 * kOutputs; i += kFp4Down * 32) {
    const int u = i / (2 * kOutputs), o = i % (2 * kOutputs);
    if (first + o < last) biases[u][o] = p.down_bias[static_cast<size_t>(choice.list[u]) * p.columns + first + o];
  }
  wait_for_predecessor();
  launch_dependents();
  // a thread for each output and row in the end: the sums' owners are lanes, four to a lane
  const int tile = threadIdx.x >> 7, which = threadIdx.x >> 5 & 3, r = 2 * t + (which & 1);
  const int place = tile * kOutputs + g + (which & 2 ? 8 : 0), row = blockIdx.y * kRows + r;
  const bool owner = row < p.rows && first + place < last;
  const size_t at = static_cast<size_t>(row) * p.columns + first + place;
  float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
  uint4 b[8] = {}, next[8] = {};
  auto rows = [&](const Fp4Walk &walk) { // of the unit; where nothing is read, what was there meets zeros or is left out
    if (walk.job >= jobs || !(choice.rows[walk.u] >> g & 1)) return;
    const int left = p.width / 32 - walk.span * 8 - t;
    const bf16 *from = p.hidden + ((static_cast<size_t>(blockIdx.y) * kGroupChosen + walk.u) * kRows + g) * parts.spans * kInt4Span + walk.span * kInt4Span + t * 8;
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (half * 4 < left) {
#pragma unroll
        for (int i = 0; i < 4; i++) next[half * 4 + i] = load_rows(from + (half * 4 + i) * kPiece);
      }
  };
  rows(now);
  const float carried = owner && p.residual ? load_bf16(p.residual + at) : 0.f;
#pragma unroll 1
  while (now.job < jobs) {
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] = next[i];
    const int job = now.job, left = p.width / 32 - now.span * 8;
    now.next(parts, tiles);
    rows(now);
    wait_copies<kRing - 1>();
    __syncwarp(); // scales came by other lanes
    fp4_multiply(c, ring + slot * kFp4Unit, left, b);
    __syncwarp(); // and are read
    fetch();
    if (now.job != job) {
      red[job * 32 + lane] = c;
      c = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  __syncthreads();
  if (!owner) return;
  float total = 0.f;
#pragma unroll 1
  for (int u = 0; u < chosen; u++) {
    if (!(choice.rows[u] >> r & 1)) continue;
    float sum = 0.f;
#pragma unroll 1
    for (int part = 0; part < parts.parts; part++)
      sum += reinterpret_cast<const float *>(red + ((u * tiles + tile) * parts.parts + part) * 32 + lane)[which];
    total = fmaf(choice.weight[u][r], sum + (p.down_bias ? __bfloat162float(biases[u][place]) : 0.f), total);
  }
  p.y[at] = __float2bfloat16(total + carried);
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
  // one block a multiprocessor where two tiles each are enough
  const int least = (p.columns + 2 * kOutputs - 1) / (2 * kOutputs), share = blocks < p.columns ? blocks : p.columns;
  const dim3 grid(share > least ? share : least, (p.rows + kRows - 1) / kRows);
  const int tiles = (p.columns + static_cast<int>(grid.x) - 1) / static_cast<int>(grid.x) > kOutputs ? 2 : 1;
  const int most = (p.rows < kRows ? p.rows : kRows) * p.choices * tiles * Fp4Parts(p.width, p.choices).parts; // jobs of a group
  const size_t shared = static_cast<size_t>(kFp4Down) * 3 * kFp4Unit + static_cast<size_t>(most) * 32 * sizeof(float4);
  return launch(fp4_down, grid, kFp4Down * 32, shared, stream, 1, p);
}

} // namespace eagle3
