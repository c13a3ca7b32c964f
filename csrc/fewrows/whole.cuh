// A normed projection of one group of rows, all of whose weights are on their way at once: into registers since before its wait, into
// shared memory behind its rows. Its few blocks take a multiprocessor each and leave the others to attention, which follows it: in
// clusters of 8, only so that what they leave lies together, as attention's clusters need it. The sums of project.cuh, to the bit.
#pragma once

#include "projection.cuh"

namespace eagle3 {

// What a block holds: half tiles of 8 weight rows, kHalves of them in registers.
template <int kThreads, int kPieces>
struct WholeBlock {
  static constexpr int kHalves = 5, kShared = 20, kMost = 8 * kHalves + kShared, kTiles = (kMost + 15) / 16;
  using Held = HeldRows<kThreads, kPieces, kShared>;
  using Tiles = HalfTiles<kHalves, kPieces, false, Held>;
};

template <int kThreads, int kPieces>
__global__ void __launch_bounds__(kThreads, 1) project_whole(Projection p) {
  using Whole = WholeBlock<kThreads, kPieces>;
  using Rows = Operand<kThreads, kPieces, 1, true>;
  constexpr int kTiles = Whole::kTiles, kTurns = kTiles * 128 / kThreads;
  static_assert(kTiles * 128 % kThreads == 0, "an output of one row a thread and turn");
  // Attention's blocks find room beside these, and what they read before their wait is older than the kernel before this one.
  launch_dependents();
  extern __shared__ uint4 whole_memory[]; // weight rows, then rows of x
  __shared__ float red[kTiles][4 * kThreads];
  __shared__ float squares[1][kThreads / 32][kRows];
  __shared__ float factors[kRows];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = warp * kPieces * kPiece;
  const int begin = share_begin(p.outputs, blockIdx.x), outputs = share_begin(p.outputs, blockIdx.x + 1) - begin;
  const bf16 *const weight = p.weight + static_cast<size_t>(begin) * p.columns + column;
  static_assert(Rows::kChunks == kThreads, "a chunk of the gains a thread");
  const uint4 gain = load_weights(p.gamma + threadIdx.x * 8); // asked for first: what is asked for behind weights comes behind them
  __syncwarp(); // or ptxas has it last
  typename Whole::Tiles own;
  constexpr int kFirst = 8 * Whole::kHalves, kRegisters = Whole::kHalves / 2; // held weight rows begin; tiles all in registers
  const int first_row = blockIdx.y * kRows;
  own.template fetch<0, Whole::kHalves>(weight + (lane & 3) * 8, outputs, p.columns);
  Rows b(whole_memory + Whole::Held::kBytes / 16);
  // thread (tile, component, lane) of a turn, as in sum_partials
  auto out_of = [&](int turn) { return 16 * ((warp + turn * kThreads / 32) >> 2) + (warp & 2 ? 8 : 0) + (lane >> 2); };
  const int own_row = 2 * (lane & 3) + (warp & 1), row = first_row + own_row;
  wait_for_predecessor();
  typename Rows::Asked asked;
  Rows::ask(asked, p.x, p.stride, first_row, p.rows);
  float before[kTurns], bias[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int out = out_of(turn), live = out < outputs && row < p.rows;
    before[turn] = live && p.residual ? load_bf16(p.residual + static_cast<size_t>(row) * p.outputs + begin + out) : 0.f;
    bias[turn] = live && p.bias ? load_bf16(p.bias + begin + out) : 0.f;
  }
  __syncwarp(); // L1 answers in order: rows come behind the weights in registers, but not behind these
  const typename Whole::Held held(whole_memory, weight + static_cast<size_t>(kFirst) * p.columns, outputs - kFirst, p.columns);
  b.keep(asked, first_row, p.rows, gain, squares[0]);
  if (threadIdx.x < kRows) factors[threadIdx.x] = Rows::factor(squares[0], threadIdx.x, true, p.eps); // read after the next barrier
  float4 c[kTiles], odd[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) c[tile] = odd[tile] = make_float4(0.f, 0.f, 0.f, 0.f);
  uint4 x[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; i++) x[i] = b.get(0, i);
  auto multiply_tiles = [&](int from, int to) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const uint4 v = x[i];
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) {
        if (tile < from || tile >= to) continue;
        const uint4 top = own.get(held, 2 * tile, i), bottom = own.get(held, 2 * tile + 1, i);
        mma(c[tile], top.x, bottom.x, top.y, bottom.y, v.x, v.y);
        mma(odd[tile], top.z, bottom.z, top.w, bottom.w, v.z, v.w);
      }
    }
  };
  multiply_tiles(0, kRegisters);
  held.await();
  multiply_tiles(kRegisters, kTiles);
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) store_partial<kThreads>(red[tile], add(c[tile], odd[tile]));
  __syncthreads();
  const float factor = factors[own_row];
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int out = out_of(turn);
    if (out >= outputs || row >= p.rows) continue;
    const float y = factor * sum_partials<kThreads>(red[(warp + turn * kThreads / 32) >> 2], warp & 3, lane) + bias[turn] + before[turn];
    p.y[static_cast<size_t>(row) * p.outputs + begin + out] = __float2bfloat16(y);
  }
}

// How it is launched: in clusters on two thirds of the multiprocessors, 11 of the 15 clusters that an H200 takes at once, so that 4
// are left to attention's groups of heads. Where those are too few, in more blocks and without clusters; 0: too many outputs.
struct WholeGrid {
  int blocks, cluster;
};
inline WholeGrid whole_grid(int outputs, int multiprocessors, int most) {
  constexpr int kCluster = 8;
  const int together = std::min((outputs + 15) / 16, multiprocessors * 2 / 3) / kCluster * kCluster;
  if (together * most >= outputs) return {together, kCluster};
  return {blocks_of(outputs, multiprocessors, most), 1};
}

} // namespace eagle3
