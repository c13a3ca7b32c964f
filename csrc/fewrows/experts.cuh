// A mixture-of-experts block of few rows: norm and router, gate and up of every expert that the block's rows chose, down with
// the weighted sum and the residual. All rows of a block of up to kGroups groups pass through each of its experts, whose
// weights are read once for them; a row takes what is its own.
//
// The experts of a block are listed in ascending order, so a row adds its own in ascending order whatever rows ride along.
#pragma once

#include "combine_down.cuh"
#include "project.cuh"

namespace eagle3 {

// The warps' products of one tile in ascending order, by one warp: each lane as in mma.
__device__ __forceinline__ float4 sum_of_warps(const float4 *red) {
  const int lane = threadIdx.x & 31;
  float4 total = red[lane];
#pragma unroll
  for (int w = 1; w < 8; w++) total = add(total, red[w * 32 + lane]);
  return total;
}

// A block's rows; a piece of the first of two groups leaves its registers to a tile of weights, or some of those would be spilled.
template <int kPieces, int kGroups>
using BlockRows = Operand<256, kPieces, kGroups, true, kGroups == 2 && kPieces == 8 ? 1 : 0>;

// Router logits of the block's rows for 8 experts, whose weights are in `w`: half a tile leaves registers for the rows.
// squares: of normed rows, as Operand::stage leaves them; factors: what comes of them. store(copy, row of the block, expert, logit): by a
// warp a copy and group. A's upper rows are words x and y of weight rows, its lower ones words z and w of the same (turn_router): one A
// for both products, of which one leaves a sum above and the other one below.
constexpr int kRouterOutputs = 8;
inline __host__ __device__ int router_tiles(const Experts &p) { return (p.experts + kRouterOutputs - 1) / kRouterOutputs; }

template <int kCopies, int kPieces, int kGroups, class Store>
__device__ __forceinline__ void route_block(const Experts &p, const Block<kGroups> &block, const uint4 (&w)[kPieces],
                                            const BlockRows<kPieces, kGroups> &b, const float (*squares)[8][kRows],
                                            float *factors, float2 (*red)[8 * 32], Store store) {
  using Rows = BlockRows<kPieces, kGroups>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
  for (int group = 0; group < kGroups; group++) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c;
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const uint4 v = b.get(group, i);
      mma(c, w[i].x, w[i].y, w[i].z, w[i].w, v.x, v.y);
      mma(odd, w[i].x, w[i].y, w[i].z, w[i].w, v.z, v.w);
    }
    red[group][threadIdx.x] = make_float2(c.x + odd.z, c.y + odd.w);
  }
  if (warp == 7 && lane < kRows * kGroups) // beside the products
    factors[lane] = Rows::factor(squares[lane / kRows], lane % kRows, p.gamma, p.eps);
  __syncthreads();
  if (warp < kGroups * kCopies) {
    const int group = warp % kGroups, copy = warp / kGroups;
    float2 v = red[group][lane];
#pragma unroll
    for (int w = 1; w < 8; w++) v.x += red[group][w * 32 + lane].x, v.y += red[group][w * 32 + lane].y;
    const int row = group * kRows + 2 * (lane & 3), e = blockIdx.x * kRouterOutputs + (lane >> 2);
    const float2 factor = *reinterpret_cast<const float2 *>(factors + row);
    if (e < p.experts && row < block.live) store(copy, row, e, v.x * factor.x);
    if (e < p.experts && row + 1 < block.live) store(copy, row + 1, e, v.y * factor.y);
  }
}

// The router's rows of this block; past the last expert, its own again.
template <int kPieces>
__device__ __forceinline__ void fetch_router(const Experts &p, uint4 (&w)[kPieces], int column) {
  const int e = min(static_cast<int>(blockIdx.x) * kRouterOutputs + ((static_cast<int>(threadIdx.x) & 31) >> 2), p.experts - 1);
#pragma unroll
  for (int i = 0; i < kPieces; i++) w[i] = load_weights(p.router + static_cast<size_t>(e) * p.columns + column + i * kPiece);
}
// As route_block takes them. By who routes alone: apart from the products, for each of which ptxas would move the words anew.
template <int kPieces>
__device__ __forceinline__ void turn_router(uint4 (&w)[kPieces]) {
#pragma unroll
  for (int i = 0; i < kPieces; i++) {
    const uint32_t z = w[i].z;
    w[i].z = w[i].y, w[i].y = z;
  }
  __syncwarp();
}

// Router alone: for more rows than one block of them.
template <int kPieces, int kGroups>
__global__ void __launch_bounds__(256, 2) router(Experts p) {
  using Rows = BlockRows<kPieces, kGroups>;
  extern __shared__ uint4 operand_memory[];
  __shared__ float2 red[kGroups][8 * 32];
  __shared__ float squares[kGroups][8][kRows];
  __shared__ __align__(8) float factors[Block<kGroups>::kHeld];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = warp * kPieces * kPiece + (lane & 3) * 8;
  const Block<kGroups> block(p);
  const auto gain = Rows::gain(p.gamma);
  uint4 w[kPieces];
  fetch_router(p, w, column);
  turn_router(w);
  Rows b(operand_memory);
  wait_for_predecessor();
  launch_dependents();
  b.stage(p.x, p.columns, block.first, p.rows, gain, squares);
  route_block<1>(p, block, w, b, squares, factors, red, [&](int, int row, int e, float v) { p.logits[static_cast<size_t>(block.first + row) * p.experts + e] = v; });
}

// A block's tiles of 8 gates and their ups, dealt to the blocks in turn: of which chosen expert, which of its tiles.
struct Dealt {
  struct Steps { // in shared memory: registers are the weights'
    int each, experts_on, tiles_on; // tiles of an expert; from one of the block's to its next
    unsigned turn;
  };
  int expert, tile;
  const volatile Steps &by;
  __device__ __forceinline__ Dealt(int each, volatile Steps &steps)
      : expert(blockIdx.x / static_cast<unsigned>(each)), tile(blockIdx.x - expert * each), by(steps) {
    asm volatile("" : "+r"(expert), "+r"(tile)); // divided here, before any wait
    if (threadIdx.x) return;
    steps.each = each, steps.experts_on = gridDim.x / static_cast<unsigned>(each);
    steps.tiles_on = gridDim.x - steps.experts_on * each;
  }
  __device__ __forceinline__ void next() {
    expert += by.experts_on, tile += by.tiles_on;
    if (tile >= by.each) tile -= by.each, expert++;
  }
};

// Gate, up and activation; those of the first kFirst experts are handed over early. With kRoute the first blocks compute the router's logits and all of them wait for those: all are
// resident at once (two a multiprocessor).
template <int kPieces, int kGroups, bool kRoute, int kMany, int kFirst>
__global__ void __launch_bounds__(256, 2) gate_up(Experts p) {
  using Rows = BlockRows<kPieces, kGroups>;
  extern __shared__ uint4 operand_memory[];
  __shared__ float4 red[2][kGroups][8 * 32];
  __shared__ float squares[kGroups][8][kRows];
  __shared__ __align__(8) float factors[Block<kGroups>::kHeld];
  __shared__ Choice<kGroups, kMany> choice;
  __shared__ Dealt::Steps steps;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int column = warp * kPieces * kPiece + t * 8;
  const Block<kGroups> block(p);
  const bool routes = kRoute && static_cast<int>(blockIdx.x) < router_tiles(p);
  const auto gain = Rows::gain(p.gamma);
  uint4 w[kPieces];
  if (routes) fetch_router(p, w, column);
  choice.clear();
  Dealt at(p.width / 8, steps); // read after the choice's barriers
  Rows b(operand_memory);
  if (routes) turn_router(w);
  wait_for_predecessor();
  const unsigned tag = kRoute ? load_int(reinterpret_cast<const int *>(p.launch)) : 0;
  const unsigned turn_of_early = kFirst ? load_int(reinterpret_cast<const int *>(p.turn)) : 0;
  b.stage(p.x, p.columns, block.first, p.rows, gain, squares);
  using Copies = Board<kGroups, kMany>;
  if (routes)
    route_block<Copies::kCopies>(p, block, w, b, squares, factors, reinterpret_cast<float2 (*)[8 * 32]>(red[0]), [&](int copy, int row, int e, float v) {
      store_packet(p.packets + Copies::place(copy, row) + e, v, tag);
    });
  const bool publishes = blockIdx.x == gridDim.x - 1; // who has no more tiles than others
  const int chosen = choice.make(p, block, publishes, [&](int row, float (&value)[kMany]) {
    if (kRoute)
      await_logits<kGroups, kMany>(p, row, tag, value);
    else
      load_logits<kMany>(p, block.first + row, value);
  });
  if (publishes) choice.publish(p, chosen, turn_of_early);
  launch_dependents(); // the next kernel reads the choice before it waits
  // columns as the compiler knows them: a spilled register would be read behind all weights under way, tile after tile
  const size_t below = static_cast<size_t>(p.width) * Rows::kColumns;
  auto aim = [&](const Dealt &at) {
    return p.gate_up + static_cast<size_t>(choice.listed(at.expert) * 2 * p.width + at.tile * 8 + g) * Rows::kColumns + column;
  };
  Tile<kPieces> tile;
  if (at.expert < chosen) {
    const bf16 *from = aim(at);
    tile.fetch(from, from + below);
  }
  if (kFirst) {
    empty_early(p, turn_of_early + 1);
    if (threadIdx.x == 0) steps.turn = turn_of_early; // read after the first tile's barrier
  }
  if (!routes && threadIdx.x < Block<kGroups>::kHeld) // read after the first tile's barrier
    factors[threadIdx.x] = Rows::factor(squares[threadIdx.x / kRows], threadIdx.x % kRows, p.gamma, p.eps);
#pragma unroll 1
  for (int turn = 0; at.expert < chosen; turn++) {
    const int expert = at.expert, first = at.tile * 8;
    at.next();
    const bool more = at.expert < chosen;
    const bf16 *from = more ? aim(at) : p.gate_up;
    float4 c[kGroups];
    multiply<1>(tile, b, c, [&](int, int i) {
      if (more) tile.fetch(i, from, from + below);
    });
#pragma unroll
    for (int group = 0; group < kGroups; group++) red[turn & 1][group][threadIdx.x] = c[group];
    __syncthreads();
    const int group = (warp - turn) & 7; // the warps take turns
    if (group >= kGroups) continue;
    const float4 v = sum_of_warps(red[turn & 1][group]);
    const int row = group * kRows + 2 * t, e = choice.listed(expert);
    const float even = factors[row], odd = factors[row + 1];
    bf16 *to = kFirst && expert < kFirst
                   ? early_of(p, at.by.turn) + (expert * kRows + row) * p.width + first + g
                   : p.hidden + ((static_cast<size_t>(blockIdx.y) * Block<kGroups>::kChosen + expert) * Block<kGroups>::kHeld + row) * p.width + first + g;
    auto store = [](bf16 *to, float v) {
      if (kFirst)
        store_bf16(to, v);
      else
        *to = __float2bfloat16(v);
    };
    if (choice.took(row, e)) store(to, silu(v.x * even) * (v.z * even));
    if (choice.took(row + 1, e)) store(to + p.width, silu(v.y * odd) * (v.w * odd));
  }
}

// kFirst: see combine_down.
template <int kPieces, int kGroups, int kMany, int kFirst>
inline cudaError_t launch_gate_up(const Experts &p, int multiprocessors, cudaStream_t stream) {
  constexpr int kHeld = Block<kGroups>::kHeld;
  const int blocks = 2 * multiprocessors, held = (p.rows + kHeld - 1) / kHeld;
  const size_t rows = BlockRows<kPieces, kGroups>::bytes(p.rows);
  if (held == 1) return launch(gate_up<kPieces, kGroups, true, kMany, kFirst>, dim3(blocks), 256, rows, stream, 1, p);
  if constexpr (kGroups == 2) {
    const cudaError_t e = launch(router<kPieces, kGroups>, dim3(router_tiles(p), held), 256, rows, stream, 1, p);
    if (e != cudaSuccess) return e;
    return launch(gate_up<kPieces, kGroups, false, kMany, 0>, dim3(blocks, held), 256, rows, stream, 1, p);
  } else {
    return cudaErrorInvalidValue;
  }
}

template <int kGroups, int kMany, int kFirst>
inline cudaError_t experts_of(const Experts &p, int multiprocessors, cudaStream_t stream) {
  cudaError_t e = cudaErrorInvalidValue;
  switch (p.columns) {
  case 256: e = launch_gate_up<1, kGroups, kMany, kFirst>(p, multiprocessors, stream); break;
  case 512: e = launch_gate_up<2, kGroups, kMany, kFirst>(p, multiprocessors, stream); break;
  case 1024: e = launch_gate_up<4, kGroups, kMany, kFirst>(p, multiprocessors, stream); break;
  case 2048: e = launch_gate_up<8, kGroups, kMany, kFirst>(p, multiprocessors, stream); break;
  default: break;
  }
  if (e != cudaSuccess) return e;
  switch (p.width) {
  case 64: return launch_down<64, 1, kGroups, kFirst>(p, stream);
  case 128: return launch_down<128, 1, kGroups, kFirst>(p, stream);
  case 96: return launch_down<96, 1, kGroups, kFirst>(p, stream);
  case 192: return launch_down<192, 1, kGroups, kFirst>(p, stream);
  case 256: return launch_down<256, 1, kGroups, kFirst>(p, stream);
  case 384: return launch_down<384, 1, kGroups, kFirst>(p, stream);
  case 512: return launch_down<256, 2, kGroups, kFirst>(p, stream);
  case 768: return launch_down<384, 2, kGroups, kFirst>(p, stream);
  case 1024: return launch_down<256, 4, kGroups, kFirst>(p, stream);
  default: return cudaErrorInvalidValue;
  }
}

template <int kMany>
inline cudaError_t experts_of_many(const Experts &p, int multiprocessors, cudaStream_t stream) {
  if (p.rows == 1) return experts_of<1, kMany, 0>(p, multiprocessors, stream);
  return p.rows <= kRows ? experts_of<1, kMany, kEarly>(p, multiprocessors, stream) : experts_of<2, kMany, 0>(p, multiprocessors, stream);
}

inline cudaError_t experts(const Experts &p, int multiprocessors, cudaStream_t stream) {
  if (p.experts > kMostExperts || p.choices > kChoices || p.choices > p.experts) return cudaErrorInvalidValue;
  return p.experts <= 128 ? experts_of_many<4>(p, multiprocessors, stream) : experts_of_many<kMostExperts / 32>(p, multiprocessors, stream);
}

} // namespace eagle3
