// The beginning of a mixture-of-experts block for every kind of router (kernels/routing.py): norm, logits, choice and weights;
// beside it, where there is a shared expert, its gate, up and activation of the same normed rows.
//
// Blocks share the experts and the shared expert's units evenly. Scores travel as packets to the block that makes the group's
// choice, a warp a row: the last one of a group that is alone (all its blocks are resident), else whichever arrives last.
#pragma once

#include "router_choice.cuh"
#include "staged.cuh"

namespace eagle3 {

// The block's share of the weight rows: its units' gates and ups in turn, then its experts.
struct Shares {
  int expert, unit, gated, count; // the first of each; rows of units, rows in all
  __device__ __forceinline__ explicit Shares(const Router &p)
      : expert(share_begin(p.experts, blockIdx.x)), unit(share_begin(p.width, blockIdx.x)),
        gated(2 * (share_begin(p.width, blockIdx.x + 1) - unit)), count(gated + share_begin(p.experts, blockIdx.x + 1) - expert) {}
  __device__ __forceinline__ const bf16 *row(const Router &p, int i) const {
    return i < gated ? p.shared + static_cast<size_t>(unit + i / 2 + (i & 1) * p.width) * p.columns
                     : p.gate + static_cast<size_t>(expert + i - gated) * p.columns;
  }
};

// Eight columns of the normed rows, from column `column` on; at: their place in all rows.
__device__ __forceinline__ void write_normed(const Router &p, size_t at, int column, float factor) {
  const uint4 v = load_rows(p.x + at), gains = load_weights(p.gamma + column);
  *reinterpret_cast<uint4 *>(p.normed + at) = normed_piece(v, factor, gains);
}

// Whether this block makes its group's choice. All threads call it, after the block's scores are on their way.
__device__ __forceinline__ bool chooses(const Router &p, bool &last) {
  if (gridDim.y == 1) return blockIdx.x == gridDim.x - 1;
  if (threadIdx.x == 0) {
    last = arrive(p.arrivals + blockIdx.y) == gridDim.x - 1;
    if (last) p.arrivals[blockIdx.y] = 0;
  }
  __syncthreads();
  return last;
}

// How a router's columns are dealt to warps, by the columns alone: the order of its sums, in every kernel that has one.
constexpr int route_threads(int columns) { return columns == 256 ? 256 : columns == 2880 ? 480 : columns == 7168 ? 448 : 512; }

// Norm, scores and the shared expert's units. A block's usual share of weight rows is less than 8.
template <int kThreads, int kPieces>
__global__ void __launch_bounds__(kThreads, 1) route(Router p) {
  using Rows = StagedRows<kThreads, kPieces>;
  constexpr int kWarps = kThreads / 32, kChunks = Rows::kChunks;
  extern __shared__ uint4 route_memory[]; // rows, then their scores
  __shared__ TileSums<kWarps> red[2];
  __shared__ float squares[kWarps][kRows];
  __shared__ float correction[kMostExperts];
  __shared__ bool last;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int live = min(kRows, p.rows - static_cast<int>(blockIdx.y) * kRows);
  const Shares shares(p);
  const int tiles = (shares.count + 7) / 8;
  auto aim = [&](int tile) { return shares.row(p, min(tile * 8 + g, shares.count - 1)) + warp * kPieces * kPiece + t * 8; };
  const int a = threadIdx.x >> 3, n = threadIdx.x & 7, row = blockIdx.y * kRows + n; // of the sums that this thread adds
  auto bias_of = [&](int i) {
    return p.bias && threadIdx.x < 64 && i >= shares.gated && i < shares.count ? __bfloat162float(p.bias[shares.expert + i - shares.gated]) : 0.f;
  };
  // asked for first: what is asked for behind the weights comes behind them
  Rows rows(route_memory, squares, p.gamma);
  float own_correction[(kMostExperts + kThreads - 1) / kThreads], bias = bias_of(a);
#pragma unroll
  for (int k = 0; k < (kMostExperts + kThreads - 1) / kThreads; k++) {
    const int e = threadIdx.x + k * kThreads;
    own_correction[k] = p.correction && e < p.experts ? p.correction[e] : 0.f;
  }
  HalfTile<kPieces> weights;
  weights.begin(aim(0));
  wait_for_predecessor();
  launch_dependents();
  const unsigned tag = load_int(reinterpret_cast<const int *>(p.launches + blockIdx.y));
  rows.stage(p.x + static_cast<size_t>(blockIdx.y) * kRows * p.columns, p.columns, live);
#pragma unroll
  for (int k = 0; k < (kMostExperts + kThreads - 1) / kThreads; k++)
    if (threadIdx.x + k * kThreads < kMostExperts) correction[threadIdx.x + k * kThreads] = own_correction[k];
  float scale = 1.f;
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    TileSums<kWarps> &sums = red[tile & 1];
    sums.put(weights.multiply(rows.operand(live), tile + 1 < tiles, aim(tile + 1)));
    __syncthreads();
    const int i = tile * 8 + a;
    if (threadIdx.x >= 64 || n >= live) continue;
    if (tile == 0) scale = rows.factor(n, p.columns, p.eps); // also where this tile has nothing for the thread
    if (i >= shares.count || (i < shares.gated && (i & 1))) continue;
    const float own = sums.sum(threadIdx.x);
    if (i < shares.gated)
      p.hidden[static_cast<size_t>(row) * p.width + shares.unit + i / 2] = unit_of(scale, own, sums.sum(threadIdx.x + 8));
    else
      store_packet(p.packets + static_cast<size_t>(row) * kMostExperts + shares.expert + i - shares.gated, score_of(p, scale, own, tile ? bias_of(i) : bias), tag);
  }
  const int writers = max(static_cast<int>(gridDim.x) - 1, 1); // of normed rows: all blocks but the one that most often chooses
  if (warp >= 2 && static_cast<int>(blockIdx.x) < writers)
#pragma unroll 1
    for (int i = writers * (threadIdx.x - 64) + blockIdx.x; p.gamma && p.normed && i < live * kChunks; i += writers * (kThreads - 64))
      write_normed(p, static_cast<size_t>(blockIdx.y) * kRows * p.columns + static_cast<size_t>(i) * 8, i % kChunks * 8, rows.factor(i / kChunks, p.columns, p.eps));
  if (!chooses(p, last)) return;
  using Scores = RowScores<kMostExperts, kRows>;
  Scores &scores = *reinterpret_cast<Scores *>(route_memory); // the rows are read
#pragma unroll 1
  for (int real = gridDim.y > 1; real < 2; real++) { // rehearsed while the others' scores are on their way
    if (real) {
      await_scores<kThreads>(p, scores, correction, live, tag);
      __syncthreads();
      if (threadIdx.x == 0) p.launches[blockIdx.y] = tag + 1; // all blocks have read it: their scores are here
    }
#pragma unroll 1
    for (int r = kWarps - 1 - warp; r < live; r += kWarps) write_chosen(p, r, choose_row(p, scores, correction, r, !real));
  }
}

// Weight rows of a block that has experts alone: few blocks begin beside the kernel before them, and few ends are waited for.
constexpr int kRouteRows = 4;

inline dim3 route_grid(const Router &p, int blocks) {
  const int most = p.width ? (p.experts > p.width ? p.experts : p.width) : (p.experts + kRouteRows - 1) / kRouteRows;
  return dim3(most < blocks ? most : blocks, (p.rows + kRows - 1) / kRows);
}

template <int kColumns>
inline cudaError_t launch_route(const Router &p, int blocks, cudaStream_t stream) {
  constexpr int kThreads = route_threads(kColumns), kPieces = kColumns / kThreads;
  static_assert(kPieces * kThreads == kColumns, "slices are whole pieces");
  const size_t rows = StagedRows<kThreads, kPieces>::bytes(p.rows);
  const size_t shared = rows > sizeof(RowScores<kMostExperts, kRows>) ? rows : sizeof(RowScores<kMostExperts, kRows>);
  return launch(route<kThreads, kPieces>, route_grid(p, blocks), kThreads, shared, stream, 1, p);
}

inline cudaError_t routed(const Router &p, int blocks, cudaStream_t stream) {
  if (p.experts > kMostExperts || p.choices > kRouterChoices || p.choices > p.experts || p.groups > 32) return cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: return launch_route<256>(p, blocks, stream);
  case 512: return launch_route<512>(p, blocks, stream);
  case 2048: return launch_route<2048>(p, blocks, stream);
  case 2880: return launch_route<2880>(p, blocks, stream);
  case 4096: return launch_route<4096>(p, blocks, stream);
  case 5120: return launch_route<5120>(p, blocks, stream);
  case 7168: return launch_route<7168>(p, blocks, stream);
  default: return cudaErrorInvalidValue;
  }
}

} // namespace eagle3
