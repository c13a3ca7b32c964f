// Projection of few rows: y = norm(x) W^T + bias + residual, or the gated pair act(gate) * up of it. Every block streams a
// contiguous range of weight rows, in tiles of 16, through its threads' rings.
#pragma once

#include "common.cuh"

namespace eagle3 {

struct Projection {
  const bf16 *x;        // [rows, columns]
  const bf16 *gamma;    // [columns] or null: x comes normed
  const bf16 *weight;   // [outputs, columns]; gated: [2 * outputs, columns], gates first
  const bf16 *bias;     // [outputs] or null
  const bf16 *residual; // [rows, outputs] or null
  bf16 *y;              // [rows, outputs]
  float eps;
  int rows, outputs, columns;
};

// Weight rows of a lane: `top` is row g of tile's A, `bottom` row g + 8; false where the block has no such row.
template <bool kGated>
struct TileRows {
  int first, last; // outputs of this block: [first, last)
  static constexpr int kStep = kGated ? 8 : 16;
  __device__ __forceinline__ TileRows(int outputs) {
    first = static_cast<int>(static_cast<int64_t>(outputs) * blockIdx.x / gridDim.x);
    last = static_cast<int>(static_cast<int64_t>(outputs) * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ __forceinline__ int tiles() const { return (last - first + kStep - 1) / kStep; }
  __device__ __forceinline__ int top(int tile, int g) const { return first + tile * kStep + g; }
};

template <bool kGated>
__device__ __forceinline__ void store_tile(const Projection &p, const TileRows<kGated> &rows, int tile, float4 sum) {
  const int lane = threadIdx.x & 31, g = lane >> 2, base = blockIdx.y * kRows + 2 * (lane & 3);
  const float values[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
#pragma unroll
  for (int half = 0; half < (kGated ? 1 : 2); half++) {
    const int out = rows.top(tile, g) + 8 * half;
    if (out >= rows.last) continue;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (base + j >= p.rows) continue;
      const size_t at = static_cast<size_t>(base + j) * p.outputs + out;
      float v = values[half][j];
      if (kGated) {
        v = silu(v) * values[1][j];
      } else {
        if (p.bias) v += __bfloat162float(p.bias[out]);
        if (p.residual) v += load_bf16(p.residual + at);
      }
      p.y[at] = __float2bfloat16(v);
    }
  }
}

// kPieces a warp, all of B in registers.
template <int kThreads, int kPieces, bool kNorm, bool kGated>
__global__ void __launch_bounds__(kThreads, kNorm && kThreads > 384 ? 1 : 2) project(Projection p) {
  constexpr int kQ = pieces_of_unit(kThreads, kPieces), kUnits = kUnitsInFlight;
  extern __shared__ uint4 ring_memory[];
  __shared__ float4 red[2][kThreads];
  __shared__ float partial[kThreads / 32 * kRows];
  __shared__ uint4 gains[kNorm ? kThreads / 8 * kPieces : 1];
  Ring<kUnits, 2 * kQ> ring(ring_memory);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  const TileRows<kGated> rows(p.outputs);
  const int tiles = rows.tiles(), units = tiles * (kPieces / kQ);
  auto fetch = [&](int unit) {
    if (unit < units) {
      const int tile = unit / (kPieces / kQ), part = unit % (kPieces / kQ), top = rows.top(tile, g);
      const int bottom = kGated ? top + p.outputs : top + 8;
      const bool has_top = top < rows.last, has_bottom = kGated ? has_top : bottom < rows.last;
      const bf16 *from = p.weight + column + part * kQ * kPiece;
      const bf16 *a = from + static_cast<size_t>(has_top ? top : 0) * p.columns;
      const bf16 *b = from + static_cast<size_t>(has_bottom ? bottom : 0) * p.columns;
#pragma unroll
      for (int i = 0; i < kQ; i++) {
        copy_async(ring.slot(unit, 2 * i), a + i * kPiece, has_top);
        copy_async(ring.slot(unit, 2 * i + 1), b + i * kPiece, has_bottom);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int u = 0; u < kUnits; u++) fetch(u);
  if (kNorm)
    for (int i = threadIdx.x; i < p.columns / 8; i += kThreads) gains[i] = load_weights(p.gamma + i * 8);
  wait_for_predecessor();
  launch_dependents();
  uint4 b[kPieces];
  load_group(b, p.x + static_cast<size_t>(row) * p.columns + column, row < p.rows);
  if (kNorm) {
    __syncthreads();
    norm_group<kThreads / 32>(b, reinterpret_cast<const bf16 *>(gains) + column, partial, p.columns, p.eps);
  }
  for (int tile = 0; tile < tiles; tile++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int part = 0; part < kPieces / kQ; part++) {
      const int unit = tile * (kPieces / kQ) + part;
      wait_copies<kUnits - 1>();
#pragma unroll
      for (int i = 0; i < kQ; i++) mma_piece(c, *ring.slot(unit, 2 * i), *ring.slot(unit, 2 * i + 1), b[part * kQ + i]);
      fetch(unit + kUnits);
    }
    red[tile & 1][threadIdx.x] = c;
    __syncthreads();
    if (warp == tile % (kThreads / 32)) store_tile(p, rows, tile, sum_warps<kThreads / 32>(red[tile & 1]));
  }
}

// Long rows (columns a multiple of 512): the activations pass through the ring too, a piece of theirs beside one of the
// weights'. Weights are fetched before the wait, activations after it.
template <bool kGated>
__global__ void __launch_bounds__(512, 2) project_long(Projection p) {
  constexpr int kThreads = 512, kUnits = 4;
  extern __shared__ uint4 ring_memory[];
  __shared__ float4 red[2][kThreads];
  Ring<kUnits, 3> ring(ring_memory);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, pieces = p.columns / 512;
  const int column = warp * pieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  const TileRows<kGated> rows(p.outputs);
  const int tiles = rows.tiles(), units = tiles * pieces;
  auto weights = [&](int unit) {
    if (unit >= units) return;
    const int top = rows.top(unit / pieces, g), bottom = kGated ? top + p.outputs : top + 8;
    const bool has_top = top < rows.last, has_bottom = kGated ? has_top : bottom < rows.last;
    const bf16 *from = p.weight + column + unit % pieces * kPiece;
    copy_async(ring.slot(unit, 0), from + static_cast<size_t>(has_top ? top : 0) * p.columns, has_top);
    copy_async(ring.slot(unit, 1), from + static_cast<size_t>(has_bottom ? bottom : 0) * p.columns, has_bottom);
  };
  auto activations = [&](int unit) {
    if (unit >= units) return;
    const bf16 *from = p.x + column + unit % pieces * kPiece;
    copy_async(ring.slot(unit, 2), from + static_cast<size_t>(row < p.rows ? row : 0) * p.columns, row < p.rows);
  };
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    weights(u);
    commit_copies();
  }
  wait_for_predecessor();
  launch_dependents();
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    activations(u);
    commit_copies();
  }
  int unit = 0;
  for (int tile = 0; tile < tiles; tile++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int part = 0; part < pieces; part++, unit++) {
      wait_copies<kUnits - 1>();
      mma_piece(c, *ring.slot(unit, 0), *ring.slot(unit, 1), *ring.slot(unit, 2));
      weights(unit + kUnits);
      activations(unit + kUnits);
      commit_copies();
    }
    red[tile & 1][threadIdx.x] = c;
    __syncthreads();
    if (warp == tile % (kThreads / 32)) store_tile(p, rows, tile, sum_warps<kThreads / 32>(red[tile & 1]));
  }
}

// Number of blocks that divides `outputs` rows best over `blocks` multiprocessors: whole tiles where they all fit at once.
inline int grid_of(int outputs, int blocks, int step) {
  const int tiles = (outputs + step - 1) / step;
  return tiles < blocks ? tiles : blocks;
}

template <int kThreads, int kPieces, bool kGated>
inline cudaError_t launch_project(const Projection &p, int blocks, cudaStream_t stream) {
  constexpr int kQ = pieces_of_unit(kThreads, kPieces);
  const dim3 grid(grid_of(p.outputs, blocks, kGated ? 8 : 16), (p.rows + kRows - 1) / kRows);
  const size_t ring = static_cast<size_t>(kUnitsInFlight) * 2 * kQ * 16 * kThreads;
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
  case 2048: return launch_project<256, 8, kGated>(p, blocks, stream);
  case 4096: return launch_project<512, 8, kGated>(p, blocks, stream);
  default: break;
  }
  if (p.gamma || p.columns % 512) return cudaErrorInvalidValue;
  const dim3 grid(grid_of(p.outputs, blocks, kGated ? 8 : 16), (p.rows + kRows - 1) / kRows);
  return launch(project_long<kGated>, grid, 512, static_cast<size_t>(4) * 3 * 16 * 512, stream, 1, p);
}

} // namespace eagle3
