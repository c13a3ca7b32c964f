// Projection of few rows: y = norm(x) W^T + bias + residual, or the gated pair act(gate) * up of it. Every block streams a
// contiguous range of weight rows, in tiles of 16, through its registers, once for up to two groups of rows.
#pragma once

#include "filled.cuh"
#include "narrow.cuh"
#include "projection.cuh"
#include "staged.cuh"
#include "whole.cuh"

namespace eagle3 {

// Pieces of a warp's slice that are in registers at a time; slices above 8 pieces are an even number of them.
__host__ __device__ constexpr int depth_of(int pieces) {
  if (pieces <= 8) return pieces;
  for (int depth = 8; depth > 3; depth--)
    if (pieces % depth == 0) return depth;
  return 2;
}
// Blocks of a multiprocessor: together they fill its registers.
__host__ __device__ constexpr int resident(int threads) { return threads <= 256 ? 2 : 1; }

constexpr int kHeldRows = 6;

// kPieces a warp, all of B at hand. kHeld: a single tile and perhaps some weight rows in shared memory, where no rows of x are.
template <int kThreads, int kPieces, int kGroups, bool kNorm, bool kGated, bool kHeld>
__global__ void __launch_bounds__(kThreads, resident(kThreads)) project(Projection p) {
  static_assert(kPieces <= 8, "a thread asks for one piece of the gains");
  using Held = HeldRows<kThreads, kPieces, kHeld ? kHeldRows : 0>;
  using Written = Output<kThreads, kGroups, kGated, kHeld>;
  extern __shared__ uint4 operand_memory[];
  __shared__ float red[kHeld ? 1 : 2][kGroups][Written::kPartials];
  using Rows = Operand<kThreads, kPieces, kGroups, kNorm, aside(kPieces, kGroups)>;
  __shared__ float squares[kGroups][kThreads / 32][kRows];
  __shared__ float factors[kGroups * kRows];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
  const int column = warp * kPieces * kPiece + (lane & 3) * 8;
  const TileRows<kGated> rows(p.outputs, kHeld ? kHeldRows : 0);
  const bf16 *const weight = p.weight + column;
  const bf16 *top, *bottom;
  rows.aim(0, g, weight, p.outputs, p.columns, top, bottom);
  // asked for first: what is asked for behind a tile of weights comes behind it
  const auto gain = kNorm ? Rows::gain(p.gamma) : typename Rows::Gains{};
  Tile<kPieces> tile;
  if constexpr (kHeld)
    tile.template fetch_paced<2>(top, bottom); // beside attention, which is not to wait behind them
  else
    tile.fetch(top, bottom);
  Held held(operand_memory, p.weight + static_cast<size_t>(rows.last) * p.columns + warp * kPieces * kPiece, rows.held, p.columns);
  Rows b(operand_memory);
  Written output;
  const int own_row = blockIdx.y * kGroups * kRows + g;
  const bf16 *x = p.x + static_cast<size_t>(own_row) * p.stride + column;
  if (!kNorm) asm volatile("" : "+l"(x)); // an address before the wait
  wait_for_predecessor();
  launch_dependents();
  if constexpr (kNorm) {
    b.stage(p.x, p.stride, blockIdx.y * kGroups * kRows, p.rows, gain, squares);
    if (threadIdx.x < kGroups * kRows) // read after the first tile's barrier
      factors[threadIdx.x] = Rows::factor(squares[threadIdx.x / kRows], threadIdx.x % kRows, true, p.eps);
  } else {
    b.load(x, p.stride, own_row, p.rows);
  }
  const int tiles = kHeld ? 1 : rows.tiles();
  if (kHeld) {
    output.fetch(p, rows, 0);
    __syncwarp(); // or ptxas asks for it when the rows have come
  }
  float4 even = make_float4(0.f, 0.f, 0.f, 0.f), odd = even; // of held rows
  if (kHeld) held.await();
#pragma unroll 1
  for (int at = 0; at < tiles; at++) {
    if (!kHeld) output.fetch(p, rows, at);
    rows.aim(min(at + 1, tiles - 1), g, weight, p.outputs, p.columns, top, bottom);
    float4 c[kGroups];
    multiply(tile, b, c, [&](int, int i) {
      if (at + 1 < tiles) tile.fetch(i, top, bottom);
      if (!kHeld) return;
      const uint4 v = held.get(0, i), x = b.get(0, i);
      mma(even, v.x, 0u, v.y, 0u, x.x, x.y);
      mma(odd, v.z, 0u, v.w, 0u, x.z, x.w);
    });
#pragma unroll
    for (int group = 0; group < kGroups; group++) store_partial<kThreads>(red[at & 1][group], c[group]);
    if (kHeld) red[0][0][4 * kThreads + threadIdx.x] = even.x + odd.x, red[0][0][5 * kThreads + threadIdx.x] = even.y + odd.y;
    __syncthreads();
    output.store(p, rows, at, red[at & 1], [&](int row) { return kNorm ? factors[row] : 1.f; });
  }
}

// Long rows (columns a multiple of 512), kDepth pieces of a warp's slice at a time: the activations pass through registers
// beside the weights, and take a norm's gains on their way. Weights are fetched before the wait, activations after it.
template <int kDepth, bool kNorm, bool kGated>
__global__ void __launch_bounds__(256, 2) project_long(Projection p) {
  extern __shared__ uint4 gains[]; // [columns], where there is a norm
  __shared__ float red[2][1][4 * 256];
  __shared__ float squares[8][kRows];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, pieces = p.columns / 256, parts = pieces / kDepth;
  const int column = warp * pieces * kPiece + (lane & 3) * 8;
  const TileRows<kGated> rows(p.outputs);
  const bool live = static_cast<int>(blockIdx.y) * kRows + g < p.rows;
  const int tiles = rows.tiles();
  // where the next part of weights and of the row lies: of this tile, or the first of the next one
  const bf16 *top, *bottom, *x;
  auto aim = [&](int tile) {
    const int thread = fresh_thread(), group = thread >> 2 & 7, column = (thread >> 5) * pieces * kPiece + (thread & 3) * 8;
    rows.aim(tile, group, p.weight + column, p.outputs, p.columns, top, bottom);
    x = p.x + static_cast<size_t>(live ? blockIdx.y * kRows + group : 0) * p.stride + column;
  };
  auto advance = [&](int part, int tile) { // past `part` of `tile`
    if (part + 1 == parts)
      aim(min(tile + 1, tiles - 1));
    else
      top += kDepth * kPiece, bottom += kDepth * kPiece, x += kDepth * kPiece;
  };
  aim(0);
  Tile<kDepth> tile;
  uint4 b[kDepth];
  tile.fetch(top, bottom);
  if (kNorm) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.columns / 8; i += 256) gains[i] = load_weights(p.gamma + i * 8);
    __syncthreads();
  }
  Output<256, 1, kGated> output;
  float scale = 1.f;
  wait_for_predecessor();
  launch_dependents();
  load_group(b, x, live);
  advance(0, 0);
#pragma unroll 1
  for (int at = 0; at < tiles; at++) {
    output.fetch(p, rows, at, fresh_thread());
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c;
    float sum = 0.f;
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
      const bool last = part + 1 == parts, more = !last || at + 1 < tiles;
#pragma unroll
      for (int i = 0; i < kDepth; i++) {
        const uint4 v = kNorm ? gained(b[i], gains[column / 8 + (part * kDepth + i) * (kPiece / 8)], sum) : b[i];
        mma(c, tile.top[i].x, tile.bottom[i].x, tile.top[i].y, tile.bottom[i].y, v.x, v.y);
        mma(odd, tile.top[i].z, tile.bottom[i].z, tile.top[i].w, tile.bottom[i].w, v.z, v.w);
        if (more) {
          tile.fetch(i, top, bottom);
          b[i] = live ? load_rows(x + i * kPiece) : make_uint4(0, 0, 0, 0);
        }
      }
      advance(last ? 0 : part + 1, last ? at + 1 : at);
    }
    store_partial<256>(red[at & 1][0], add(c, odd));
    if (kNorm && at == 0) {
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      if ((lane & 3) == 0) squares[warp][g] = sum;
    }
    __syncthreads();
    if (kNorm && at == 0) { // of the row whose sums this thread adds
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < 8; w++) total += squares[w][2 * (lane & 3) + (warp & 1)];
      scale = rsqrtf(total / p.columns + p.eps);
    }
    output.store(p, rows, at, red[at & 1], [&](int) { return scale; }, fresh_thread());
  }
}

// Rows of 512 * kPieces columns, staged: few warps' work is left between the wait and the sums. Gated: gates and ups in turn.
template <int kPieces, bool kGated>
__global__ void __launch_bounds__(512, 1) project_staged(Projection p) {
  extern __shared__ uint4 staged_memory[];
  __shared__ TileSums<16> red[2];
  __shared__ float squares[16][kRows];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int first = share_begin(p.outputs, blockIdx.x), count = (share_begin(p.outputs, blockIdx.x + 1) - first) * (kGated ? 2 : 1);
  const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows), tiles = (count + 7) / 8;
  auto aim = [&](int tile) -> const bf16 * {
    const int i = tile * 8 + g, row = first + (kGated ? i / 2 + (i & 1) * p.outputs : i);
    return i < count ? p.weight + static_cast<size_t>(row) * p.columns + warp * kPieces * kPiece + t * 8 : nullptr;
  };
  HalfTile<kPieces> weights;
  weights.begin(aim(0));
  StagedRows<512, kPieces> rows(staged_memory, squares, p.gamma);
  wait_for_predecessor();
  launch_dependents();
  rows.stage(p.x + static_cast<size_t>(blockIdx.y) * kRows * p.stride, p.stride, live);
  const int a = threadIdx.x >> 3, n = threadIdx.x & 7; // of the sums that this thread adds
  const float scale = threadIdx.x < 64 ? rows.factor(n, p.columns, p.eps) : 1.f;
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    const int i = tile * 8 + a, out = first + (kGated ? i / 2 : i);
    const bool own = threadIdx.x < 64 && n < live && i < count && !(kGated && (i & 1));
    const size_t to = static_cast<size_t>(blockIdx.y * kRows + n) * p.outputs + out;
    float before = 0.f; // what is added: on its way while the tile is multiplied
    if (!kGated && own) before = (p.residual ? load_bf16(p.residual + to) : 0.f);
    TileSums<16> &sums = red[tile & 1];
    sums.put(weights.multiply(rows.operand(live), tile + 1 < tiles, aim(tile + 1)));
    __syncthreads();
    if (!own) continue;
    float y = scale * sums.sum(threadIdx.x);
    if (kGated) y = silu(y) * scale * sums.sum(threadIdx.x + 8);
    if (!kGated && p.bias) y += __bfloat162float(p.bias[out]);
    p.y[to] = __float2bfloat16(y + before);
  }
}

// Number of blocks that divides `outputs` rows best over `blocks` places: whole tiles where they all fit at once.
inline int grid_of(int outputs, int blocks, int step) {
  const int tiles = (outputs + step - 1) / step;
  return tiles < blocks ? tiles : blocks;
}

template <int kThreads, int kPieces, int kGroups, bool kGated>
inline cudaError_t launch_groups(const Projection &p, int multiprocessors, cudaStream_t stream) {
  // a normed projection comes before attention, whose blocks begin beside it where it leaves them half of the registers
  const int places = p.gamma && !kGated && kGroups == 1 ? 1 : resident(kThreads);
  const dim3 grid(grid_of(p.outputs, multiprocessors * places, kGated ? 8 : 16), (p.rows + kRows * kGroups - 1) / (kRows * kGroups));
  const size_t staged = Operand<kThreads, kPieces, kGroups, true, aside(kPieces, kGroups)>::bytes(p.rows);
  const size_t plain = Operand<kThreads, kPieces, kGroups, false, aside(kPieces, kGroups)>::kBytes;
  if constexpr (kThreads == 256 && kPieces == 8 && kGroups == 1 && !kGated) {
    using Whole = WholeBlock<kThreads, kPieces>;
    const WholeGrid whole = p.gamma ? whole_grid(p.outputs, multiprocessors, Whole::kMost) : WholeGrid{};
    const size_t shared = staged + Whole::Held::kBytes;
    if (whole.blocks) return launch(project_whole<kThreads, kPieces>, dim3(whole.blocks, grid.y), kThreads, shared, stream, whole.cluster, p);
  }
  if constexpr (kThreads == 256 && kPieces == 4 && kGroups == 1 && !kGated) {
    const int blocks = p.gamma ? 0 : narrow_blocks(p.outputs, multiprocessors);
    if (blocks) return launch(project_narrow<kThreads, kPieces>, dim3(blocks, grid.y), kThreads, 0, stream, 1, p);
  }
  if constexpr (kGroups == 1 && !kGated && ((kThreads == 480 && kPieces == 6) || (kThreads == 512 && kPieces == 8))) {
    constexpr bool kNorm = kThreads == 480; // before attention or after it
    using Filled = FilledBlock<kThreads, kPieces, kNorm>;
    const int held = kNorm ? 16 * multiprocessors : (16 + kHeldRows) * (multiprocessors - 32);
    const int blocks = kNorm == (p.gamma != nullptr) ? filled_blocks(p.outputs, multiprocessors, Filled::kMost, held) : 0;
    const size_t shared = Filled::bytes(p.rows);
    if (blocks && shared <= kCarved) return launch(project_filled<kThreads, kPieces, kNorm>, dim3(blocks, grid.y), kThreads, shared, stream, 1, p);
  }
  if constexpr (kThreads == 512 && kPieces == 8 && kGroups == 1 && !kGated) {
    using Held = HeldRows<kThreads, kPieces, kHeldRows>;
    const int blocks = p.gamma ? 0 : blocks_of(p.outputs, multiprocessors, 16 + kHeldRows);
    if (blocks) return launch(project<kThreads, kPieces, 1, false, false, true>, dim3(blocks, grid.y), kThreads, Held::kBytes, stream, 1, p);
  }
  if (p.gamma) return launch(project<kThreads, kPieces, kGroups, true, kGated, false>, grid, kThreads, staged, stream, 1, p);
  return launch(project<kThreads, kPieces, kGroups, false, kGated, false>, grid, kThreads, plain, stream, 1, p);
}

template <int kThreads, int kPieces, bool kGated>
inline cudaError_t launch_project(const Projection &p, int multiprocessors, cudaStream_t stream) {
  return p.rows <= kRows ? launch_groups<kThreads, kPieces, 1, kGated>(p, multiprocessors, stream)
                         : launch_groups<kThreads, kPieces, 2, kGated>(p, multiprocessors, stream);
}

template <int kDepth, bool kGated>
inline cudaError_t launch_long(const Projection &p, int multiprocessors, cudaStream_t stream) {
  const dim3 grid(grid_of(p.outputs, multiprocessors * 2, kGated ? 8 : 16), (p.rows + kRows - 1) / kRows);
  if (p.gamma) return launch(project_long<kDepth, true, kGated>, grid, 256, static_cast<size_t>(p.columns) * 2, stream, 1, p);
  return launch(project_long<kDepth, false, kGated>, grid, 256, 0, stream, 1, p);
}

template <int kPieces, bool kGated>
inline cudaError_t launch_staged(const Projection &p, int multiprocessors, cudaStream_t stream) {
  const dim3 grid(p.outputs < multiprocessors ? p.outputs : multiprocessors, (p.rows + kRows - 1) / kRows);
  return launch(project_staged<kPieces, kGated>, grid, 512, StagedRows<512, kPieces>::bytes(p.rows), stream, 1, p);
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
  case 1536: return launch_project<384, 4, kGated>(p, blocks, stream);
  case 2048: return launch_project<256, 8, kGated>(p, blocks, stream);
  case 2304: return launch_project<288, 8, kGated>(p, blocks, stream);
  case 2880: return launch_project<480, 6, kGated>(p, blocks, stream);
  case 4096: return launch_project<512, 8, kGated>(p, blocks, stream);
  case 5120: return launch_staged<10, kGated>(p, blocks, stream);
  case 7168: return launch_staged<14, kGated>(p, blocks, stream);
  default: break;
  }
  if (p.columns % 512) return cudaErrorInvalidValue;
  switch (depth_of(p.columns / 256)) {
  case 8: return launch_long<8, kGated>(p, blocks, stream);
  case 7: return launch_long<7, kGated>(p, blocks, stream);
  case 6: return launch_long<6, kGated>(p, blocks, stream);
  case 5: return launch_long<5, kGated>(p, blocks, stream);
  case 4: return launch_long<4, kGated>(p, blocks, stream);
  default: return launch_long<2, kGated>(p, blocks, stream);
  }
}

} // namespace eagle3
