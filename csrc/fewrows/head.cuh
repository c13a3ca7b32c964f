// Final norm, output head, and each block's best entry, maximum and sum of exponentials: what kernels/head.py finishes. Logits
// are written only where somebody asked for them.
#pragma once

#include "common.cuh"
#include "project.cuh"

namespace eagle3 {

struct Vocabulary {
  const bf16 *x;      // [rows, columns] residual stream
  const bf16 *gamma;  // [columns]
  const bf16 *weight; // [vocabulary, columns]
  float *logits;      // [rows, vocabulary] or null
  int64_t *keys;      // [rows, blocks] ordered (value, lowest id): kernels/tile.py
  float *tops;        // [rows, blocks]
  float *sums;        // [rows, blocks] of exp(logit - top)
  float eps;
  int rows, vocabulary, columns;
};

constexpr float kLowest = -3.0e38f; // stands for -inf where differences are taken: kernels/head.py

__device__ __forceinline__ int64_t key_of(float value, int id) {
  const int bits = __float_as_int(value == 0.f ? 0.f : value), flipped = bits ^ ((bits >> 31) & 0x7fffffff);
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(flipped)) << 32 | static_cast<uint32_t>(0x7fffffff - id));
}

// A lane's running best, maximum and sum for one row.
struct Best {
  int64_t key;
  float top, sum;
  __device__ __forceinline__ void clear() { key = INT64_MIN, top = kLowest, sum = 0.f; }
  __device__ __forceinline__ void take(float value, int id) {
    const float clean = value == value ? value : -INFINITY; // NaN never wins, but it does spoil the sum
    const int64_t k = key_of(clean, id);
    key = k > key ? k : key;
    // exp(value - top): NaN for NaN and +inf, zero for -inf
    const float now = fmaxf(top, clean);
    sum = sum * __expf(top - now) + __expf(value - now);
    top = now;
  }
  __device__ __forceinline__ void join(float other_top, float other_sum) {
    const float now = fmaxf(top, other_top);
    sum = sum * __expf(top - now) + other_sum * __expf(other_top - now);
    top = now;
  }
};

template <int kThreads, int kPieces>
__global__ void __launch_bounds__(kThreads, kThreads > 384 ? 1 : 2) vocabulary(Vocabulary p) {
  constexpr int kQ = pieces_of_unit(kThreads, kPieces), kUnits = kUnitsInFlight, kParts = kPieces / kQ;
  extern __shared__ uint4 ring_memory[];
  __shared__ float4 red[2][kThreads];
  __shared__ float partial[kThreads / 32 * kRows];
  __shared__ uint4 gains[kThreads / 8 * kPieces];
  __shared__ Best bests[kThreads / 32][kRows];
  Ring<kUnits, 2 * kQ> ring(ring_memory);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8, row = blockIdx.y * kRows + g;
  const TileRows<false> rows(p.vocabulary);
  const int tiles = rows.tiles(), units = tiles * kParts;
  auto fetch = [&](int unit) {
    if (unit < units) {
      const int top = rows.top(unit / kParts, g);
      const bf16 *from = p.weight + column + unit % kParts * kQ * kPiece + static_cast<size_t>(top) * p.columns;
#pragma unroll
      for (int i = 0; i < kQ; i++) {
        copy_async(ring.slot(unit, 2 * i), top < rows.last ? from + i * kPiece : p.weight, top < rows.last);
        copy_async(ring.slot(unit, 2 * i + 1), top + 8 < rows.last ? from + 8 * p.columns + i * kPiece : p.weight, top + 8 < rows.last);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int u = 0; u < kUnits; u++) fetch(u);
  for (int i = threadIdx.x; i < p.columns / 8; i += kThreads) gains[i] = load_weights(p.gamma + i * 8);
  wait_for_predecessor();
  launch_dependents();
  uint4 b[kPieces];
  load_group(b, p.x + static_cast<size_t>(row) * p.columns + column, row < p.rows);
  __syncthreads();
  norm_group<kThreads / 32>(b, reinterpret_cast<const bf16 *>(gains) + column, partial, p.columns, p.eps);
  Best best[2];
  best[0].clear(), best[1].clear();
  const int base = blockIdx.y * kRows + 2 * (lane & 3);
  for (int tile = 0; tile < tiles; tile++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const int unit = tile * kParts + part;
      wait_copies<kUnits - 1>();
#pragma unroll
      for (int i = 0; i < kQ; i++) mma_piece(c, *ring.slot(unit, 2 * i), *ring.slot(unit, 2 * i + 1), b[part * kQ + i]);
      fetch(unit + kUnits);
    }
    red[tile & 1][threadIdx.x] = c;
    __syncthreads();
    if (warp != tile % (kThreads / 32)) continue;
    const float4 sum = sum_warps<kThreads / 32>(red[tile & 1]);
    const float values[2][2] = {{sum.x, sum.y}, {sum.z, sum.w}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int id = rows.top(tile, g) + 8 * half;
      if (id >= rows.last) continue;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        best[j].take(values[half][j], id);
        if (p.logits && base + j < p.rows) p.logits[static_cast<size_t>(base + j) * p.vocabulary + id] = values[half][j];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) { // over the lanes that hold the same row
      const int64_t key = __shfl_xor_sync(kAll, static_cast<long long>(best[j].key), o);
      const float top = __shfl_xor_sync(kAll, best[j].top, o), sum = __shfl_xor_sync(kAll, best[j].sum, o);
      best[j].key = key > best[j].key ? key : best[j].key;
      best[j].join(top, sum);
    }
    if (g == 0) bests[warp][2 * lane + j] = best[j];
  }
  __syncthreads();
  const int r = threadIdx.x, own = blockIdx.y * kRows + r;
  if (r >= kRows || own >= p.rows) return;
  Best all = bests[0][r];
  for (int w = 1; w < kThreads / 32; w++) {
    all.key = bests[w][r].key > all.key ? bests[w][r].key : all.key;
    all.join(bests[w][r].top, bests[w][r].sum);
  }
  const size_t at = static_cast<size_t>(own) * gridDim.x + blockIdx.x;
  p.keys[at] = all.key;
  p.tops[at] = all.top;
  p.sums[at] = all.sum;
}

template <int kThreads, int kPieces>
inline cudaError_t launch_vocabulary(const Vocabulary &p, int blocks, cudaStream_t stream) {
  constexpr int kQ = pieces_of_unit(kThreads, kPieces);
  const dim3 grid(blocks, (p.rows + kRows - 1) / kRows);
  return launch(vocabulary<kThreads, kPieces>, grid, kThreads, static_cast<size_t>(kUnitsInFlight) * 2 * kQ * 16 * kThreads, stream, 1, p);
}

inline cudaError_t head(const Vocabulary &p, int blocks, cudaStream_t stream) {
  switch (p.columns) {
  case 256: return launch_vocabulary<256, 1>(p, blocks, stream);
  case 512: return launch_vocabulary<256, 2>(p, blocks, stream);
  case 1024: return launch_vocabulary<256, 4>(p, blocks, stream);
  case 2048: return launch_vocabulary<256, 8>(p, blocks, stream);
  case 4096: return launch_vocabulary<512, 8>(p, blocks, stream);
  default: return cudaErrorInvalidValue;
  }
}

} // namespace eagle3
