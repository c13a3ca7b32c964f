// What projections share: their arguments, which outputs a block computes in which order, who writes them, and weight rows that
// a block's registers have no room for.
#pragma once

#include "common.cuh"

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
  __device__ __forceinline__ Place place(const Projection &p, const TileRows<kGated> &rows, int tile, int turn) {
    Place v;
    const int at = threadIdx.x + turn * kThreads;
    v.group = at / (kComponents * 32), v.which = kHeld ? at >> 5 : at >> 5 & (kComponents - 1), v.lane = at & 31;
    const int row = (blockIdx.y * kGroups + v.group) * kRows + 2 * (v.lane & 3) + (v.which & 1);
    const bool held = kHeld && v.which > 3;
    v.out = held ? rows.last + (v.lane >> 2) : rows.top(tile, v.lane >> 2) + (v.which & 2 ? 8 : 0);
    v.to = static_cast<size_t>(row) * p.outputs + v.out;
    v.live = at < kCount && row < p.rows && v.out < rows.last + (held ? rows.held : 0);
    return v;
  }
  __device__ __forceinline__ void fetch(const Projection &p, const TileRows<kGated> &rows, int tile) {
    if constexpr (!kGated) {
#pragma unroll
      for (int turn = 0; turn < kTurns; turn++) {
        const Place v = place(p, rows, tile, turn);
        before[turn] = v.live && p.residual ? load_bf16(p.residual + v.to) : 0.f;
        bias[turn] = v.live && p.bias ? load_bf16(p.bias + v.out) : 0.f;
      }
    }
  }
  // factor(row of the block): what its sums are still to be multiplied by.
  template <class Factor>
  __device__ __forceinline__ void store(const Projection &p, const TileRows<kGated> &rows, int tile, const float (*red)[kPartials], Factor factor) {
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      const Place v = place(p, rows, tile, turn);
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

// Weight rows of a block past those of its tiles, in shared memory: on their way since before the wait like a tile's, and
// multiplied beside the first one, their sums in the same order. A warp's slice of each is its own.
template <int kThreads, int kPieces, bool kHeld>
struct HeldRows {
  static constexpr int kMost = kHeld ? 6 : 0, kPitch = kThreads * kPieces / 8 + 4; // rows; chunks of one: they lie on different banks
  static constexpr size_t kBytes = static_cast<size_t>(kMost) * kPitch * 16;
  static_assert(!kHeld || kPieces == 8, "a chunk of a row a lane");
  float4 even = {0.f, 0.f, 0.f, 0.f}, odd = {0.f, 0.f, 0.f, 0.f};
  const uint4 *own; // the lane's columns, a piece every 4 chunks; past the last row of the first one: nobody reads its sums

  // weight: of the first row, at the warp's columns; memory: [kMost][kPitch] chunks.
  __device__ __forceinline__ HeldRows(void *memory, const bf16 *weight, int held, int columns) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    uint4 *const slice = static_cast<uint4 *>(memory) + (threadIdx.x >> 5) * 32;
    own = slice + (g < held ? g : 0) * kPitch + (lane & 3);
#pragma unroll
    for (int r = 0; r < kMost; r++)
      if (r < held) copy_async(slice + r * kPitch + lane, weight + static_cast<size_t>(r) * columns + lane * 8, true);
    if (kHeld) commit_copies();
  }
  __device__ __forceinline__ void await() const {
    wait_copies<0>();
    __syncwarp();
  }
  __device__ __forceinline__ void multiply(int piece, const uint4 &b) {
    const uint4 v = own[piece * 4];
    mma(even, v.x, 0u, v.y, 0u, b.x, b.y);
    mma(odd, v.z, 0u, v.w, 0u, b.z, b.w);
  }
  // Behind a tile's partials: components 4 and 5 of the first tile's.
  __device__ __forceinline__ void store(float *red) const {
    red[4 * kThreads + threadIdx.x] = even.x + odd.x;
    red[5 * kThreads + threadIdx.x] = even.y + odd.y;
  }
};

} // namespace eagle3
