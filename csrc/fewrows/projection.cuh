// What projections share: their arguments, which outputs a block computes in which order, who writes them, and weight rows that
// a block's registers have no room for.
#pragma once

#include <algorithm>

#include "operand.cuh"

namespace eagle3 {

struct Projection {
  const bf16 *x;        // [rows, columns], perhaps columns of wider rows
  const bf16 *gamma;    // [columns] or null: x comes normed
  const bf16 *weight;   // [outputs, columns]; gated: [2 * outputs, columns], gates first
  const bf16 *bias;     // [outputs] or null
  const bf16 *residual; // [rows, outputs] or null
  bf16 *y;              // [rows, outputs]
  float eps;
  int rows, outputs, columns, stride; // stride: from row to row of x
};

// Pieces of the first of two groups that leave their registers to a tile of weights: a register that is spilled is read back behind
// all weights under way.
__host__ __device__ constexpr int aside(int pieces, int groups) { return groups == 2 && pieces == 8 ? 3 : 0; }

// Outputs of a block: [first, last), in tiles of kStep. A tile is 16 weight rows: 16 outputs, or 8 gates on top of 8 ups. Up to
// `most` of the block's that a single tile does not hold are `held` by somebody else, who has them from `last` on.
template <bool kGated>
struct TileRows {
  int first, last, held;
  static constexpr int kStep = kGated ? 8 : 16;
  __device__ __forceinline__ TileRows(int outputs, int most = 0) {
    first = share_begin(outputs, blockIdx.x);
    last = share_begin(outputs, blockIdx.x + 1);
    held = min(max(last - first - kStep, 0), most);
    last -= held;
  }
  __device__ __forceinline__ int tiles() const { return (last - first + kStep - 1) / kStep; }
  __device__ __forceinline__ int top(int tile, int g) const { return first + tile * kStep + g; }
  // Where lane group g's rows of a tile's top and bottom half begin; past the block's last output its last one again.
  __device__ __forceinline__ void aim(int tile, int g, const bf16 *weight, int outputs, int columns, const bf16 *&above,
                                      const bf16 *&below) const {
    const int row = min(top(tile, g), last - 1);
    above = weight + static_cast<size_t>(row) * columns;
    below = weight + static_cast<size_t>(kGated ? row + outputs : min(top(tile, g) + 8, last - 1)) * columns;
  }
};

// What one thread writes of a tile: thread (group, component, lane) as in sum_partials; gated ones take gate and up together.
// With kHeld components 4 and 5 are those of the held rows, which come with the first tile.
template <int kThreads, int kGroups, bool kGated, bool kHeld = false>
struct Output {
  static_assert(!kHeld || (kGroups == 1 && !kGated), "one group");
  static constexpr int kComponents = kGated ? 2 : kHeld ? 6 : 4, kPartials = (kHeld ? 6 : 4) * kThreads; // of a group
  static constexpr int kCount = kGroups * kComponents * 32, kTurns = (kCount + kThreads - 1) / kThreads;
  float before[kTurns], bias[kTurns]; // what is added: on its way while the tile is multiplied

  struct Place {
    int group, which, lane, out;
    size_t to;
    bool live;
  };
  __device__ __forceinline__ Place place(const Projection &p, const TileRows<kGated> &rows, int tile, int turn, int thread) {
    Place v;
    const int at = thread + turn * kThreads;
    v.group = at / (kComponents * 32), v.which = kHeld ? at >> 5 : at >> 5 & (kComponents - 1), v.lane = at & 31;
    const int row = (blockIdx.y * kGroups + v.group) * kRows + 2 * (v.lane & 3) + (v.which & 1);
    const bool held = kHeld && v.which > 3;
    v.out = held ? rows.last + (v.lane >> 2) : rows.top(tile, v.lane >> 2) + (v.which & 2 ? 8 : 0);
    v.to = static_cast<size_t>(row) * p.outputs + v.out;
    v.live = at < kCount && row < p.rows && v.out < rows.last + (held ? rows.held : 0);
    return v;
  }
  __device__ __forceinline__ void fetch(const Projection &p, const TileRows<kGated> &rows, int tile, int thread = threadIdx.x) {
    if constexpr (!kGated) {
#pragma unroll
      for (int turn = 0; turn < kTurns; turn++) {
        const Place v = place(p, rows, tile, turn, thread);
        before[turn] = v.live && p.residual ? load_bf16(p.residual + v.to) : 0.f;
        bias[turn] = v.live && p.bias ? load_bf16(p.bias + v.out) : 0.f;
      }
    }
  }
  // factor(row of the block): what its sums are still to be multiplied by.
  template <class Factor>
  __device__ __forceinline__ void store(const Projection &p, const TileRows<kGated> &rows, int tile, const float (*red)[kPartials], Factor factor,
                                        int thread = threadIdx.x) {
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      const Place v = place(p, rows, tile, turn, thread);
      if (!v.live) continue;
      const float scale = factor(v.group * kRows + 2 * (v.lane & 3) + (v.which & 1));
      float y = scale * sum_partials<kThreads>(red[v.group], v.which, v.lane);
      if constexpr (kGated) {
        y = silu(y) * scale * sum_partials<kThreads>(red[v.group], v.which + 2, v.lane);
      } else {
        y = y + bias[turn] + before[turn];
      }
      p.y[v.to] = __float2bfloat16(y);
    }
  }
};

// Weight rows of a block that its registers have no room for, in shared memory: up to kMost, on their way since before the wait.
// A warp's slice of each is its own.
template <int kThreads, int kPieces, int kMost>
struct HeldRows {
  static constexpr int kHalves = (kMost + 7) / 8, kPitch = kThreads * kPieces / 8 + 4; // chunks of a row: neighbours lie on different banks
  static constexpr size_t kBytes = static_cast<size_t>(kMost) * kPitch * 16;
  static constexpr int kLanes = 4 * kPieces; // a chunk of a row each
  static_assert(!kMost || kLanes <= 32, "a chunk of a row a lane");
  const uint4 *own[kHalves ? kHalves : 1]; // the lane's columns of rows 8 h + lane / 4, a piece every 4 chunks

  // weight: of the first row, at the warp's columns; memory: [kMost][kPitch] chunks.
  __device__ __forceinline__ HeldRows(void *memory, const bf16 *weight, int held, int columns) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    uint4 *const slice = static_cast<uint4 *>(memory) + (threadIdx.x >> 5) * kLanes;
#pragma unroll
    for (int h = 0; h < kHalves; h++) own[h] = slice + (8 * h + g < held ? 8 * h + g : 0) * kPitch + (lane & 3); // or nobody reads its sums
#pragma unroll
    for (int r = 0; r < kMost; r++)
      if (r < held && (kLanes == 32 || lane < kLanes)) copy_async(slice + r * kPitch + lane, weight + static_cast<size_t>(r) * columns + lane * 8, true);
    if (kMost) commit_copies();
  }
  __device__ __forceinline__ void await() const {
    wait_copies<0>();
    __syncwarp();
  }
  __device__ __forceinline__ uint4 get(int half, int piece) const { return own[half][piece * 4]; }
};

// Half tiles of 8 weight rows of a block, kHalves of them in registers and, behind those, what it holds in shared memory. kFull: it has
// rows for all of the first; where it has not after all, its last one is asked for again.
template <int kHalves, int kPieces, bool kFull, class Held>
struct HalfTiles {
  uint4 w[kHalves][kPieces];
  // Half tiles [kFrom, kTo). weight: the block's first row at the lane's columns; rows: how many there are, of which nobody reads what
  // lies past them.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void fetch(const bf16 *weight, int rows, int columns) {
#pragma unroll
    for (int h = kFrom; h < kTo; h++) {
      if (!kFull && 8 * h >= rows) continue;
      const bf16 *from = weight + static_cast<size_t>(min(8 * h + (static_cast<int>(threadIdx.x) >> 2 & 7), rows - 1)) * columns;
#pragma unroll
      for (int i = 0; i < kPieces; i++) w[h][i] = load_weights(from + i * kPiece);
    }
  }
  // All of them, never more than kAhead pieces under way, of which none is at its end.
  template <int kAhead>
  __device__ __forceinline__ void fetch_paced(const bf16 *weight, int rows, int columns) {
    static_assert(kFull, "no half tile is left out");
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      const bf16 *from = weight + static_cast<size_t>(min(8 * h + (static_cast<int>(threadIdx.x) >> 2 & 7), rows - 1)) * columns;
#pragma unroll
      for (int i = 0; i < kPieces; i++) {
        const int before = h * kPieces + i - 1;
        if (before >= 0 && (before + 1) % kAhead == 0) await_load(w[before / kPieces][before % kPieces]);
        w[h][i] = load_weights(from + i * kPiece);
      }
    }
    await_load(w[kHalves - 1][kPieces - 1]);
  }
  __device__ __forceinline__ uint4 get(const Held &held, int half, int i) const {
    if (half < kHalves) return w[half][i];
    return half - kHalves < Held::kHalves ? held.get(half - kHalves, i) : make_uint4(0, 0, 0, 0);
  }
};

// Blocks of a projection that takes whole multiprocessors, up to `most` outputs each on their way before the wait: where that
// suffices they leave 32 multiprocessors to the kernel after it, whose blocks begin beside none of these. 0: too many outputs.
inline int blocks_of(int outputs, int multiprocessors, int most) {
  const int least = (outputs + most - 1) / most, tiles = (outputs + 15) / 16;
  return least > multiprocessors ? 0 : std::max(least, std::min(tiles, multiprocessors - 32));
}

} // namespace eagle3
