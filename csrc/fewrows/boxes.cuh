// Rows of keys and values of long tables by tensor copies: a thread asks for the rows of a page, the copy engine lays them into
// shared memory, 16-byte chunks of a row at places that differ by the row's number, and counts their bytes into a barrier. No
// address is computed for a row, and what has been read is asked for anew without a barrier of those who read.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "bulk.cuh"
#include "dealing.cuh"
#include "nodes.cuh"

namespace eagle3 {

// Keys and values as the copy engine sees them: [slots / 8, halves of 64 columns, 2, 4, 64], so that it lays row r of every 8 at line
// r mod 2 * 4 + r / 2: two neighbouring rows, which are read at a time, then differ in the upper half of their chunks.
struct Boxes {
  CUtensorMap keys, values;
  int log_rows; // that one copy brings: 2^log_rows, those of a tile that lie in one page, where they are multiples of 8, else one
};
// What short tables have: no copies.
struct NoBoxes {
  char keys, values, log_rows;
};

// half: of 64 columns, over all groups; row: the first of the copy, a slot.
template <class Map>
__device__ __forceinline__ void copy_box(void *shared, const Map *map, int half, int row, uint64_t *barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(0), "r"(row >> 1 & 3), "r"(row & 1), "r"(half), "r"(row >> 3), "r"(shared_address(barrier))
      : "memory");
}

// Whether the tiles of a side have come, and whether those who read them have done so; pages of the tile to be asked for next.
template <int kDepth>
struct Copies {
  uint64_t full[kDepth], empty[kDepth];
  int pages[32];
  int depth; // stages in use
};

// The tiles of a side of a long table on their way, one a stage: a warp asks, all of the side read. They go by their first position.
template <int kWidth, int kDepth, class Maps>
struct Stream {
  static constexpr int kOperand = kTile * kWidth; // elements of a tile's keys, or of its values
  const Attention &p;
  const Maps &maps;
  const int *pages; // of the sequence
  bf16 *stages;
  Copies<kDepth> &copies;
  int group;

  // By one thread, before it asks; a barrier of the block follows.
  __device__ __forceinline__ void open(int readers, int depth) const {
    copies.depth = depth;
    for (int i = 0; i < kDepth; i++) init_barrier(copies.full + i, 1), init_barrier(copies.empty + i, readers);
    publish_barriers();
  }
  // Where the number of the page is that this lane's copy of a tile is in, or null: it is past the table.
  __device__ __forceinline__ const int *page_of(int at) const {
    const unsigned row = at + ((threadIdx.x & 31) << maps.log_rows), column = row / static_cast<unsigned>(p.page);
    return column < static_cast<unsigned>(p.columns) ? pages + column : nullptr;
  }
  // Those numbers for its first tiles, from tile `start` on.
  __device__ __forceinline__ void look_up(int (&page)[3], int start) const {
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const int *const from = page_of((start + i * kNext<false>) * kTile);
      page[i] = from ? *from : 0;
    }
  }
  // By a warp, before it asks for that tile with pages that it looks ahead for.
  __device__ __forceinline__ void look_ahead(int at) const {
    const int *const from = page_of(at);
    if (from) copy_word(copies.pages + (threadIdx.x & 31), from);
    commit_copies();
  }
  __device__ __forceinline__ int looked_up() const {
    wait_copies<0>();
    return copies.pages[threadIdx.x & 31];
  }
  // By a warp: the rows of a tile below the prefix into a stage that is empty. page: that of this lane's copy.
  __device__ __forceinline__ void ask(int stage, int at, int page, int prefix) const {
    const int lane = threadIdx.x & 31, log = maps.log_rows, count = max(0, min(kTile, prefix - at) + (1 << log) - 1) >> log;
    uint64_t *const full = copies.full + stage;
    if (lane == 0) arrive_expecting(full, (count << log) * 2 * kWidth * static_cast<int>(sizeof(bf16)));
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      const unsigned row = at + (i << log), column = row / static_cast<unsigned>(p.page);
      if (i != lane) page = pages[column]; // single rows: half of them without looking ahead
      const int slot = page * p.page + static_cast<int>(row - column * p.page); // below 2^31, as no GPU's memory holds more
#pragma unroll 1
      for (int half = 0; half < (log ? 1 : kWidth / 64); half++) {
        bf16 *const to = stages + stage * 2 * kOperand + Layout<kWidth, true>::line(i << log, half);
        copy_box(to, &maps.keys, group * (kWidth / 64) + half, slot, full);
        copy_box(to + kOperand, &maps.values, group * (kWidth / 64) + half, slot, full);
      }
    }
  }

  // Before the wait. The first blocks begin beside the first projection, which leaves them a third of the multiprocessors
  // (whole_grid), and have time: each asks for a tile when the one before has come, for what is under way is before that projection's
  // weights. Blocks that begin where it ends ask for so many at once, and for the next when the first has come: queries come meanwhile.
  static constexpr int kAtOnce = 2;
  static_assert(kDepth == kAtOnce + 1 || kDepth == 1, "one is left");
  static __device__ __forceinline__ bool early() {
    unsigned multiprocessors;
    asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
    return blockIdx.y == 0 && 3 * blockIdx.x < multiprocessors;
  }
  __device__ __forceinline__ void begin(const int (&page)[3], int start, int depth, int prefix) const {
    const bool paced = early();
    const int many = paced ? depth : kAtOnce;
#pragma unroll 1
    for (int i = 0; i < many; i++) {
      const int at = (start + i * kNext<false>) * kTile;
      if (paced && i && at < prefix) await(copies.full + i - 1, 0);
      ask(i, at, i == 0 ? page[0] : i == 1 ? page[1] : page[2], prefix);
    }
    look_ahead((start + many * kNext<false>) * kTile);
  }
  // Behind the wait.
  __device__ __forceinline__ void go_on(int start, int prefix) const {
    if (early() || copies.depth == kAtOnce) return;
    await(copies.full, 0);
    const int next = start + kAtOnce * kNext<false>;
    ask(kAtOnce, next * kTile, looked_up(), prefix);
    look_ahead((next + kNext<false>) * kTile);
  }
};

// Planes of keys and values are [slots, groups, width]. Errors: a driver without such maps, planes that are not aligned.
inline cudaError_t make_boxes(Boxes &boxes, const Attention &p, int width) {
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (e != cudaSuccess) return e;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  boxes.log_rows = 0;
  while (p.page % 8 == 0 && p.page % (2 << boxes.log_rows) == 0 && 2 << boxes.log_rows <= kTile) boxes.log_rows++;
  const cuuint64_t pitch = static_cast<cuuint64_t>(p.groups) * width * sizeof(bf16), halves = width / 64;
  const cuuint64_t sizes[] = {64, 4, 2, p.groups * halves, (static_cast<cuuint64_t>(p.slots) + 7) / 8};
  const cuuint64_t strides[] = {2 * pitch, pitch, 64 * sizeof(bf16), 8 * pitch};
  const cuuint32_t rows[] = {64, 4, 2, static_cast<cuuint32_t>(halves), (1u << boxes.log_rows) / 8}, one[] = {64, 1, 1, 1, 1};
  const cuuint32_t all[] = {1, 1, 1, 1, 1};
  auto encode = [&](CUtensorMap &map, bf16 *plane) {
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, plane, sizes, strides, boxes.log_rows ? rows : one, all, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  return encode(boxes.keys, p.keys) || encode(boxes.values, p.values) ? cudaErrorInvalidValue : cudaSuccess;
}

} // namespace eagle3
