// What warps of a block and blocks of a cluster tell each other: barriers, that of a cluster orders nothing, and an inbox into which others send what they have.
//
// cooperative_groups' barrier makes every thread wait until all it has stored anywhere is done (MEMBAR.ALL.GPU); here what is
// sent counts itself into the receiver's barrier, and nobody reads another block's memory.
#pragma once

#include "common.cuh"

namespace eagle3 {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// A barrier of `threads` threads of a block, by its number: whoever arrives goes on, whoever meets waits for all.
__device__ __forceinline__ void arrive_at(int number, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
__device__ __forceinline__ void meet_at(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// Every thread of the cluster does both, each once; what comes after the wait comes after all blocks have got to the first.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// A barrier of `count` arrivals a phase. One thread makes it and publishes; a barrier of the block follows.
__device__ __forceinline__ void init_barrier(uint64_t *barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives; the phase ends when so many bytes have come besides.
__device__ __forceinline__ void arrive_expecting(uint64_t *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// An inbox for one delivery of so many bytes. One thread opens it, before it arrives at the cluster's barrier.
__device__ __forceinline__ void open_inbox(uint64_t *inbox, int bytes) {
  init_barrier(inbox, 1);
  publish_barriers();
  arrive_expecting(inbox, bytes);
}
// Waits until all of it is there; every thread that reads it does.
__device__ __forceinline__ void wait_inbox(uint64_t *inbox) {
  const uint32_t at = shared_address(inbox);
  uint32_t done = 0;
  while (!done)
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ uint32_t in_block(const void *shared, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(rank));
  return there;
}
// Sends into block `rank`: `to` and `inbox` are where this block has the same.
__device__ __forceinline__ void send(const void *to, const uint64_t *inbox, int rank, const float (&v)[2]) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(in_block(to, rank)),
               "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(in_block(inbox, rank))
               : "memory");
}
__device__ __forceinline__ void send(const void *to, const uint64_t *inbox, int rank, const float (&v)[4]) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(in_block(to, rank)),
               "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])), "r"(__float_as_uint(v[3])),
               "r"(in_block(inbox, rank))
               : "memory");
}

} // namespace eagle3
