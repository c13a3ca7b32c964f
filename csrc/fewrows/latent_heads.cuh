// Heads' queries of latent attention from the normed rows of the first projection, in one launch: a cluster a head. Its blocks
// share the head's outputs, send them to one another, and absorb the plain ones, a block 64 of the latent's columns.
#pragma once

#include "cluster.cuh"
#include "latent_queries.cuh"

namespace eagle3 {

constexpr int kHeadRanks = 8;                                       // blocks of a head
constexpr int kOwnPlain = kPlain / kHeadRanks, kOwnTurned = kTurned / kHeadRanks; // outputs of a block: a tile of 16, half a tile
constexpr int kHeadsThreads = 384, kHeadsPieces = 4;                // of 1536 columns
static_assert(kOwnPlain == kOutputs && kOwnTurned == kOutputs / 2, "a tile and a half");

// Block (x, y): rank x mod 8 of head x / 8 for row group y; past the heads, the cache rows, a block a row.
__global__ void __launch_bounds__(kHeadsThreads, 1) latent_heads(LatentQueries p) {
  using Rows = Operand<kHeadsThreads, kHeadsPieces, 1, true>;
  constexpr int kWarps = kHeadsThreads / 32, kPlainPitch = kPlain + 8;
  extern __shared__ uint4 heads_memory[];
  __shared__ __align__(16) bf16 up[kPlain * AbsorbedColumns::kPitch];
  __shared__ __align__(16) bf16 plain[kRows * kPlainPitch]; // the head's, from all its blocks
  __shared__ __align__(16) bf16 mine[kRows * kOwnPlain];
  __shared__ float red[2][4 * kHeadsThreads];
  __shared__ float squares[1][kWarps][kRows];
  __shared__ uint64_t inbox;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.x / kHeadRanks, rank = cluster_rank(), first_row = blockIdx.y * kRows, live = min(kRows, p.rows - first_row);
  // Attention begins already: what it reads before its own wait, committed rows and where they lie, is older than the
  // projection before this kernel.
  launch_dependents();
  if (head == p.heads) {
    const bool writes = warp == 0 && rank < live;
    const CacheRow row(p, first_row + rank, writes);
    wait_for_predecessor();
    if (writes) row.write(p, first_row + rank);
    return;
  }
  if (threadIdx.x == 0) open_inbox(&inbox, kRows * kPlain * sizeof(bf16));
  cluster_arrive();
  const auto gain = Rows::gain(p.gamma);
  // the pair of turned lanes that a thread of the first two warps puts together, with the one 4 lanes on
  const int turned_row = 2 * t + (warp & 1);
  const bool turns = warp < 2 && turned_row < live;
  const int64_t position = turns ? load_long(p.positions + first_row + turned_row) : 0;
  const int column = warp * kHeadsPieces * kPiece + t * 8;
  auto weight = [&](int output) { return p.weight + static_cast<size_t>(head * (kPlain + kTurned) + output) * (kHeadsThreads * kHeadsPieces) + column; };
  Tile<kHeadsPieces> tile;
  uint4 half[kHeadsPieces];
  tile.fetch(weight(rank * kOwnPlain + g), weight(rank * kOwnPlain + g + 8));
  const Turn turn(p, position, (rank * kOwnTurned + g) / 2, turns);
  Rows b(heads_memory);
  wait_for_predecessor();
  // Blocks begin where the projection's end, and wait for little: rows come before what is asked for behind them.
  b.stage(p.projected, p.stride, first_row, p.rows, gain, squares, [&] {
#pragma unroll
    for (int i = 0; i < kHeadsPieces; i++) half[i] = load_weights(weight(kPlain + rank * kOwnTurned + g) + i * kPiece);
    AbsorbedColumns::fetch<kHeadsThreads>(p, up, head, rank);
  });
  float4 c = make_float4(0.f, 0.f, 0.f, 0.f), odd = c, d = c, odd_d = c;
#pragma unroll
  for (int i = 0; i < kHeadsPieces; i++) {
    const uint4 v = b.get(0, i);
    mma(c, tile.top[i].x, tile.bottom[i].x, tile.top[i].y, tile.bottom[i].y, v.x, v.y);
    mma(odd, tile.top[i].z, tile.bottom[i].z, tile.top[i].w, tile.bottom[i].w, v.z, v.w);
    mma(d, half[i].x, 0u, half[i].y, 0u, v.x, v.y);
    mma(odd_d, half[i].z, 0u, half[i].w, 0u, v.z, v.w);
  }
  store_partial<kHeadsThreads>(red[0], add(c, odd));
  store_partial<kHeadsThreads>(red[1], add(d, odd_d));
  __syncthreads();
  const int which = warp & 3, row = 2 * t + (which & 1); // of the sum that this thread adds: in warps 0 to 3 plain, 4 and 5 turned
  if (warp < 4) {
    const float y = Rows::factor(squares[0], row, true, p.eps) * sum_partials<kHeadsThreads>(red[0], which, lane);
    mine[row * kOwnPlain + g + (which & 2 ? 8 : 0)] = __float2bfloat16(y);
  }
  float turned = 0.f;
  if (warp < 2) turned = rounded(Rows::factor(squares[0], row, true, p.eps) * sum_partials<kHeadsThreads>(red[1], which, lane));
  __syncthreads();
  cluster_wait(); // all inboxes are open
  if (warp < kHeadRanks) {
    const int at = lane / 4 * kOwnPlain + lane % 4 * 4; // four values of a row; rows that do not exist are read by nobody
    const float2 v = *reinterpret_cast<const float2 *>(mine + at);
    const float sent[2] = {v.x, v.y};
    send(plain + lane / 4 * kPlainPitch + rank * kOwnPlain + lane % 4 * 4, &inbox, warp, sent);
  }
  if (warp < 2) {
    const float other = __shfl_xor_sync(kAll, turned, 4);
    bf16 *to = p.q + (static_cast<size_t>(first_row + row) * p.heads + head) * kLatentRow + kLatent + rank * kOwnTurned + g;
    if (row < live && !(g & 1)) *reinterpret_cast<uint32_t *>(to) = turn.of(pack(turned, other));
  }
  wait_copies<0>();
  wait_inbox(&inbox);
  __syncthreads();
  if (warp >= AbsorbedColumns::kWarps) return;
  uint32_t own[kPlain / 16][2];
#pragma unroll
  for (int k = 0; k < kPlain / 16; k++)
#pragma unroll
    for (int h = 0; h < 2; h++) own[k][h] = *reinterpret_cast<const uint32_t *>(plain + g * kPlainPitch + k * 16 + h * 8 + 2 * t);
  AbsorbedColumns::write(p, up, own, head, rank, first_row, live);
}

inline cudaError_t absorb(const LatentQueries &p, cudaStream_t stream) {
  const unsigned groups = (p.rows + kRows - 1) / kRows;
  if (!p.weight) return launch(latent_queries, dim3(p.heads * 8 + 1, groups), 128, 0, stream, 1, p);
  const size_t rows = Operand<kHeadsThreads, kHeadsPieces, 1, true>::bytes(p.rows);
  return launch(latent_heads, dim3((p.heads + 1) * kHeadRanks, groups), kHeadsThreads, rows, stream, kHeadRanks, p);
}

} // namespace eagle3
