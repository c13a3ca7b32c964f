// Products of long rows with weights in registers: the rows take a norm's gains on their way into shared memory, once a block;
// weight rows come in tiles of 8, half of an mma's 16, so that all of a block's first tile is on its way before the wait.
#pragma once

#include "operand.cuh"

namespace eagle3 {

// A group's rows in shared memory, [rows][kPitch] chunks of 8 columns, the middle two pairs of each exchanged. kThreads / 32 warps,
// each a slice of kPieces pieces.
template <int kThreads, int kPieces>
struct StagedRows {
  static constexpr int kWarps = kThreads / 32, kChunks = kThreads * kPieces / 8, kOwn = (kChunks + kThreads - 1) / kThreads;
  static constexpr int kPitch = kChunks + 4; // rows lie on different banks
  uint4 *const rows;
  float (*const squares)[kRows]; // [kWarps], scratch
  uint4 gain[kOwn];
  const bool normed;

  // Before the wait. gamma: [columns] or null: rows come normed.
  __device__ __forceinline__ StagedRows(void *memory, float (*squares)[kRows], const bf16 *gamma)
      : rows(static_cast<uint4 *>(memory)), squares(squares), normed(gamma) {
#pragma unroll
    for (int k = 0; k < kOwn; k++) {
      const int c = threadIdx.x + k * kThreads;
      gain[k] = load_gains(gamma, c * 8, c < kChunks);
    }
  }
  // `live` rows of x, `stride` apart. All threads of the block call it; a barrier follows.
  __device__ __forceinline__ void stage(const bf16 *x, size_t stride, int live) {
    float sum[kRows];
#pragma unroll
    for (int half = 0; half < kRows; half += kRows / 2) { // on their way together, as many as there are registers for
#pragma unroll
      for (int r = 0; r < kRows / 2; r++) sum[half + r] = 0.f;
      if (half >= live) continue;
      uint4 v[kRows / 2][kOwn];
#pragma unroll
      for (int r = 0; r < kRows / 2; r++)
#pragma unroll
        for (int k = 0; k < kOwn; k++) {
          const int c = threadIdx.x + k * kThreads;
          load_rows_if(v[r][k], x + (half + r) * stride + c * 8, half + r < live && c < kChunks);
        }
#pragma unroll
      for (int r = 0; r < kRows / 2; r++)
#pragma unroll
        for (int k = 0; k < kOwn; k++) {
          const int c = threadIdx.x + k * kThreads;
          if (half + r >= live || c >= kChunks) continue;
          const uint4 own = gained(v[r][k], gain[k], sum[half + r]);
          rows[(half + r) * kPitch + c] = make_uint4(own.x, own.z, own.y, own.w);
        }
    }
    const int lane = threadIdx.x & 31;
    const float total = sum_of_rows(sum);
    if ((lane & 3) == 0) squares[threadIdx.x >> 5][lane >> 2] = total;
    __syncthreads();
  }
  // What sums of row r are still to be multiplied by.
  __device__ __forceinline__ float factor(int r, int columns, float eps) const {
    if (!normed) return 1.f;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += squares[w][r];
    return rsqrtf(total / columns + eps);
  }
  // B operands of this lane, a piece every 4 chunks; rows that do not exist are the first: nobody reads their sums.
  __device__ __forceinline__ const uint4 *operand(int live) const {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    return rows + (g < live ? g : 0) * kPitch + (threadIdx.x >> 5) * kPieces * 4 + (lane & 3);
  }
  static size_t bytes(int rows) { return static_cast<size_t>(rows < kRows ? rows : kRows) * kPitch * sizeof(uint4); }
};

// Eight weight rows, one a lane group g: a warp's slice of kPieces pieces, or the first half of it and then the other.
template <int kPieces>
struct HalfTile {
  static constexpr int kDepth = kPieces > 16 ? kPieces / 2 : kPieces;
  uint4 w[kDepth];
  const bf16 *from = nullptr; // the lane's columns of its row; null: there is no such row

  __device__ __forceinline__ void begin(const bf16 *row) {
    from = row;
#pragma unroll
    for (int i = 0; i < kDepth; i++) w[i] = from ? load_weights(from + i * kPiece) : make_uint4(0, 0, 0, 0);
  }
  // Products with a group's rows, of columns 2t and 2t + 1 of the group: two chains, each in ascending columns. more: another
  // tile follows, whose row is `next`. Sixteen bytes are an mma's A as they were loaded, for two products, of each of which one half
  // counts.
  __device__ __forceinline__ float2 multiply(const uint4 *b, bool more, const bf16 *next) {
    return more ? multiply<true>(b, next) : multiply<false>(b, nullptr);
  }
  template <bool kMore>
  __device__ __forceinline__ float2 multiply(const uint4 *b, const bf16 *next) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c;
#pragma unroll
    for (int piece = 0; piece < kPieces; piece++) {
      const uint4 y = b[piece * 4], own = w[piece % kDepth];
      mma(c, own.x, own.y, own.z, own.w, y.x, y.y);
      mma(odd, own.x, own.y, own.z, own.w, y.z, y.w);
      const int ahead = piece + kDepth;
      if (ahead == kPieces) from = next;
      if (kMore || ahead < kPieces) load_weights_if(w[piece % kDepth], from + ahead % kPieces * kPiece, from);
    }
    return make_float2(c.x + odd.z, c.y + odd.w);
  }
};

// The warps' sums of a tile, [8 weight rows][8 rows] each, and their sum in ascending order of the warps.
template <int kWarps>
struct TileSums {
  float of[kWarps][64];
  __device__ __forceinline__ void put(const float2 &v) {
    const int lane = threadIdx.x & 31;
    *reinterpret_cast<float2 *>(&of[threadIdx.x >> 5][(lane >> 2) * 8 + 2 * (lane & 3)]) = v;
  }
  __device__ __forceinline__ float sum(int at) const {
    float total = of[0][at];
#pragma unroll
    for (int w = 1; w < kWarps; w++) total += of[w][at];
    return total;
  }
};

} // namespace eagle3
