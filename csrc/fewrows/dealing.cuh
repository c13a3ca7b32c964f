// How attend.cuh deals positions: tiles of 64, pairs of tiles (2 r, 2 r + 1) to ranks r in turn: the 8 blocks of a cluster in short
// tables, which end with the last of them; 32 blocks in long ones, which begin anew after them.
#pragma once

#include <cuda_runtime.h>

namespace eagle3 {

constexpr int kTile = 64, kSlices = 4, kSlice = kTile / kSlices; // positions of a tile, warps that fold it, positions of each
constexpr int kWarps = 2 * kSlices, kVectors = 16;               // of a part of a block: two sides; of a warp: rows times heads
constexpr int kRanks = 8; // of a cluster, or of one whose last ranks would have no tile the first kFewer
constexpr int kFewer = 6; // of them 20 fit at once, of 8 ranks 15: 8 rows of 4 groups of heads are 16
constexpr int kRun = 2 * kRanks; // tiles of a short table, or fewer
// Ranks of a group of heads in long tables, a block each: of four groups on 128 of 132 multiprocessors. The last of them merge.
constexpr int kDealt = 32;
constexpr int kMergers = 8;
constexpr int kHanded = 1024; // vectors whose partials ranks hand over in one launch, at most
constexpr int kParts = 2; // groups of kVectors that a block of a long context may hold: its keys serve them all

// Whether so many ranks have all tiles of tables of that many positions, and one that unwritten rows may reach.
inline bool short_table(int positions, int ranks) { return positions + kTile <= 2 * ranks * kTile; }

// From a tile to the next one of the same rank and side. kOne: short tables, whose tiles are one run.
template <bool kOne>
constexpr int kNext = kOne ? kRun : 2 * kDealt;

// The first tile of a rank and side that is not older than tile `oldest`.
template <bool kOne>
__device__ __forceinline__ int first_tile(int rank, int side, int oldest) {
  const int s = (kOne ? 0 : oldest / kNext<kOne> * kNext<kOne>) + 2 * rank + side;
  return s < oldest ? s + kNext<kOne> : s;
}

// Which block of a long table this is. Blocks of four groups of heads lie side by side, or of two or one where that many do not divide
// their number: a rank that merges waits for those behind it, and so few that wait leave room for them however many groups there are.
struct RankOf {
  int rank, group;
};
__device__ __forceinline__ RankOf rank_of(int groups) {
  const int log = groups % 4 == 0 ? 2 : groups % 2 == 0, place = blockIdx.x >> log;
  return {place % kDealt, (place / kDealt << log) + static_cast<int>(blockIdx.x & ((1u << log) - 1))};
}

} // namespace eagle3
