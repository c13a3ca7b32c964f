// Final norm, output head, and each block's best entry, maximum and sum of exponentials: what kernels/head.py finishes. Logits
// are written only where somebody asked for them.
#pragma once

#include "operand.cuh"
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

template <int kThreads, int kPieces, int kGroups>
__global__ void __launch_bounds__(kThreads, resident(kThreads)) vocabulary(Vocabulary p) {
  using Rows = Operand<kThreads, kPieces, kGroups, true, aside(kPieces, kGroups)>;
  constexpr bool kTight = aside(kPieces, kGroups) > 0; // no register to spare
  constexpr int kHeld = kGroups * kRows, kDepth = depth_of(kPieces), kParts = kPieces / kDepth;
  extern __shared__ uint4 operand_memory[];
  __shared__ float red[2][kGroups][4 * kThreads];
  __shared__ float squares[kGroups][kThreads / 32][kRows];
  __shared__ Best bests[2][kHeld];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8;
  const TileRows<false> rows(p.vocabulary);
  const bf16 *const weight = p.weight + column;
  const bf16 *top, *bottom;
  rows.aim(0, g, weight, p.vocabulary, Rows::kColumns, top, bottom);
  const auto gains = Rows::gain(p.gamma); // asked for first: what is asked for behind a tile of weights comes behind it
  Tile<kDepth> tile;
  tile.fetch(top, bottom);
  Rows b(operand_memory);
  wait_for_predecessor();
  launch_dependents();
  b.stage(p.x, p.columns, blockIdx.y * kHeld, p.rows, gains, squares);
  static_assert(kThreads >= 128 * kGroups, "one thread an output and row");
  Best best; // of one row: thread (group, component, lane) as in sum_partials
  best.clear();
  const int group = warp >> 2, which = warp & 3, own_row = blockIdx.y * kHeld + group * kRows + 2 * (lane & 3) + (which & 1);
  const float factor = threadIdx.x < 128 * kGroups ? Rows::factor(squares[group], own_row % kRows, true, p.eps) : 0.f;
  const int tiles = rows.tiles();
#pragma unroll 1
  for (int at = 0; at < tiles; at++) {
    const bf16 *const here = top, *const below = bottom;
    const int ahead = kTight ? fresh_thread() : static_cast<int>(threadIdx.x);
    rows.aim(min(at + 1, tiles - 1), ahead >> 2 & 7, p.weight + (ahead >> 5) * kPieces * kPiece + (ahead & 3) * 8, p.vocabulary, Rows::kColumns, top,
             bottom);
    float4 c[kGroups];
    multiply(tile, b, c, [&](int part, int i) {
      if (part + 1 < kParts)
        tile.fetch(i, here + (part + 1) * kDepth * kPiece, below + (part + 1) * kDepth * kPiece);
      else if (at + 1 < tiles)
        tile.fetch(i, top, bottom);
    });
#pragma unroll
    for (int own = 0; own < kGroups; own++) store_partial<kThreads>(red[at & 1][own], c[own]);
    __syncthreads();
    const int thread = kTight ? fresh_thread() : static_cast<int>(threadIdx.x), which = thread >> 5 & 3, group = thread >> 7;
    const int id = rows.top(at, thread >> 2 & 7) + (which & 2 ? 8 : 0);
    if (thread >= 128 * kGroups || id >= rows.last) continue;
    const int own = blockIdx.y * kHeld + group * kRows + 2 * (thread & 3) + (which & 1);
    const float value = factor * sum_partials<kThreads>(red[at & 1][group], which, thread & 31);
    best.take(value, id);
    if (p.logits && own < p.rows) p.logits[static_cast<size_t>(own) * p.vocabulary + id] = value;
  }
  if (threadIdx.x < 128 * kGroups) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) { // over the lanes that hold the same row
      const int64_t key = __shfl_xor_sync(kAll, static_cast<long long>(best.key), o);
      const float most = __shfl_xor_sync(kAll, best.top, o), sum = __shfl_xor_sync(kAll, best.sum, o);
      best.key = key > best.key ? key : best.key;
      best.join(most, sum);
    }
    if (g == 0) bests[which >> 1][group * kRows + 2 * lane + (which & 1)] = best;
  }
  __syncthreads();
  const int r = threadIdx.x, own = blockIdx.y * kHeld + r;
  if (r >= kHeld || own >= p.rows) return;
  Best all = bests[0][r], other = bests[1][r];
  all.key = other.key > all.key ? other.key : all.key;
  all.join(other.top, other.sum);
  const size_t at = static_cast<size_t>(own) * gridDim.x + blockIdx.x;
  p.keys[at] = all.key;
  p.tops[at] = all.top;
  p.sums[at] = all.sum;
}

template <int kThreads, int kPieces, int kGroups>
inline cudaError_t launch_vocabulary_groups(const Vocabulary &p, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks, (p.rows + kRows * kGroups - 1) / (kRows * kGroups));
  return launch(vocabulary<kThreads, kPieces, kGroups>, grid, kThreads, Operand<kThreads, kPieces, kGroups, true, aside(kPieces, kGroups)>::bytes(p.rows), stream, 1, p);
}

template <int kThreads, int kPieces>
inline cudaError_t launch_vocabulary(const Vocabulary &p, int blocks, cudaStream_t stream) {
  if constexpr (kPieces <= 8) // or two groups do not fit into shared memory
    if (p.rows > kRows) return launch_vocabulary_groups<kThreads, kPieces, 2>(p, blocks, stream);
  return launch_vocabulary_groups<kThreads, kPieces, 1>(p, blocks, stream);
}

inline cudaError_t head(const Vocabulary &p, int blocks, cudaStream_t stream) {
  switch (p.columns) {
  case 256: return launch_vocabulary<256, 1>(p, blocks, stream);
  case 512: return launch_vocabulary<256, 2>(p, blocks, stream);
  case 1024: return launch_vocabulary<256, 4>(p, blocks, stream);
  case 2048: return launch_vocabulary<256, 8>(p, blocks, stream);
  case 2880: return launch_vocabulary<480, 6>(p, blocks, stream);
  case 4096: return launch_vocabulary<512, 8>(p, blocks, stream);
  case 7168: return launch_vocabulary<512, 14>(p, blocks, stream);
  default: return cudaErrorInvalidValue;
  }
}

} // namespace eagle3
