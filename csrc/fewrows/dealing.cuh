// How attention.cuh deals positions: tiles of 64, runs of 16 tiles to 3 clusters in turn, the pairs of tiles (2 r, 2 r + 1) of a
// run to the 8 ranks r of its cluster.
#pragma once

#include <cuda_runtime.h>

namespace eagle3 {

constexpr int kTile = 64, kSlices = 4, kSlice = kTile / kSlices; // positions of a tile, warps that fold it, positions of each
constexpr int kWarps = 2 * kSlices, kVectors = 16;               // of a part of a block: two sides; of a warp: rows times heads
constexpr int kRanks = 8; // of a cluster, or of one whose last ranks would have no tile the first kFewer
constexpr int kFewer = 6; // of them 20 fit at once, of 8 ranks 15: 8 rows of 4 groups of heads are 16
constexpr int kRun = 2 * kRanks, kClusters = 3; // tiles of a run: 1,024 positions need one cluster
// three clusters of 4 groups of heads fit at once, a block a multiprocessor; of 16, an H200 takes 15
constexpr int kParts = 2; // groups of kVectors that a block of a long context may hold: its keys serve them all

// Whether so many ranks have all tiles of tables of that many positions, and one that unwritten rows may reach.
inline bool short_table(int positions, int ranks) { return positions + kTile <= 2 * ranks * kTile; }

// From a tile to the next one of the same cluster, rank and side. kOne: short tables, whose tiles are one run.
template <bool kOne>
constexpr int kNext = kOne ? kRun : kRun * kClusters;

// The first tile of a cluster, rank and side that is not older than tile `oldest`.
template <bool kOne>
__device__ __forceinline__ int first_tile(int cluster, int rank, int side, int oldest) {
  const int s = (kOne ? 0 : oldest / kNext<kOne> * kNext<kOne> + cluster * kRun) + 2 * rank + side;
  return s < oldest ? s + kNext<kOne> : s;
}

// Clusters that have a tile between tile `oldest` and position `end`, a bit each.
template <bool kOne>
__device__ __forceinline__ unsigned clusters_with(int oldest, int end) {
  if (kOne) return 1;
  const int from = oldest / kRun, runs = (end - 1) / kTile / kRun - from + 1;
  const unsigned some = ((1u << min(runs, kClusters)) - 1) << from % kClusters;
  return (some | some >> kClusters) & ((1u << kClusters) - 1);
}

} // namespace eagle3
