// Projection of one group of rows that fills few multiprocessors to the brim: all of a block's weights are on their way before its
// wait, more of them than in project.cuh because rows of x lie in shared memory and sums take the place of weight rows there. What
// it leaves free is for the kernels before and after it, whose blocks run beside it. The sums of project.cuh, to the bit.
#pragma once

#include "projection.cuh"

namespace eagle3 {

// What a block holds: half tiles of 8 weight rows, kHalves of them in registers (96 of a thread's 128).
template <int kThreads, int kPieces, bool kNorm>
struct FilledBlock {
  static constexpr int kHalves = 24 / kPieces, kShared = kPieces == 6 ? 16 : 11, kMost = 8 * kHalves + kShared, kTiles = (kMost + 15) / 16;
  static constexpr int kColumns = kThreads * kPieces, kChunks = kColumns / 8;
  using Held = HeldRows<kThreads, kPieces, kShared>;
  using Tiles = HalfTiles<kHalves, kPieces, true, Held>;
  static constexpr int kPitch = Held::kPitch; // of rows of x too
  static constexpr int kLines = kPieces / 2;  // a warp's slice of a held row has room for a float a lane, so often
  static_assert(kTiles * 128 <= kThreads && 4 * kTiles <= kShared * kLines, "an output of one row a thread; sums fit where weights were");
  // in shared memory: weight rows, a norm's gains, rows of x
  static constexpr int kGains = Held::kBytes / sizeof(uint4), kOperand = kGains + (kNorm ? kPitch : 0);
  static size_t bytes(int rows) { return (kOperand + static_cast<size_t>(rows < kRows ? rows : kRows) * kPitch) * sizeof(uint4); }

  // Where component `which` of a tile's sums lies for lane 0 of warp 0, and how far apart those of two warps.
  static __device__ __forceinline__ float *sums(uint4 *memory, int tile, int which) {
    const int line = tile * 4 + which;
    return reinterpret_cast<float *>(memory + line / kLines * kPitch) + line % kLines * 32;
  }
  static constexpr int kApart = kPieces * 16;
};

// Asks for `live` rows of x, `stride` apart, a chunk of each a thread.
template <class Block, int kThreads>
__device__ __forceinline__ void ask_rows(uint4 *rows, const bf16 *x, size_t stride, int live) {
  const int chunk = threadIdx.x;
  x += chunk * 8;
#pragma unroll 1
  for (int r = 0; r < live; r++, x += stride) // short code: most often few rows, and nothing of it has run before
    if (Block::kChunks == kThreads || chunk < Block::kChunks) copy_async(rows + r * Block::kPitch + chunk, x, true);
  commit_copies();
}
// The rows when a thread's own chunks have come, times a norm's gains where there is one, whose chunk has come with them: then squares
// take each warp's sums. All threads of the block call it; a warp's slice, or with a norm all of the rows, is there behind it.
template <class Block, int kThreads, bool kNorm>
__device__ __forceinline__ void stage_rows(uint4 *rows, int live, const uint4 *gains, float (*squares)[kRows]) {
  if constexpr (kNorm) {
    const int lane = threadIdx.x & 31, chunk = threadIdx.x;
    const bool own = Block::kChunks == kThreads || chunk < Block::kChunks;
    float sum[kRows];
    const uint4 gain = own ? gains[chunk] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      sum[r] = 0.f;
      if (own && r < live) rows[r * Block::kPitch + chunk] = gained(rows[r * Block::kPitch + chunk], gain, sum[r]);
    }
    const float total = sum_of_rows(sum);
    if ((lane & 3) == 0) squares[threadIdx.x >> 5][lane >> 2] = total;
    __syncthreads();
  } else {
    static_assert(Block::kChunks == kThreads || kNorm, "a warp copies its own slice");
    __syncwarp();
  }
}

template <int kThreads, int kPieces, bool kNorm>
__global__ void __launch_bounds__(kThreads, 1) project_filled(Projection p) {
  using Block = FilledBlock<kThreads, kPieces, kNorm>;
  constexpr int kTiles = Block::kTiles, kFirst = 8 * Block::kHalves;
  if (kNorm) launch_dependents(); // attention reads nothing before its wait that the kernel before this one writes
  extern __shared__ uint4 filled_memory[];
  __shared__ float squares[kThreads / 32][kRows];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int begin = share_begin(p.outputs, blockIdx.x), outputs = share_begin(p.outputs, blockIdx.x + 1) - begin;
  const bf16 *const weight = p.weight + static_cast<size_t>(begin) * Block::kColumns + warp * kPieces * kPiece;
  uint4 *const gains = filled_memory + Block::kGains, *const rows = filled_memory + Block::kOperand;
  if (kNorm && threadIdx.x < Block::kChunks) copy_async(gains + threadIdx.x, p.gamma + threadIdx.x * 8, true);
  typename Block::Tiles own;
  constexpr int kEarly = kNorm ? Block::kHalves / 2 : Block::kHalves; // half tiles asked for before the wait
  if constexpr (kNorm)
    own.template fetch<0, kEarly>(weight + (lane & 3) * 8, outputs, Block::kColumns);
  else
    own.template fetch_paced<4>(weight + (lane & 3) * 8, outputs, Block::kColumns); // beside attention, which is not to wait behind them
  __syncwarp();
  // thread (tile, component, lane), as in sum_partials; what is added comes with the rows
  const int out = 16 * (warp >> 2) + (warp & 2 ? 8 : 0) + g, own_row = 2 * (lane & 3) + (warp & 1);
  const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
  const size_t to = static_cast<size_t>(blockIdx.y * kRows + own_row) * p.outputs + begin + out;
  const bool writes = out < outputs && own_row < live;
  float before = 0.f, bias = 0.f;
  auto ask = [&] {
    wait_for_predecessor();
    if (!kNorm) launch_dependents();
    if (writes && p.residual) before = load_bf16(p.residual + to);
    if (writes && p.bias) bias = load_bf16(p.bias + begin + out);
    ask_rows<Block, kThreads>(rows, p.x + static_cast<size_t>(blockIdx.y) * kRows * p.stride, p.stride, live);
  };
  if (kNorm) ask(); // these blocks begin where others end: an early wait costs them nothing, and rows come before what is asked for behind them
  own.template fetch<kEarly, Block::kHalves>(weight + (lane & 3) * 8, outputs, Block::kColumns);
  __syncwarp(); // or ptxas has the last of them behind what is done with the rows
  const typename Block::Held held(filled_memory, weight + static_cast<size_t>(kFirst) * Block::kColumns, outputs - kFirst, Block::kColumns);
  if (!kNorm) ask(); // these begin beside attention: all of their weights come meanwhile
  wait_copies<kNorm ? 1 : 0>();
  stage_rows<Block, kThreads, kNorm>(rows, live, gains, squares);
  const uint4 *const x = rows + (g < live ? g : 0) * Block::kPitch + warp * kPieces * 4 + (lane & 3); // or nobody reads its sums
  float4 sums[kTiles];
#pragma unroll
  for (int first = 0; first < kTiles; first += 2) { // for more at a time there are no registers
    if (2 * first <= Block::kHalves && Block::kHalves < 2 * first + 4) held.await();
    float4 c[2], odd[2];
    c[0] = c[1] = odd[0] = odd[1] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const uint4 v = x[i * 4];
#pragma unroll
      for (int tile = first; tile < first + 2 && tile < kTiles; tile++) {
        const uint4 top = own.get(held, 2 * tile, i), bottom = own.get(held, 2 * tile + 1, i);
        mma(c[tile - first], top.x, bottom.x, top.y, bottom.y, v.x, v.y);
        mma(odd[tile - first], top.z, bottom.z, top.w, bottom.w, v.z, v.w);
      }
    }
#pragma unroll
    for (int tile = first; tile < first + 2 && tile < kTiles; tile++) sums[tile] = add(c[tile - first], odd[tile - first]);
  }
  __syncwarp(); // the warp's slices are read
  const int place = warp * Block::kApart + lane;
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
    const float own[4] = {sums[tile].x, sums[tile].y, sums[tile].z, sums[tile].w};
#pragma unroll
    for (int which = 0; which < 4; which++) Block::sums(filled_memory, tile, which)[place] = own[which];
  }
  __syncthreads();
  if (!writes) return;
  const float *const from = Block::sums(filled_memory, warp >> 2, warp & 3) + lane;
  float total = from[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; w++) total += from[w * Block::kApart];
  const float factor = kNorm ? Operand<kThreads, kPieces, 1, true>::factor(squares, own_row, true, p.eps) : 1.f;
  p.y[to] = __float2bfloat16(factor * total + bias + before);
}

// Blocks: five eighths of the multiprocessors where they suffice, so that attention's (6 of each of 8 groups of heads) run beside them.
// 0: too many outputs, or so few that other kernels hold them all.
inline int filled_blocks(int outputs, int multiprocessors, int most, int held) {
  const int least = (outputs + most - 1) / most;
  return least > multiprocessors || outputs <= held ? 0 : std::max(least, multiprocessors * 5 / 8);
}

} // namespace eagle3
