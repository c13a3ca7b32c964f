// Values that blocks of one launch hand each other through memory: every word travels with the number of its launch, in one
// store of 8 bytes, so who reads it sees from the word itself that it has come. No barrier, no fence, no second look.
// (NCCL's LL protocol; PTX: a 64-bit access is single-copy atomic.)
#pragma once

#include "common.cuh"

namespace eagle3 {

struct Packets {
  uint64_t a, b;
};
__device__ __forceinline__ Packets load_packets(const uint64_t *from) {
  Packets v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];" : "=l"(v.a), "=l"(v.b) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_packet(uint64_t *to, float value, unsigned tag) {
  const uint64_t packet = static_cast<uint64_t>(tag) << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(packet) : "memory");
}
__device__ __forceinline__ bool carries(uint64_t packet, unsigned tag) { return static_cast<unsigned>(packet >> 32) == tag; }
__device__ __forceinline__ float value_of(uint64_t packet) { return __uint_as_float(static_cast<uint32_t>(packet)); }

} // namespace eagle3
