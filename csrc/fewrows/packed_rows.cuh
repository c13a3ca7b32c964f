// A group's rows in shared memory, as a router beside gate and up over four-bit codes multiplies them: [rows][kPitch] chunks of 8 columns in
// the order of a format F. Rows lie on different banks.
#pragma once

#include "packed.cuh"
#include "router.cuh"

namespace eagle3 {

// The row of a lane's sums; rows that do not exist: the first, whose sums nobody reads twice.
__device__ __forceinline__ int lane_row(int live) {
  const int g = fresh_thread() >> 2 & 7;
  return g < live ? g : 0;
}

// Rows times a norm's gains; sums of them lack the norm's factor.
template <class F, int kColumns, int kWarps, int kSpans>
struct GainedRows {
  static constexpr int kThreads = kWarps * 32, kChunks = kWarps * kSpans * 16, kPitch = kChunks + 4;
  static constexpr int kReal = kColumns / 8, kOwn = (kReal + kThreads - 1) / kThreads; // chunks that exist; of a thread
  static constexpr int kParts = route_threads(kColumns) > kThreads ? kOwn : 1; // a thread's squares go apart where the router's do
  using Squares = float[kParts * kWarps][kRows];
  uint4 *const rows;
  float (*const squares)[kRows]; // [kParts * kWarps]
  uint4 gain[kOwn];
  const bool normed;

  // Before the wait. gamma: [columns] or null: rows come normed.
  __device__ __forceinline__ GainedRows(uint4 *memory, float (*squares)[kRows], const bf16 *gamma) : rows(memory), squares(squares), normed(gamma) {
#pragma unroll
    for (int k = 0; k < kOwn; k++) {
      const int c = threadIdx.x + k * kThreads;
      gain[k] = load_gains(gamma, c * 8, c < kReal);
    }
  }
  // `live` rows of x, one at least. All threads of the block call it; a barrier follows. beside(): what is asked for behind the first
  // rows, so that they do not come behind it; behind(): when they have come.
  template <class Beside = Nothing, class Behind = Nothing>
  __device__ __forceinline__ void stage(const bf16 *x, int live, Beside beside = {}, Behind behind = {}) {
    float sum[kParts][kRows];
#pragma unroll
    for (int half = 0; half < kRows; half += kRows / 2) { // on their way together, as many as there are registers for
#pragma unroll
      for (int r = 0; r < kRows / 2; r++)
#pragma unroll
        for (int part = 0; part < kParts; part++) sum[part][half + r] = 0.f;
      if (half && half >= live) continue;
      uint4 v[kRows / 2][kOwn];
#pragma unroll
      for (int r = 0; r < kRows / 2; r++)
#pragma unroll
        for (int k = 0; k < kOwn; k++) {
          const int c = threadIdx.x + k * kThreads;
          load_rows_if(v[r][k], x + (half + r) * kColumns + c * 8, half + r < live && c < kReal);
        }
      if (!half) {
        beside();
        await_load(v[0][kOwn - 1]);
        behind();
      }
#pragma unroll
      for (int r = 0; r < kRows / 2; r++)
#pragma unroll
        for (int k = 0; k < kOwn; k++) {
          const int c = threadIdx.x + k * kThreads;
          if (half + r < live && c < kReal)
            rows[(half + r) * kPitch + c] = F::operand(gained(v[r][k], gain[k], sum[k % kParts][half + r]));
        }
    }
    if constexpr (kReal < kChunks) // columns that do not exist
      for (int i = threadIdx.x; i < live * (kChunks - kReal); i += kThreads)
        rows[i / (kChunks - kReal) * kPitch + kReal + i % (kChunks - kReal)] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int part = 0; part < kParts; part++)
      keep_sums(sum[part], live, squares[part * kWarps + (threadIdx.x >> 5)]);
    __syncthreads();
  }
  // Where the row of this lane's sums begins; rows that do not exist: the first.
  static __device__ __forceinline__ int of_lane(int live) { return lane_row(live) * kPitch; }
  // What sums of row r are still to be multiplied by.
  __device__ __forceinline__ float factor(int r, float eps) const {
    if (!normed) return 1.f;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kParts * kWarps; w++) total += squares[w][r];
    return rsqrtf(total / kColumns + eps);
  }
};

} // namespace eagle3
