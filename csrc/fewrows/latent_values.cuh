// The second kernel of latent attention: partials of a query merged, and the values of each head out of the merged latents.
#pragma once

#include "latent_attend.cuh"

namespace eagle3 {

// Two floats at L2, without a branch; where it is not live, v stays as it is.
__device__ __forceinline__ void load_pair_if(float2 &v, const float *p, bool live) {
  asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %3, 0;\n@live ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];}"
               : "+f"(v.x), "+f"(v.y)
               : "l"(p), "r"(static_cast<int>(live))
               : "memory");
}

// Rows of a block of values: few, so that a warp merges its columns of all at once, unless there are many.
__host__ __device__ inline int value_rows(int rows) { return rows <= 2 * kRows ? kPair : kRows; }

// Block (x, y): values x mod 4 * 32 … of head x / 4 for rows y: partials merged, then the head's matrix.
__global__ void __launch_bounds__(256, 1) latent_values(LatentAttention p) {
  constexpr int kBlock = 32, kPitch = kLatent + 8;
  constexpr int kBatch = 18; // partials in flight: those of 576 positions
  __shared__ __align__(16) bf16 latents[kRows * kPitch];
  __shared__ float red[4 * 256];
  __shared__ float shares[8][kLatentLanes]; // of a warp's row
  launch_dependents(); // the output projection asks for its weights as early as there is room
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.x / (kHeadValues / kBlock), first = blockIdx.x % (kHeadValues / kBlock) * kBlock;
  const int per = value_rows(p.rows), first_row = blockIdx.y * per, live = min(per, p.rows - first_row), tile = warp % 2, slice = warp / 2;
  uint4 w[4][2];
  const bf16 *matrix = p.v_up + static_cast<size_t>(head) * p.up_stride + (first + tile * 16 + g) * kLatent + slice * 128 + t * 8;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) w[i][h] = load_weights(matrix + h * 8 * kLatent + i * kPiece);
  // A warp merges 64 columns of two rows at a time: a row's partials are as many as its position says, which is older than the
  // kernels before. Shares of the sum lie in shared memory: the code is short, since it is cold and all wait for it.
  struct {
    int count;
    const float *from, *stats;
  } of[kPair];
  auto aim = [&](int first) {
#pragma unroll
    for (int r = 0; r < kPair; r++) {
      const int row = first_row + min(first + r, live - 1), prefix = static_cast<int>(load_long(p.prefix + row / p.t));
      const int last = p.tree ? prefix + __popcll(static_cast<uint64_t>(load_long(p.tree + row))) - 1 : prefix + row % p.t;
      const size_t at = (static_cast<size_t>(row) * p.heads + head) * p.lanes;
      of[r] = {min(p.lanes, last / kLatentTile + 1), p.totals + at * kLatent + warp * 64 + lane * 2, p.stats + (at + lane) * 2};
    }
  };
  aim(0);
  wait_for_predecessor();
#pragma unroll 1
  for (int first_of = 0;; aim(first_of)) {
    float2 v[kPair][kBatch] = {}, stats[kPair][2];
#pragma unroll
    for (int r = 0; r < kPair; r++) {
      if (first_of + r >= live) continue;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        stats[r][j] = make_float2(-INFINITY, 0.f);
        load_pair_if(stats[r][j], of[r].stats + j * 64, j * 32 + lane < of[r].count);
      }
#pragma unroll
      for (int c = 0; c < kBatch; c++) load_pair_if(v[r][c], of[r].from + c * kLatent, c < of[r].count);
    }
#pragma unroll
    for (int r = 0; r < kPair; r++) {
      if (first_of + r >= live) continue;
      float high = warp_max(fmaxf(stats[r][0].x, stats[r][1].x));
      high = high == -INFINITY ? 0.f : high;
      const float share[2] = {exp2f(stats[r][0].x - high), exp2f(stats[r][1].x - high)};
      const float sum = warp_sum(stats[r][0].y * share[0] + stats[r][1].y * share[1]);
#pragma unroll
      for (int j = 0; j < 2; j++) shares[warp][j * 32 + lane] = share[j];
      __syncwarp();
      float2 total = make_float2(0.f, 0.f);
      auto take = [&](int c0, int c) { // and the one that follows in its place
        const float s = shares[warp][c0 + c];
        total.x = fmaf(s, v[r][c].x, total.x), total.y = fmaf(s, v[r][c].y, total.y);
        load_pair_if(v[r][c], of[r].from + (c0 + c + kBatch) * kLatent, c0 + c + kBatch < of[r].count);
      };
#pragma unroll
      for (int c = 0; c < kBatch; c++) take(0, c); // past the last are zeros
#pragma unroll 1
      for (int c0 = kBatch; c0 < of[r].count; c0 += kBatch)
#pragma unroll
        for (int c = 0; c < kBatch; c++) {
          if (c0 + c >= of[r].count) break;
          take(c0, c);
        }
      __syncwarp();
      *reinterpret_cast<uint32_t *>(latents + (first_of + r) * kPitch + warp * 64 + lane * 2) = pack(total.x / sum, total.y / sum);
    }
    if ((first_of += kPair) >= live) break;
  }
  __syncthreads();
  float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < 4; i++) // rows that do not exist meet what was there: nobody reads their sums
    mma_piece(c, w[i][0], w[i][1], *reinterpret_cast<const uint4 *>(latents + g * kPitch + slice * 128 + i * kPiece + t * 8));
  store_partial<256>(red, c);
  __syncthreads();
  const int which = warp & 3, own = warp >> 2, row = 2 * t + (which & 1); // a sum: component `which` of lane of tile `own`
  if (row >= live) return;
  float total = red[which * 256 + own * 32 + lane];
#pragma unroll
  for (int s = 1; s < 4; s++) total += red[which * 256 + (s * 2 + own) * 32 + lane];
  const int value = first + own * 16 + g + (which & 2 ? 8 : 0);
  p.y[(static_cast<size_t>(first_row + row) * p.heads + head) * kHeadValues + value] = __float2bfloat16(total);
}

} // namespace eagle3
