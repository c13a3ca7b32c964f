// What ranks of one host exchange through each other's memory: words of 8 bytes, 4 of data and 4 of the call's number, so
// that a word that has arrived says so itself (no fence, no flag to set or clear). A rank writes into the inboxes of the
// others and reads its own.
//
// A call's number counts up on the device (graph replays need no host), the same on all ranks, and picks one of two halves
// of every inbox. Who writes call n + 2 into a half has finished call n + 1, for which it had to receive from everyone, who
// had therefore finished call n and read that half. A call in which a rank would not hear from all others is not offered.
// So a call is one trip over the links, and nothing is waited for at its end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace eagle3 {

constexpr int kLinksVersion = 2;
constexpr int kMostRanks = 8;
constexpr int kSpins = 256;  // looks at an inbox between two looks at the clock and the host's flag
constexpr int kShares = 1024;  // of a call's number: more than a call has blocks

// One rank's end of the links. inbox[r]: rank r's memory as this process sees it. state (device): calls so far, in shares;
// whether a wait was given up. abort (host memory): the latter, for the host to read or to set; 1 + the rank that was
// waited for. limit: nanoseconds that a wait may take. rows: of a sender's place.
struct Links {
  uint64_t *inbox[kMostRanks];
  uint64_t *state;
  int *abort;
  size_t limit;
  int rank, size, rows, columns;
  int hopper;  // compute capability 9.0 or more: blocks form clusters, launches begin before their predecessor's end
};

__device__ __forceinline__ void store_words(uint64_t *to, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void load_words(const uint64_t *from, uint64_t &a, uint64_t &b) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}
__device__ __forceinline__ uint64_t load_state(const uint64_t *from) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
// Dependent launch, where the GPU has it: nothing before this reads what an earlier kernel writes.
__device__ __forceinline__ void after_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes, as four words of call `number`.
__device__ __forceinline__ void send(uint64_t *to, uint4 v, uint32_t number) {
  const uint64_t mark = static_cast<uint64_t>(number) << 32;
  store_words(to, mark | v.x, mark | v.y);
  store_words(to + 2, mark | v.z, mark | v.w);
}
// Whether the four words of call `number` are there; v: their 16 bytes.
__device__ __forceinline__ bool arrived(const uint64_t *from, uint4 &v, uint32_t number) {
  uint64_t a, b, c, d;
  load_words(from, a, b);
  load_words(from + 2, c, d);
  v = make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(b), static_cast<uint32_t>(c), static_cast<uint32_t>(d));
  return (a >> 32) == number && (b >> 32) == number && (c >> 32) == number && (d >> 32) == number;
}

// One thread's patience, over all its waits of a call.
struct Wait {
  const Links &links;
  uint64_t since = 0;
  int looks = 0;
  bool over;

  __device__ explicit Wait(const Links &l) : links(l), over(load_state(l.state + 1) != 0) {}

  // Whether to look again for what `peer` sends. Once over, a thread waits for nothing more in this call, and later calls
  // begin that way: their sums mean nothing, and the host is told.
  __device__ bool again(int peer) {
    if (over) return false;
    if (++looks % kSpins) return true;
    const uint64_t now = nanoseconds();
    since = since ? since : now;
    int told;
    asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(told) : "l"(links.abort) : "memory");
    if (told == 0 && now - since < links.limit) return true;
    if (told == 0) asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(links.abort), "r"(1 + peer) : "memory");
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(links.state + 1), "l"(1ull) : "memory");
    over = true;
    return false;
  }
};

// Places of an inbox, in words. First what each sender sends of its rows, then whole rows that their owners send.
struct Places {
  size_t row, sender, half;
  __host__ __device__ Places(const Links &l)
      : row(l.columns / 2), sender(row * l.rows), half(sender * l.size + row * l.rows * l.size) {}
  __device__ size_t part(uint32_t number, int from, int at) const { return (number & 1) * half + from * sender + at * row; }
  __device__ size_t whole(uint32_t number, int size, int at) const { return part(number, size, at); }
};

// This call's number: 31 bits that go up, and one that memory which nobody wrote does not have.
__device__ __forceinline__ uint32_t call_number(const Links &links) {
  return static_cast<uint32_t>(load_state(links.state) / kShares) | 0x80000000u;
}

// This block, one of `blocks`, has read the number: once all have, the next call's is there. All threads of it call this.
// Nothing waits for the addition, so that no call ends with a trip to memory.
__device__ __forceinline__ void number_read(const Links &links, int block, int blocks) {
  __syncthreads();
  const unsigned long long share = block ? 1 : kShares - (blocks - 1);
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long *>(links.state), share);
}

}  // namespace eagle3
