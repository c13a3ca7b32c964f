// Latent attention over few rows (MLA: kernels/mla.py, kernels/mla_attention.py), after the projections: queries absorbed into
// the space of the latents, RoPE and the cache row; attention of all heads over rows that are key and value at once; each
// head's values out of the merged latents.
//
// Positions come in tiles of 32, counted from 0; tile s belongs to lane s mod 64. A block folds the tiles of its lane in
// ascending order for 8 heads of two rows, partials of lanes are merged in ascending order: both follow from a query's own
// position alone. A tile that reaches past the prefix is folded for each row by itself, its keys in the order of the row's
// own path: committed rows and nodes alike.
#pragma once

#include "latent_heads.cuh"

namespace eagle3 {

constexpr int kLatentTile = 32, kLatentLanes = 64;
constexpr int kHeadBlock = 8, kPair = 2; // heads and rows of a block: together the M of an mma
constexpr int kLatentPitch = kLatentRow + 8, kScorePitch = kLatentTile + 8; // 8 rows of 16 bytes lie on different banks

struct LatentAttention {
  const bf16 *q;         // [B * T, heads, 576]
  const bf16 *plane;     // [slots, 576]
  const int *pages;      // [B, table]
  const int64_t *prefix; // [B]
  const int64_t *tree;   // [B, T] ancestor bits or null
  const bf16 *v_up;      // [heads] matrices [128, 512], up_stride elements apart
  float *totals;         // [B * T, heads, lanes, 512] scratch
  float *stats;          // [B * T, heads, lanes, 2] scratch: maximum and sum
  bf16 *y;               // [B * T, heads * 128]
  float scale;           // of the softmax, times log2(e)
  int rows, t, heads, lanes, up_stride, columns, table, page; // lanes: at most 64
};

// What a tile's keys are for: all rows of the block, or the path of one.
struct LatentTurn {
  int tile, row; // row: of the block; -1: all
};

constexpr size_t kLatentStage = static_cast<size_t>(kLatentTile) * kLatentPitch; // elements
constexpr int kLatentThreads = 256;
constexpr int kScoreParts = 4; // of the columns, which the warps share for scores
// Two stages are small enough for the carve-out of the other kernels, which a multiprocessor must drain to change; more pay
// where a block folds several tiles.
template <int kStages>
constexpr size_t kLatentBytes = (kStages * kLatentStage + 16 * kScorePitch) * 2 + kScoreParts * 16 * kScorePitch * 4;

// Block (lane, pair of rows of a sequence, block of heads): its lane's partial. Nodes begin in a tile that each row folds for
// itself: past the lanes, one more block does so for the second row of a pair, while that lane's own block does for the first.
template <int kStages>
__global__ void __launch_bounds__(kLatentThreads, 1) latent_attend(LatentAttention p) {
  // Values begin already, and the output projection: what they read before their own waits is older than the projection before
  // the heads.
  launch_dependents();
  extern __shared__ uint4 latent_memory[];
  __shared__ float keep[16];
  __shared__ uint8_t path[kPair][64]; // node at each depth
  bf16 *const stages = reinterpret_cast<bf16 *>(latent_memory), *const weights = stages + kStages * kLatentStage;
  float *const scores = reinterpret_cast<float *>(weights + 16 * kScorePitch);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int pairs = (p.t + kPair - 1) / kPair, sequence = blockIdx.y / pairs, first_row = blockIdx.y % pairs * kPair;
  const int rows = min(kPair, p.t - first_row), line = sequence * p.t + first_row, head0 = blockIdx.z * kHeadBlock;
  const int64_t committed_rows = load_long(p.prefix + sequence);
  uint64_t bits[kPair];
#pragma unroll
  for (int r = 0; r < kPair; r++) bits[r] = p.tree && r < rows ? static_cast<uint64_t>(load_long(p.tree + line + r)) : 0; // beside the prefix
  const int prefix = static_cast<int>(committed_rows), crossed = prefix / kLatentTile % kLatentLanes;
  const bool beside = static_cast<int>(blockIdx.x) == p.lanes;
  const int own = beside ? crossed : blockIdx.x, only = rows > 1 && own == crossed ? beside : -1; // the row it is for; -1: both
  if (beside && only < 0) return;
  const int *const pages = p.pages + static_cast<int64_t>(sequence) * p.table;
  int last[kPair]; // position of each row
#pragma unroll
  for (int r = 0; r < kPair; r++) {
    last[r] = r >= rows ? -1 : p.tree ? prefix + __popcll(bits[r]) - 1 : prefix + first_row + r;
    if (p.tree && threadIdx.x < 64 && bits[r] >> threadIdx.x & 1)
      path[r][__popcll(bits[r] & ((1ull << threadIdx.x) - 1))] = static_cast<uint8_t>(threadIdx.x);
  }
  const int end = (only < 0 ? max(last[0], last[1]) : only ? last[1] : last[0]) + 1;
  if (own * kLatentTile >= end) return;
  __syncthreads();
  // logical row of position `at` as row r sees it; -1: it sees none there
  auto row_of = [&](int at, int r) {
    if (at < prefix) return at;
    if (r < 0 || at > (r ? last[1] : last[0])) return -1;
    const int row = prefix + (p.tree ? path[r][at - prefix] : at - prefix);
    return row < p.columns * p.page ? row : -1;
  };
  auto begin = [&](int tile) { return LatentTurn{tile, (tile + 1) * kLatentTile <= prefix ? -1 : max(only, 0)}; };
  auto after = [&](LatentTurn turn) {
    return only < 0 && turn.row >= 0 && turn.row + 1 < rows ? LatentTurn{turn.tile, turn.row + 1} : begin(turn.tile + kLatentLanes);
  };
  // positions of a tile below the prefix: their rows are older than the kernel before this one, nodes are not
  auto committed = [&](LatentTurn turn) { return min(kLatentTile, max(0, prefix - turn.tile * kLatentTile)); };
  // positions of it that somebody sees: past them are zeros
  auto reached = [&](LatentTurn turn) {
    return turn.row < 0 ? kLatentTile : min(kLatentTile, max(committed(turn), (turn.row ? last[1] : last[0]) + 1 - turn.tile * kLatentTile));
  };
  // A warp fetches four positions of a tile, each of which lies in the slot that a lane of every four finds; -1: nobody sees it.
  constexpr int kOwn = kLatentTile / (kLatentThreads / 32), kRowChunks = kLatentRow / 8;
  static_assert(kOwn * kRowChunks % 32 == 0 && kHeadBlock == kLatentThreads / 32, "a warp's lanes share its positions evenly; a head a warp");
  auto slot_of = [&](LatentTurn turn) {
    const int row = row_of(turn.tile * kLatentTile + warp * kOwn + lane % kOwn, turn.row);
    if (row < 0) return -1;
    const unsigned page = static_cast<unsigned>(row) / static_cast<unsigned>(p.page);
    return static_cast<int>(pages[page] * p.page + (row - page * p.page));
  };
  auto fetch = [&](int slot, int stage, int from, int to) { // positions from … to of the tile
    bf16 *const own_rows = stages + stage * kLatentStage + warp * kOwn * kLatentPitch;
    const int end = min(to - warp * kOwn, kOwn) * kRowChunks;
#pragma unroll 1
    for (int first = max(from - warp * kOwn, 0) * kRowChunks; first < end; first += 32) {
      const int i = first + lane, k = i / kRowChunks, c = i % kRowChunks * 8, at = __shfl_sync(kAll, slot, k);
      if (i < end) copy_async(own_rows + k * kLatentPitch + c, p.plane + static_cast<size_t>(max(at, 0)) * kLatentRow + c, at >= 0);
    }
  };
  LatentTurn turn = begin(own), ahead = turn;
  bf16 *const queries = stages + kLatentStage; // on their way into registers
  auto fetch_queries = [&](int r) { // a head a warp
    const bf16 *const from = p.q + (static_cast<size_t>(line + (r < rows ? r : 0)) * p.heads + head0 + warp) * kLatentRow;
    bf16 *const to = queries + (r * kHeadBlock + warp) * kLatentPitch;
#pragma unroll
    for (int i = 0; i < kRowChunks; i += 32)
      if (i + lane < kRowChunks) copy_async(to + (i + lane) * 8, from + (i + lane) * 8, r < rows);
  };
  // all but the nodes and the queries before the wait, and where the nodes lie
  const int slot = slot_of(turn);
  fetch(slot, 0, 0, committed(turn));
  fetch(slot, 0, reached(turn), kLatentTile);
  if (rows == 1) fetch_queries(1);
  wait_for_predecessor();
  fetch_queries(0);
  if (rows > 1) fetch_queries(1);
  fetch(slot, 0, committed(turn), reached(turn));
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  constexpr int kSteps = kLatentRow / kScoreParts / 16; // of 16 columns, of a warp's part
  const int position = warp % 2 * 16, part = warp / 2;  // of the scores that this warp computes
  uint32_t q[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; k++)
    load_matrices(q[k], queries + ((lane >> 3 & 1) * 8 + (lane & 7)) * kLatentPitch + (part * kSteps + k) * 16 + (lane >> 4) * 8);
  __syncthreads();
  float4 out[8];
#pragma unroll
  for (int n = 0; n < 8; n++) out[n] = make_float4(0.f, 0.f, 0.f, 0.f);
  float top[2] = {-INFINITY, -INFINITY}, norm[2] = {0.f, 0.f}; // of vectors 2 * warp and 2 * warp + 1
  auto fetch_ahead = [&](int stage) {
    ahead = after(ahead);
    if (ahead.tile * kLatentTile < end) fetch(slot_of(ahead), stage, 0, kLatentTile);
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 1; stage < kStages - 1; stage++) fetch_ahead(stage);
#pragma unroll 1
  for (int stage = 0; turn.tile * kLatentTile < end; stage = (stage + 1) % kStages, turn = after(turn)) {
    fetch_ahead((stage + kStages - 1) % kStages);
    wait_copies<kStages - 1>();
    __syncthreads();
    const bf16 *const keys = stages + stage * kLatentStage;
    { // scores: a warp does 16 positions, a part of the columns
      const bf16 *at = keys + (position + (lane >> 4) * 8 + (lane & 7)) * kLatentPitch + part * kSteps * 16 + (lane >> 3 & 1) * 8;
      float4 s[2][2] = {};
#pragma unroll
      for (int k = 0; k < kSteps; k++) {
        uint32_t b[4];
        load_matrices(b, at + k * 16);
#pragma unroll
        for (int n = 0; n < 2; n++) mma(s[n][k & 1], q[k][0], q[k][1], q[k][2], q[k][3], b[2 * n], b[2 * n + 1]);
      }
      float *to = scores + (part * 16 + g) * kScorePitch + position + 2 * t;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const float4 sum = add(s[n][0], s[n][1]);
        *reinterpret_cast<float2 *>(to + n * 8) = make_float2(sum.x, sum.y);
        *reinterpret_cast<float2 *>(to + 8 * kScorePitch + n * 8) = make_float2(sum.z, sum.w);
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) { // softmax: a warp does two vectors, a lane one position
      const int m = 2 * warp + i, r = m / kHeadBlock;
      const bool sees = r < rows && (turn.row < 0 || (turn.row == r && row_of(turn.tile * kLatentTile + lane, r) >= 0));
      const float *from = scores + m * kScorePitch + lane;
      float score = from[0];
#pragma unroll
      for (int n = 1; n < kScoreParts; n++) score += from[n * 16 * kScorePitch];
      score = sees ? score * p.scale : -INFINITY;
      const float most = warp_max(score);
      const float now = fmaxf(top[i], most), base = now == -INFINITY ? 0.f : now, kept = exp2f(top[i] - base);
      float sum = rounded(exp2f(score - base));
      weights[m * kScorePitch + lane] = __float2bfloat16(sum);
      norm[i] = norm[i] * kept + warp_sum(sum);
      top[i] = now;
      if (lane == 0) keep[m] = kept;
    }
    __syncthreads();
    { // values: a warp does 64 columns. Where a tile is one row's, the other row's sums stay: it may not see a NaN
      const bf16 *a_at = weights + ((lane >> 3 & 1) * 8 + (lane & 7)) * kScorePitch + (lane >> 4) * 8;
      const bf16 *b_at = keys + ((lane >> 3 & 1) * 8 + (lane & 7)) * kLatentPitch + warp * 64 + (lane >> 4) * 8;
      const float first_kept = keep[g], second_kept = keep[g + 8];
      const bool first = turn.row != 1, second = turn.row != 0;
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        float4 c[2] = {out[n], out[n + 1]};
#pragma unroll
        for (int j = 0; j < 2; j++) c[j].x *= first_kept, c[j].y *= first_kept, c[j].z *= second_kept, c[j].w *= second_kept;
#pragma unroll
        for (int k = 0; k < kLatentTile / 16; k++) {
          uint32_t a[4], b[4];
          load_matrices(a, a_at + k * 16);
          load_transposed(b, b_at + k * 16 * kLatentPitch + n * 8);
#pragma unroll
          for (int j = 0; j < 2; j++) mma(c[j], a[0], a[1], a[2], a[3], b[2 * j], b[2 * j + 1]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if (first) out[n + j].x = c[j].x, out[n + j].y = c[j].y;
          if (second) out[n + j].z = c[j].z, out[n + j].w = c[j].w;
        }
      }
    }
    __syncthreads();
  }
  wait_copies<0>();
#pragma unroll
  for (int r = 0; r < kPair; r++) {
    if (r >= rows || own * kLatentTile > last[r] || (only >= 0 && r != only)) continue; // a lane that the row does not reach has no partial
    const size_t to = ((static_cast<size_t>(line + r) * p.heads + head0 + g) * p.lanes + own) * kLatent + warp * 64 + 2 * t;
#pragma unroll
    for (int n = 0; n < 8; n++)
      *reinterpret_cast<float2 *>(p.totals + to + n * 8) = r ? make_float2(out[n].z, out[n].w) : make_float2(out[n].x, out[n].y);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int m = 2 * warp + i, r = m / kHeadBlock;
    if (lane || r >= rows || (only >= 0 && r != only)) continue;
    float *to = p.stats + ((static_cast<size_t>(line + r) * p.heads + head0 + m % kHeadBlock) * p.lanes + own) * 2;
    to[0] = top[i], to[1] = norm[i];
  }
}

} // namespace eagle3
