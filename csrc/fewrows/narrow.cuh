// Projection of rows of few columns, y = x W^T + bias + residual of one group of rows: a block has both of its tiles of weight rows
// in registers, on their way before the wait. Sums of a row are those of `project`, to the bit.
#pragma once

#include "projection.cuh"

namespace eagle3 {

constexpr int kNarrowTiles = 2; // of a block: 32 outputs

template <int kThreads, int kPieces>
__global__ void __launch_bounds__(kThreads, 2) project_narrow(Projection p) {
  static_assert(kNarrowTiles * 128 == kThreads, "an output of one row a thread");
  using Rows = Operand<kThreads, kPieces, 1>;
  __shared__ float red[kNarrowTiles][4 * kThreads];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int first = share_begin(p.outputs, blockIdx.x), outputs = share_begin(p.outputs, blockIdx.x + 1) - first;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8;
  auto weight = [&](int out) { return p.weight + static_cast<size_t>(first + min(out, outputs - 1)) * p.columns + column; };
  Tile<kPieces> tiles[kNarrowTiles];
#pragma unroll
  for (int tile = 0; tile < kNarrowTiles; tile++) tiles[tile].fetch(weight(tile * kOutputs + g), weight(tile * kOutputs + g + 8));
  // thread (own tile, component, lane), as in sum_partials
  const int own = warp >> 2, out = own * kOutputs + (warp & 2 ? 8 : 0) + g, row = blockIdx.y * kRows + 2 * (lane & 3) + (warp & 1);
  const bool live = out < outputs && row < p.rows;
  const size_t to = static_cast<size_t>(row) * p.outputs + first + out;
  Rows b(nullptr);
  wait_for_predecessor();
  launch_dependents();
  const int own_row = blockIdx.y * kRows + ((threadIdx.x & 31) >> 2);
  b.load(p.x + static_cast<size_t>(own_row) * p.stride + column, p.stride, own_row, p.rows);
  const float before = live && p.residual ? load_bf16(p.residual + to) : 0.f, bias = live && p.bias ? load_bf16(p.bias + first + out) : 0.f;
#pragma unroll
  for (int tile = 0; tile < kNarrowTiles; tile++) {
    float4 c[1];
    multiply(tiles[tile], b, c, [](int, int) {});
    store_partial<kThreads>(red[tile], c[0]);
  }
  __syncthreads();
  if (live) p.y[to] = __float2bfloat16(sum_partials<kThreads>(red[own], warp & 3, lane) + bias + before);
}

// Blocks that suffice for so many outputs; 0: they are too many, or so few that a tile a block does.
inline int narrow_blocks(int outputs, int multiprocessors) {
  const int places = 2 * multiprocessors, blocks = (outputs + kNarrowTiles * kOutputs - 1) / (kNarrowTiles * kOutputs);
  return outputs > places * kOutputs && blocks <= places ? blocks : 0;
}

} // namespace eagle3
