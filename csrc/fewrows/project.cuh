// Projection of few rows: y = norm(x) W^T + bias + residual, or the gated pair act(gate) * up of it. Every block streams a
// contiguous range of weight rows, in tiles of 16, through its threads' rings.
#pragma once

#include "common.cuh"

namespace eagle3 {

struct Projection {
  const bf16 *x;        // [rows, columns], perhaps columns of wider rows
  const bf16 *gamma;    // [columns] or null: x comes normed
  const bf16 *weight;   // [outputs, columns]; gated: [2 * outputs, columns], gates first
  const bf16 *bias;     // [outputs] or null
  const bf16 *residual; // [rows, outputs] or null
  bf16 *y;              // [rows, outputs]
  float eps;
  int rows, outputs, columns, stride; // stride: from row to row of x
};

// Weight rows of a lane: `top` is row g of tile's A, `bottom` row g + 8; false where the block has no such row.
template <bool kGated>
struct TileRows {
  int first, last; // outputs of this block: [first, last)
  static constexpr int kStep = kGated ? 8 : 16;
  __device__ __forceinline__ TileRows(int outputs) {
    first = share_begin(outputs, blockIdx.x);
    last = share_begin(outputs, blockIdx.x + 1);
  }
  __device__ __forceinline__ int tiles() const { return (last - first + kStep - 1) / kStep; }
  __device__ __forceinline__ int top(int tile, int g) const { return first + tile * kStep + g; }
};

// Outputs of one tile: thread (component, lane) as in sum_partials; gated ones take gate and up together. scale: what sums of
// the thread's row are still to be multiplied by.
template <int kThreads, bool kGated>
__device__ __forceinline__ void store_tile(const Projection &p, const TileRows<kGated> &rows, int tile, const float *red,
                                           float scale = 1.f) {
  if (threadIdx.x >= (kGated ? 64 : 128)) return; // narrow blocks: 64 threads take two turns below
#pragma unroll
  for (int turn = 0; turn < (kGated || kThreads >= 128 ? 1 : 2); turn++) {
    const int at = threadIdx.x + turn * kThreads, which = at >> 5, lane = at & 31;
    const int row = blockIdx.y * kRows + 2 * (lane & 3) + (which & 1);
    const int out = rows.top(tile, lane >> 2) + (which & 2 ? 8 : 0);
    if (row >= p.rows || out >= rows.last) continue;
    float v = scale * sum_partials<kThreads>(red, which, lane);
    const size_t to = static_cast<size_t>(row) * p.outputs + out;
    if (kGated) {
      v = silu(v) * scale * sum_partials<kThreads>(red, which + 2, lane);
    } else {
      if (p.bias) v += __bfloat162float(p.bias[out]);
      if (p.residual) v += load_bf16(p.residual + to);
    }
    p.y[to] = __float2bfloat16(v);
  }
}

// kPieces a warp, all of B in registers.
template <int kThreads, int kPieces, bool kNorm, bool kGated>
__global__ void __launch_bounds__(kThreads, kNorm && kThreads > 384 ? 1 : 2) project(Projection p) {
  constexpr int kWarps = kThreads / 32;
  extern __shared__ uint4 ring_memory[];
  __shared__ float red[2][4 * kThreads];
  __shared__ float partial[kWarps * kRows];
  __shared__ uint4 gains[kNorm ? kThreads / 8 * kPieces : 1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  const TileRows<kGated> rows(p.outputs);
  auto aim = [&](int tile, const bf16 *&top, const bf16 *&bottom, bool &has_top, bool &has_bottom) {
    const int out = rows.top(tile, g);
    has_top = out < rows.last;
    has_bottom = kGated ? has_top : out + 8 < rows.last;
    top = p.weight + static_cast<size_t>(out) * p.columns + column;
    bottom = top + static_cast<size_t>(kGated ? p.outputs : 8) * p.columns;
  };
  Stream<kThreads, kPieces, decltype(aim)> stream(ring_memory, aim, rows.tiles());
  if (kNorm)
#pragma unroll 1
    for (int i = threadIdx.x; i < p.columns / 8; i += kThreads) gains[i] = load_weights(p.gamma + i * 8);
  wait_for_predecessor();
  launch_dependents();
  uint4 b[kPieces];
  load_group(b, p.x + static_cast<size_t>(row) * p.stride + column, row < p.rows);
  if (kNorm) {
    __syncthreads();
    norm_group<kWarps>(b, reinterpret_cast<const bf16 *>(gains) + column, partial, p.columns, p.eps);
  }
#pragma unroll 1
  for (int tile = 0; tile < rows.tiles(); tile++) {
    store_partial<kThreads>(red[tile & 1], stream.multiply(b));
    __syncthreads();
    store_tile<kThreads>(p, rows, tile, red[tile & 1]);
  }
}

// A piece of a row times the norm's gains, rounded; its squares are added to `sum`. The row's own factor comes with the sums.
__device__ __forceinline__ uint4 gained(const uint4 &x, const uint4 &gains, float &sum) {
  uint4 out;
  const uint32_t *v = reinterpret_cast<const uint32_t *>(&x), *gain = reinterpret_cast<const uint32_t *>(&gains);
  uint32_t *o = reinterpret_cast<uint32_t *>(&out);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float a = low(v[j]), b = high(v[j]);
    sum = fmaf(b, b, fmaf(a, a, sum));
    o[j] = pack(a * low(gain[j]), b * high(gain[j]));
  }
  return out;
}

// Long rows (columns a multiple of 512): the activations pass through the ring too, a piece of theirs beside one of the
// weights'. Weights are fetched before the wait, activations after it. A norm's gains lie behind the ring.
constexpr size_t kLongRing = static_cast<size_t>(4) * 3 * 16 * 512;
template <bool kNorm, bool kGated>
__global__ void __launch_bounds__(512, 2) project_long(Projection p) {
  constexpr int kThreads = 512, kUnits = 4;
  extern __shared__ uint4 ring_memory[];
  __shared__ float red[2][4 * kThreads];
  __shared__ float squares[kThreads / 32][kRows];
  uint4 *const ring = ring_memory + threadIdx.x, *const gains = ring_memory + kLongRing / 16;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, pieces = p.columns / 512;
  const int column = warp * pieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  const TileRows<kGated> rows(p.outputs);
  const int units = rows.tiles() * pieces;
  const bool live = row < p.rows;
  const bf16 *const x = p.x + static_cast<size_t>(live ? row : 0) * p.stride + column;
  auto weights = [&](int unit) {
    if (unit >= units) return;
    const int out = rows.top(unit / pieces, g);
    const bool has_top = out < rows.last, has_bottom = kGated ? has_top : out + 8 < rows.last;
    const bf16 *from = p.weight + static_cast<size_t>(out) * p.columns + column + unit % pieces * kPiece;
    uint4 *slot = ring + unit % kUnits * 3 * kThreads;
    copy_async(slot, from, has_top);
    copy_async(slot + kThreads, from + static_cast<size_t>(kGated ? p.outputs : 8) * p.columns, has_bottom);
  };
  auto activations = [&](int unit) {
    if (unit < units) copy_async(ring + (unit % kUnits * 3 + 2) * kThreads, x + unit % pieces * kPiece, live);
  };
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) {
    weights(u);
    commit_copies();
  }
  if (kNorm)
#pragma unroll 1
    for (int i = threadIdx.x; i < p.columns / 8; i += kThreads) gains[i] = load_weights(p.gamma + i * 8);
  wait_for_predecessor();
  launch_dependents();
#pragma unroll 1
  for (int u = 0; u < kUnits; u++) {
    activations(u);
    commit_copies();
  }
  if (kNorm) __syncthreads();
  float scale = 1.f;
  int unit = 0;
#pragma unroll 1
  for (int tile = 0; tile < rows.tiles(); tile++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
    float sum = 0.f;
#pragma unroll 1
    for (int part = 0; part < pieces; part++, unit++) {
      wait_copies<kUnits - 1>();
      const uint4 *slot = ring + unit % kUnits * 3 * kThreads;
      const uint4 x = kNorm ? gained(slot[2 * kThreads], gains[column / 8 + part * (kPiece / 8)], sum) : slot[2 * kThreads];
      mma_piece(c, slot[0], slot[kThreads], x);
      weights(unit + kUnits);
      activations(unit + kUnits);
      commit_copies();
    }
    store_partial<kThreads>(red[tile & 1], c);
    if (kNorm && tile == 0) {
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      if ((lane & 3) == 0) squares[warp][g] = sum;
    }
    __syncthreads();
    if (kNorm && tile == 0) { // of the row whose sums this thread adds
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kThreads / 32; w++) total += squares[w][2 * (lane & 3) + (warp & 1)];
      scale = rsqrtf(total / p.columns + p.eps);
    }
    store_tile<kThreads>(p, rows, tile, red[tile & 1], scale);
  }
}

// Number of blocks that divides `outputs` rows best over `blocks` multiprocessors: whole tiles where they all fit at once.
inline int grid_of(int outputs, int blocks, int step) {
  const int tiles = (outputs + step - 1) / step;
  return tiles < blocks ? tiles : blocks;
}

struct Nowhere {
  __device__ void operator()(int, const bf16 *&, const bf16 *&, bool &, bool &) const {}
};
// Bytes of a stream's ring.
template <int kThreads, int kPieces>
constexpr size_t kRingBytes = Stream<kThreads, kPieces, Nowhere>::kBytes;

template <int kThreads, int kPieces, bool kGated>
inline cudaError_t launch_project(const Projection &p, int blocks, cudaStream_t stream) {
  const dim3 grid(grid_of(p.outputs, blocks, kGated ? 8 : 16), (p.rows + kRows - 1) / kRows);
  constexpr size_t ring = kRingBytes<kThreads, kPieces>;
  if (p.gamma) return launch(project<kThreads, kPieces, true, kGated>, grid, kThreads, ring, stream, 1, p);
  return launch(project<kThreads, kPieces, false, kGated>, grid, kThreads, ring, stream, 1, p);
}

template <bool kGated>
inline cudaError_t project_rows(const Projection &p, int blocks, cudaStream_t stream) {
  switch (p.columns) {
  case 64: return launch_project<64, 1, kGated>(p, blocks, stream);
  case 128: return launch_project<128, 1, kGated>(p, blocks, stream);
  case 256: return launch_project<256, 1, kGated>(p, blocks, stream);
  case 512: return launch_project<256, 2, kGated>(p, blocks, stream);
  case 768: return launch_project<384, 2, kGated>(p, blocks, stream);
  case 1024: return launch_project<256, 4, kGated>(p, blocks, stream);
  case 1536: return launch_project<384, 4, kGated>(p, blocks, stream);
  case 2048: return launch_project<256, 8, kGated>(p, blocks, stream);
  case 2304: return launch_project<288, 8, kGated>(p, blocks, stream);
  case 2880: return launch_project<480, 6, kGated>(p, blocks, stream);
  case 4096: return launch_project<512, 8, kGated>(p, blocks, stream);
  default: break;
  }
  const dim3 grid(grid_of(p.outputs, blocks, kGated ? 8 : 16), (p.rows + kRows - 1) / kRows);
  if (p.columns % 512) return cudaErrorInvalidValue;
  const size_t gains = static_cast<size_t>(p.columns) * 2;
  if (p.gamma) return launch(project_long<true, kGated>, grid, 512, kLongRing + gains, stream, 1, p);
  return launch(project_long<false, kGated>, grid, 512, kLongRing, stream, 1, p);
}

} // namespace eagle3
