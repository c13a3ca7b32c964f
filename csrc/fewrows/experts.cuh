// A mixture-of-experts block of few rows: norm and router, gate and up of every expert that a group of rows chose, down with
// the weighted sum and the residual. All rows of a group pass through each of its experts; a row takes what is its own.
//
// The experts of a group are listed in ascending order, so a row adds its own in ascending order whatever rows ride along.
#pragma once

#include "common.cuh"
#include "project.cuh"

namespace eagle3 {

constexpr int kExperts = 512; // at most
// Gate and up keep so much in flight that two of their blocks do not fit on a multiprocessor: where they do, some
// multiprocessors get two and some none, because the kernel before still holds its place. Down is small enough to begin
// beside them, one block each.
constexpr int kUpUnits = 8;   // units of gate and up in flight
constexpr int kDownUnits = 5; // pieces of down's weights in flight, a warp
template <int kPieces>
constexpr size_t kUpBytes = Stream<256, kPieces, Nowhere, kUpUnits>::kBytes;
constexpr int kChosen = 64;   // experts of a group, at most: 8 rows of 8 choices

struct Experts {
  const bf16 *x;        // [rows, columns] residual stream
  const bf16 *gamma;    // [columns] or null: x comes normed
  const bf16 *router;   // [experts, columns]
  const bf16 *gate_up;  // [experts, 2 * width, columns], gates first
  const bf16 *down;     // [experts, columns, width]
  float *logits;        // [groups * 8, experts] scratch
  unsigned *arrivals;   // [1], zero between passes
  bf16 *hidden;         // [groups, 64, 8, width] scratch
  const bf16 *residual; // [rows, columns] or null
  bf16 *y;              // [rows, columns]
  float eps;
  int rows, columns, width, experts, choices, renormalise;
};

// Router logits of one group: block e, e + gridDim.x, … does expert e. b: the group's normed rows as B operands.
template <int kPieces>
__device__ __forceinline__ void route_group(const Experts &p, const uint4 (&b)[kPieces], uint4 (&w)[kPieces], int column,
                                            float *partial) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
  for (int e = blockIdx.x; e < p.experts; e += gridDim.x) {
    if (e != static_cast<int>(blockIdx.x)) {
#pragma unroll
      for (int i = 0; i < kPieces; i++) w[i] = load_weights(p.router + static_cast<size_t>(e) * p.columns + column + i * kPiece);
    }
    float sum = product_of(w, b);
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    __syncthreads(); // partial is free again
    if ((lane & 3) == 0) partial[warp * kRows + (lane >> 2)] = sum;
    __syncthreads();
    if (threadIdx.x < kRows) {
      float total = 0.f;
#pragma unroll
      for (int w2 = 0; w2 < 8; w2++) total += partial[w2 * kRows + threadIdx.x];
      p.logits[(static_cast<size_t>(blockIdx.y) * kRows + threadIdx.x) * p.experts + e] = total;
    }
  }
}

// Unsigned keys that sort like the values; 0 is below all of them.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t raw = __float_as_uint(v == 0.f ? 0.f : v); // -0 equals 0
  return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The choice of one row by one warp, 32 * kMany experts at most: the best `choices` logits, lower ids first among equals, weights by softmax. Writes
// weight[e] for chosen experts; the others keep what they hold (-1).
template <int kMany>
__device__ __forceinline__ void choose(const Experts &p, int row, float *weight) {
  const int lane = threadIdx.x & 31;
  const float *logits = p.logits + (static_cast<size_t>(blockIdx.y) * kRows + row) * p.experts;
  uint32_t key[kMany], most = 0;
#pragma unroll
  for (int j = 0; j < kMany; j++) {
    const int e = j * 32 + lane;
    float value = e < p.experts ? load_float(logits + e) : 0.f;
    if (!(value == value)) value = -INFINITY; // a row of NaN still chooses experts that exist
    key[j] = e < p.experts ? ordered(value) : 0;
    most = max(most, key[j]);
  }
  const float top = value_of(__reduce_max_sync(kAll, most));
  float all = 0.f;
  if (!p.renormalise) {
#pragma unroll
    for (int j = 0; j < kMany; j++) all += key[j] ? __expf(value_of(key[j]) - top) : 0.f;
    for (int o = 16; o; o >>= 1) all += __shfl_xor_sync(kAll, all, o);
  }
  uint32_t best_key = 0;
  int best_id = -1;
#pragma unroll 1
  for (int k = 0; k < p.choices; k++) {
    most = 0;
#pragma unroll
    for (int j = 0; j < kMany; j++) most = max(most, key[j]);
    const uint32_t found = __reduce_max_sync(kAll, most);
    unsigned id = 0xffffffffu;
#pragma unroll
    for (int j = kMany - 1; j >= 0; j--)
      if (key[j] == found) id = j * 32 + lane;
    id = __reduce_min_sync(kAll, id);
#pragma unroll
    for (int j = 0; j < kMany; j++)
      if (static_cast<unsigned>(j * 32 + lane) == id) key[j] = 0;
    if (lane == k) best_key = found, best_id = static_cast<int>(id);
  }
  const float raised = lane < p.choices ? __expf(value_of(best_key) - top) : 0.f;
  float sum = raised;
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(kAll, sum, o);
  if (lane < p.choices) weight[best_id] = raised / (p.renormalise ? sum : all);
}

// Nothing is chosen yet: what may be done before the logits are there.
__device__ __forceinline__ void clear_choices(const Experts &p, float *weight) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * p.experts; i += blockDim.x) weight[i] = -1.f;
}

// weight [8][experts] of the group's rows (-1: not chosen; cleared before), list of its experts in ascending order; returns
// their number. All threads call it.
template <int kMany>
__device__ __forceinline__ int choose_group(const Experts &p, float *weight, int *list, int *count) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
#pragma unroll 1
  for (int r = warp; r < live; r += warps) choose<kMany>(p, r, weight + r * p.experts);
  __syncthreads();
  if (warp == 0) {
    int base = 0;
#pragma unroll 1
    for (int e0 = 0; e0 < p.experts; e0 += 32) {
      const int e = e0 + lane;
      bool any = false;
      if (e < p.experts)
#pragma unroll 1
        for (int r = 0; r < live; r++) any |= weight[r * p.experts + e] >= 0.f;
      const unsigned mask = __ballot_sync(kAll, any);
      if (any) list[base + __popc(mask & ((1u << lane) - 1))] = e;
      base += __popc(mask);
    }
    if (lane == 0) *count = base;
  }
  __syncthreads();
  return *count;
}

// Router alone: for more groups than blocks that are sure to be resident at once.
template <int kPieces>
__global__ void __launch_bounds__(256, 2) router(Experts p) {
  __shared__ float partial[8 * kRows];
  __shared__ uint4 gains[32 * kPieces];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  uint4 w[kPieces], b[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; i++)
    w[i] = load_weights(p.router + static_cast<size_t>(min(static_cast<int>(blockIdx.x), p.experts - 1)) * p.columns + column + i * kPiece);
#pragma unroll 1
  for (int i = threadIdx.x; p.gamma && i < p.columns / 8; i += 256) gains[i] = load_weights(p.gamma + i * 8);
  wait_for_predecessor();
  launch_dependents();
  load_group(b, p.x + static_cast<size_t>(row) * p.columns + column, row < p.rows);
  __syncthreads();
  if (p.gamma) norm_group<8>(b, reinterpret_cast<const bf16 *>(gains) + column, partial, p.columns, p.eps);
  route_group(p, b, w, column, partial);
}

// Gate, up and activation. With kRoute the blocks compute the router's logits first and wait for one another: all of them
// are resident at once (gridDim.y is 1 and gridDim.x at most the number of multiprocessors).
template <int kPieces, bool kRoute, int kMany>
__global__ void __launch_bounds__(256, 2) gate_up(Experts p) {
  extern __shared__ uint4 ring_memory[];
  __shared__ float red[2][4 * 256];
  __shared__ float partial[8 * kRows];
  __shared__ uint4 gains[32 * kPieces];
  __shared__ int list[kChosen], count;
  float *weight = reinterpret_cast<float *>(ring_memory + kUpBytes<kPieces> / 16);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  uint4 w[kPieces], b[kPieces];
  if (kRoute) {
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      w[i] = load_weights(p.router + static_cast<size_t>(min(static_cast<int>(blockIdx.x), p.experts - 1)) * p.columns + column + i * kPiece);
  }
#pragma unroll 1
  for (int i = threadIdx.x; p.gamma && i < p.columns / 8; i += 256) gains[i] = load_weights(p.gamma + i * 8);
  clear_choices(p, weight);
  wait_for_predecessor();
  load_group(b, p.x + static_cast<size_t>(row) * p.columns + column, row < p.rows);
  __syncthreads();
  if (p.gamma) norm_group<8>(b, reinterpret_cast<const bf16 *>(gains) + column, partial, p.columns, p.eps);
  if (kRoute) {
    route_group(p, b, w, column, partial);
    if (threadIdx.x < 32) {
      __syncwarp(); // the release below covers the other lanes' stores
      if (threadIdx.x == 0) {
        unsigned seen;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.arrivals) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p.arrivals) : "memory");
        while (seen < gridDim.x);
      }
    }
    __syncthreads();
  }
  launch_dependents(); // the next kernel reads the logits before it waits: they are complete now
  const int chosen = choose_group<kMany>(p, weight, list, &count);
  const int pairs = chosen * p.width;
  const int first = share_begin(pairs, blockIdx.x), last = share_begin(pairs, blockIdx.x + 1);
  const int tiles = (last - first + 7) / 8;
  auto aim = [&](int tile, const bf16 *&top, const bf16 *&bottom, bool &has_top, bool &has_bottom) {
    const int pair = first + tile * 8 + g;
    has_top = has_bottom = pair < last;
    const int u = has_top ? static_cast<unsigned>(pair) / static_cast<unsigned>(p.width) : 0, i = pair - u * p.width;
    top = p.gate_up + (static_cast<size_t>(list[u]) * 2 * p.width + i) * p.columns + column;
    bottom = top + static_cast<size_t>(p.width) * p.columns;
  };
  Stream<256, kPieces, decltype(aim), kUpUnits> stream(ring_memory, aim, tiles);
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    store_partial<256>(red[tile & 1], stream.multiply(b));
    __syncthreads();
    const int pair = first + tile * 8 + g, r = 2 * (lane & 3) + warp;
    if (warp < 2 && pair < last) {
      const int u = static_cast<unsigned>(pair) / static_cast<unsigned>(p.width), i = pair - u * p.width;
      if (weight[r * p.experts + list[u]] >= 0.f)
        p.hidden[((static_cast<size_t>(blockIdx.y) * kChosen + u) * kRows + r) * p.width + i] = __float2bfloat16(
            silu(sum_partials<256>(red[tile & 1], warp, lane)) * sum_partials<256>(red[tile & 1], warp + 2, lane));
    }
  }
}

// Down, weighted sum, residual: block x does 16 outputs; each warp a slice of every expert's width.
template <int kThreads, int kPieces, int kMany>
__global__ void __launch_bounds__(kThreads, 2) combine_down(Experts p) {
  constexpr int kUnits = kDownUnits;
  extern __shared__ uint4 ring_memory[];
  __shared__ float red[4 * kThreads];
  __shared__ int list[kChosen], count;
  uint4 *const ring = ring_memory + threadIdx.x;
  float *weight = reinterpret_cast<float *>(ring_memory + kUnits * 2 * kThreads);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8, r = 2 * (lane & 3);
  clear_choices(p, weight);
  __syncthreads();
  const int chosen = choose_group<kMany>(p, weight, list, &count); // the logits are older than the kernel before this one
  const int units = chosen * kPieces, out = blockIdx.x * kOutputs + g;
  const bool has_top = out < p.columns, has_bottom = out + 8 < p.columns;
  const bf16 *const matrix = p.down + static_cast<size_t>(has_top ? out : 0) * p.width + column;
  const int below = has_bottom ? 8 * p.width : 0;
  int fetched = 0, place = 0;
  auto fetch = [&] {
    if (fetched < units) {
      const bf16 *from = matrix + static_cast<size_t>(list[fetched / kPieces]) * p.columns * p.width + fetched % kPieces * kPiece;
      uint4 *slot = ring + place * 2 * kThreads;
      copy_async(slot, from, has_top);
      copy_async(slot + kThreads, from + below, has_bottom);
    }
    commit_copies();
    fetched++;
    place = place + 1 == kUnits ? 0 : place + 1;
  };
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) fetch();
  wait_for_predecessor();
  launch_dependents();
  if (p.arrivals && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.arrivals = 0;
  const bf16 *const hidden = p.hidden + (static_cast<size_t>(blockIdx.y) * kChosen * kRows + g) * p.width + column;
  auto rows = [&](uint4(&b)[kPieces], int u) { // of expert u; a row that did not choose it is zeros
    load_group(b, hidden + static_cast<size_t>(u) * kRows * p.width, u < chosen && weight[g * p.experts + list[u]] >= 0.f);
  };
  uint4 now[kPieces], next[kPieces];
  rows(next, 0);
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int u = 0; u < chosen; u++) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) now[i] = next[i];
    rows(next, min(u + 1, kChosen - 1));
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      wait_copies<kUnits - 1>();
      const uint4 *slot = ring + place * 2 * kThreads;
      mma_piece(c, slot[0], slot[kThreads], now[i]);
      fetch();
    }
    const float w0 = weight[r * p.experts + list[u]], w1 = weight[(r + 1) * p.experts + list[u]];
    if (w0 >= 0.f) total.x = fmaf(w0, c.x, total.x), total.z = fmaf(w0, c.z, total.z);
    if (w1 >= 0.f) total.y = fmaf(w1, c.y, total.y), total.w = fmaf(w1, c.w, total.w);
  }
  store_partial<kThreads>(red, total);
  __syncthreads();
#pragma unroll 1
  for (int at = threadIdx.x; at < 128; at += kThreads) {
    const int which = at >> 5, own = at & 31, row = blockIdx.y * kRows + 2 * (own & 3) + (which & 1);
    const int o = blockIdx.x * kOutputs + (own >> 2) + (which & 2 ? 8 : 0);
    if (row >= p.rows || o >= p.columns) continue;
    const size_t to = static_cast<size_t>(row) * p.columns + o;
    p.y[to] = __float2bfloat16(sum_partials<kThreads>(red, which, own) + (p.residual ? load_bf16(p.residual + to) : 0.f));
  }
}

template <int kPieces, int kMany>
inline cudaError_t launch_gate_up(const Experts &p, int blocks, cudaStream_t stream) {
  const int groups = (p.rows + kRows - 1) / kRows;
  const size_t shared = kUpBytes<kPieces> + static_cast<size_t>(kRows) * p.experts * 4;
  if (groups == 1) return launch(gate_up<kPieces, true, kMany>, dim3(blocks), 256, shared, stream, 1, p);
  const cudaError_t e = launch(router<kPieces>, dim3(p.experts < blocks ? p.experts : blocks, groups), 256, 0, stream, 1, p);
  if (e != cudaSuccess) return e;
  return launch(gate_up<kPieces, false, kMany>, dim3(blocks, groups), 256, shared, stream, 1, p);
}

template <int kThreads, int kPieces, int kMany>
inline cudaError_t launch_down(const Experts &p, cudaStream_t stream) {
  const dim3 grid((p.columns + kOutputs - 1) / kOutputs, (p.rows + kRows - 1) / kRows);
  const size_t shared = static_cast<size_t>(kDownUnits) * 2 * 16 * kThreads + static_cast<size_t>(kRows) * p.experts * 4;
  return launch(combine_down<kThreads, kPieces, kMany>, grid, kThreads, shared, stream, 1, p);
}

template <int kMany>
inline cudaError_t experts_of(const Experts &p, int blocks, cudaStream_t stream) {
  cudaError_t e = cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: e = launch_gate_up<1, kMany>(p, blocks, stream); break;
  case 512: e = launch_gate_up<2, kMany>(p, blocks, stream); break;
  case 1024: e = launch_gate_up<4, kMany>(p, blocks, stream); break;
  case 2048: e = launch_gate_up<8, kMany>(p, blocks, stream); break;
  default: break;
  }
  if (e != cudaSuccess) return e;
  switch (p.width) {
  case 64: return launch_down<64, 1, kMany>(p, stream);
  case 128: return launch_down<128, 1, kMany>(p, stream);
  case 96: return launch_down<96, 1, kMany>(p, stream);
  case 192: return launch_down<192, 1, kMany>(p, stream);
  case 256: return launch_down<256, 1, kMany>(p, stream);
  case 384: return launch_down<384, 1, kMany>(p, stream);
  case 512: return launch_down<256, 2, kMany>(p, stream);
  case 768: return launch_down<384, 2, kMany>(p, stream);
  case 1024: return launch_down<256, 4, kMany>(p, stream);
  default: return cudaErrorInvalidValue;
  }
}

inline cudaError_t experts(const Experts &p, int blocks, cudaStream_t stream) {
  if (p.experts > kExperts || p.choices > 8 || p.choices > p.experts) return cudaErrorInvalidValue;
  return p.experts <= 128 ? experts_of<4>(p, blocks, stream) : experts_of<kExperts / 32>(p, blocks, stream);
}

} // namespace eagle3
