// Queries of latent attention: absorbed into the space of the latents, their turned lanes, and the cache row; what the
// kernels that make them share, and the one that takes heads as a projection left them.
#pragma once

#include "operand.cuh"

namespace eagle3 {

constexpr int kLatent = 512, kTurned = 64, kPlain = 128, kHeadValues = 128; // Kimi, DeepSeek-V2 and V3
constexpr int kLatentRow = kLatent + kTurned;

// Two neighbouring activations at L2.
__device__ __forceinline__ uint32_t load_pair(const bf16 *p) {
  uint32_t r;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}

struct LatentQueries {
  const bf16 *projected;    // [rows, stride]: its last 576 columns are the latent and the shared key
  const bf16 *own;          // [rows, own_stride]: heads of 128 plain and 64 turned lanes, or null
  const bf16 *gamma;        // [1536] where there is no own: heads are norm(projected[:, :1536]) weight^T
  const bf16 *weight;       // [heads * 192, 1536], or null
  const bf16 *k_up;         // [heads] matrices [128, 512], up_stride elements apart
  const bf16 *gain;         // [512], of the latent's norm
  const float *cos_sin;     // [L, 64]
  const int64_t *positions; // [B, T] of RoPE
  const int64_t *index;     // [B, T] rows written
  const int *pages;         // [B, table]
  bf16 *q;                  // [rows, heads, 576]
  bf16 *plane;              // [slots, 576]
  float eps;
  int rows, t, heads, stride, own_stride, up_stride, columns, table, page;
};

// The angle of a pair of lanes at the position of row `row`, older than the kernels before this one.
struct Turn {
  float cosine, sine;
  // position: of its row, asked for early: the angle waits for it.
  __device__ __forceinline__ Turn(const LatentQueries &p, int64_t position, int pair, bool live) : cosine(0.f), sine(0.f) {
    if (!live) return;
    const float *from = p.cos_sin + position * kTurned + pair;
    cosine = from[0], sine = from[kTurned / 2];
  }
  __device__ __forceinline__ uint32_t of(uint32_t v) const {
    const float a = low(v), b = high(v);
    return pack(a * cosine - b * sine, b * cosine + a * sine);
  }
};

// Cache row of one row of the pass, by one warp: latent normed, shared key turned. Where it goes is asked for before the wait.
struct CacheRow {
  int64_t slot = 0; // of nobody
  Turn turn;
  uint4 gain[2];
  __device__ __forceinline__ CacheRow(const LatentQueries &p, int row, bool live)
      : turn(p, live ? load_long(p.positions + row) : 0, threadIdx.x & 31, live) {
    if (!live) return;
    const int64_t index = load_long(p.index + row);
    if (index >= 0 && index < static_cast<int64_t>(p.columns) * p.page)
      slot = static_cast<int64_t>(p.pages[static_cast<int64_t>(row / p.t) * p.table + index / p.page]) * p.page + index % p.page;
#pragma unroll
    for (int i = 0; i < 2; i++) gain[i] = load_weights(p.gain + i * 256 + (threadIdx.x & 31) * 8);
  }
  __device__ __forceinline__ void write(const LatentQueries &p, int row) const {
    const int lane = threadIdx.x & 31;
    const bf16 *from = p.projected + static_cast<size_t>(row) * p.stride + p.stride - kLatentRow;
    uint4 v[2];
#pragma unroll
    for (int i = 0; i < 2; i++) v[i] = load_rows(from + i * 256 + lane * 8);
    const uint32_t shared = load_pair(from + kLatent + 2 * lane);
    const float sum = warp_sum(product_of(v, v));
    const float scale = rsqrtf(sum * (1.f / kLatent) + p.eps);
    bf16 *to = p.plane + static_cast<size_t>(slot) * kLatentRow;
#pragma unroll
    for (int i = 0; i < 2; i++) *reinterpret_cast<uint4 *>(to + i * 256 + lane * 8) = normed_piece(v[i], scale, gain[i]);
    *reinterpret_cast<uint32_t *>(to + kLatent + 2 * lane) = turn.of(shared);
  }
};

// Columns chunk * 64 … of a head's absorbed queries, by four warps.
struct AbsorbedColumns {
  static constexpr int kWarps = 4, kChunk = 64, kPitch = kChunk + 8; // rows of 16 bytes lie on different banks
  // up: [kPlain][kPitch], from before the wait; a group of copies.
  template <int kThreads>
  static __device__ __forceinline__ void fetch(const LatentQueries &p, bf16 *up, int head, int chunk) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kPlain * kChunk / 8; i += kThreads) {
      const int d = i / (kChunk / 8), c = i % (kChunk / 8) * 8;
      copy_async(up + d * kPitch + c, p.k_up + static_cast<size_t>(head) * p.up_stride + d * kLatent + chunk * kChunk + c, true);
    }
    commit_copies();
  }
  // b: the plain lanes of row g of the group, as B operands.
  static __device__ __forceinline__ void write(const LatentQueries &p, const bf16 *up, const uint32_t (&b)[kPlain / 16][2], int head, int chunk,
                                               int first_row, int live) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
    const bf16 *at = up + ((lane >> 4) * 8 + (lane & 7)) * kPitch + warp * 16 + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int k = 0; k < kPlain / 16; k++) {
      uint32_t a[4];
      load_transposed(a, at + k * 16 * kPitch);
      mma(c, a[0], a[1], a[2], a[3], b[k][0], b[k][1]);
    }
    const float *of = &c.x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 2 * t + (i & 1), column = chunk * kChunk + warp * 16 + g + (i & 2 ? 8 : 0);
      if (row < live) p.q[(static_cast<size_t>(first_row + row) * p.heads + head) * kLatentRow + column] = __float2bfloat16(of[i]);
    }
  }
};

// Block (x, y): columns x mod 8 * 64 … of head x / 8's absorbed queries for row group y, and from the first of them the
// head's turned lanes; past the heads, the cache rows.
__global__ void __launch_bounds__(128) latent_queries(LatentQueries p) {
  __shared__ __align__(16) bf16 up[kPlain * AbsorbedColumns::kPitch];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.x / 8, chunk = blockIdx.x % 8, first_row = blockIdx.y * kRows;
  const int live = min(kRows, p.rows - first_row);
  // Attention begins already: what it reads before its own wait, committed rows and where they lie, is older than the
  // projections before this kernel.
  launch_dependents();
  const int r = warp, below = r + kRows / 2; // rows whose pairs this warp turns
  if (head == p.heads) {
    const CacheRow first(p, first_row + r, r < live), second(p, first_row + below, below < live);
    wait_for_predecessor();
    if (r < live) first.write(p, first_row + r);
    if (below < live) second.write(p, first_row + below);
    return;
  }
  AbsorbedColumns::fetch<128>(p, up, head, chunk);
  const bool turns = !chunk && r < live, also = !chunk && below < live;
  const int64_t position = turns ? load_long(p.positions + first_row + r) : 0, another = also ? load_long(p.positions + first_row + below) : 0;
  const Turn first(p, position, lane, turns), second(p, another, lane, also);
  wait_for_predecessor();
  const bf16 *own = p.own + head * (kPlain + kTurned);
  uint32_t b[kPlain / 16][2];
#pragma unroll
  for (int k = 0; k < kPlain / 16; k++)
#pragma unroll
    for (int h = 0; h < 2; h++)
      b[k][h] = g < live ? load_pair(own + static_cast<size_t>(first_row + g) * p.own_stride + k * 16 + h * 8 + 2 * t) : 0;
  auto turned = [&](int row) { return own + static_cast<size_t>(first_row + row) * p.own_stride + kPlain + 2 * lane; };
  const uint32_t pair = !chunk && r < live ? load_pair(turned(r)) : 0, last = !chunk && below < live ? load_pair(turned(below)) : 0;
  wait_copies<0>();
  __syncthreads();
  AbsorbedColumns::write(p, up, b, head, chunk, first_row, live);
  if (chunk) return;
  auto store = [&](int row, uint32_t v) {
    *reinterpret_cast<uint32_t *>(p.q + (static_cast<size_t>(first_row + row) * p.heads + head) * kLatentRow + kLatent + 2 * lane) = v;
  };
  if (r < live) store(r, first.of(pair));
  if (below < live) store(below, second.of(last));
}

} // namespace eagle3
