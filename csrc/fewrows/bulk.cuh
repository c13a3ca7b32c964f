// Weights that come by bulk copies: a thread asks for whole rows, the copy engine brings them into shared memory past registers and
// L1, and counts their bytes into a barrier. They stream 8 % faster than loads of 16 bytes do (bench/profile.md, line 34), and what
// a warp loads meanwhile is not queued behind them.
#pragma once

#include "cluster.cuh"

namespace eagle3 {

// Of a barrier of this block alone.
__device__ __forceinline__ bool phase_ended(uint64_t *barrier, int parity) {
  uint32_t ended;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(ended)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return ended;
}
__device__ __forceinline__ void await(uint64_t *barrier, int parity) {
  while (!phase_ended(barrier, parity)) {
  }
}
// `bytes`, a multiple of 16 like both addresses.
__device__ __forceinline__ void copy_bulk(void *shared, const void *global, int bytes, uint64_t *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// `bytes`, likewise, into the L2.
__device__ __forceinline__ void prefetch_bulk(const void *global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

constexpr int kPaced = 2; // of a ring's first slots, while rows or another kernel's end are awaited: so many under way (common.cuh, await_load)

// Slots that one warp fills in turn and `readers` warps empty.
template <int kSlots>
struct Ring {
  uint64_t full[kSlots], empty[kSlots];
  // One thread calls it, a barrier of the block follows.
  __device__ __forceinline__ void open(int readers) {
    for (int s = 0; s < kSlots; s++) init_barrier(full + s, 1), init_barrier(empty + s, readers);
    publish_barriers();
  }
  // Which phase of its slot the nth filling is.
  static __device__ __forceinline__ int parity(int n) { return n / kSlots & 1; }
  // By a whole warp, before the nth filling of `bytes` is asked for.
  __device__ __forceinline__ void begin(int n, int bytes) {
    const int slot = n % kSlots;
    if (n >= kSlots) await(empty + slot, parity(n) ^ 1);
    if ((threadIdx.x & 31) == 0) arrive_expecting(full + slot, bytes);
    __syncwarp();
  }
  __device__ __forceinline__ void await_full(int n) { await(full + n % kSlots, parity(n)); }
  // By a whole warp that has read the nth filling.
  __device__ __forceinline__ void leave(int n) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(empty + n % kSlots);
  }
};

} // namespace eagle3
