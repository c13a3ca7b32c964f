// A block's stream of weight tiles through a ring in shared memory: for kernels whose registers hold something else.
#pragma once

#include "common.cuh"

namespace eagle3 {

// Bytes of weights that a block keeps in flight: enough to keep memory busy, little enough that a kernel and the next one fit
// on a multiprocessor together, so that the next one's first weights are on their way before it may start.
constexpr int kUnitBytes = 16 * 1024, kUnitsInFlight = 5;

// A block's stream of weight tiles, 16 rows each. Every thread has a ring of its own in shared memory, used as more registers:
// nobody else reads its slots, so waiting for its own copies is all the synchronisation there is.
//
// Code is kept small on purpose: weights that stream through L2 leave no room for instructions, and a kernel that is much
// larger than this pays for its own code in every layer.
//
// Aim: function (tile, const bf16 *&top, const bf16 *&bottom, bool &has_top, bool &has_bottom) that points at the thread's
// columns of rows g and g + 8 of a tile.
template <int kThreads, int kPieces, class Aim>
struct Stream {
  static constexpr int kFit = kUnitBytes / (kThreads * 32), kQ = kFit < 1 ? 1 : kFit < kPieces ? kFit : kPieces;
  static constexpr int kParts = kPieces / kQ, kUnits = kUnitsInFlight;
  static constexpr size_t kBytes = static_cast<size_t>(kUnits) * kQ * 32 * kThreads;
  static_assert(kPieces % kQ == 0, "units are whole pieces");
  uint4 *slot, *const begin_slot;
  const Aim &aim;
  const int tiles;
  int tile = 0; // whose parts are fetched next
  const bf16 *top = nullptr, *bottom = nullptr;
  bool has_top = false, has_bottom = false;

  __device__ __forceinline__ Stream(void *shared, const Aim &aim, int tiles)
      : slot(static_cast<uint4 *>(shared) + threadIdx.x), begin_slot(slot), aim(aim), tiles(tiles) {
    if (tiles > 0) aim(0, top, bottom, has_top, has_bottom);
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      fetch(u % kParts);
      advance();
    }
  }
  __device__ __forceinline__ void advance() {
    slot += 2 * kQ * kThreads;
    if (slot == begin_slot + kUnits * 2 * kQ * kThreads) slot = begin_slot;
  }
  __device__ __forceinline__ void fetch(int part) {
    if (tile < tiles) {
#pragma unroll
      for (int i = 0; i < kQ; i++) {
        copy_async(slot + 2 * i * kThreads, top + (part * kQ + i) * kPiece, has_top);
        copy_async(slot + (2 * i + 1) * kThreads, bottom + (part * kQ + i) * kPiece, has_bottom);
      }
    }
    commit_copies();
    if (part == kParts - 1 && ++tile < tiles) aim(tile, top, bottom, has_top, has_bottom);
  }
  // The next tile times the rows in `b`: this warp's share of the columns.
  __device__ __forceinline__ float4 multiply(const uint4 (&b)[kPieces]) {
    float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      wait_copies<kUnits - 1>();
#pragma unroll
      for (int i = 0; i < kQ; i++) mma_piece(c, slot[2 * i * kThreads], slot[(2 * i + 1) * kThreads], b[part * kQ + i]);
      fetch((part + kUnits) % kParts);
      advance();
    }
    return c;
  }
};

struct Nowhere {
  __device__ void operator()(int, const bf16 *&, const bf16 *&, bool &, bool &) const {}
};
// Bytes of a stream's ring.
template <int kThreads, int kPieces>
constexpr size_t kRingBytes = Stream<kThreads, kPieces, Nowhere>::kBytes;

} // namespace eagle3
