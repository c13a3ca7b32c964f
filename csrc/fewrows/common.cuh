// What the few-row kernels share: loads past L1, tensor-core products with weights as M and rows as N, sums over warps, dependent
// launch.
//
// Rows come in groups of kRows. Weights are the 16 rows of an mma's A, activations its 8 columns: a row's sums follow from
// the row alone, in one order whatever rides along. Columns are dealt to the warps of a block in contiguous slices, a lane
// takes 16 bytes of every piece of 32 columns: the mma's own order of k, permuted alike in both operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "../launch/launch.cuh"

namespace eagle3 {

using bf16 = __nv_bfloat16;

constexpr int kMostExperts = 512; // of a layer
constexpr int kRows = 8;     // rows of a group: the N of an mma
constexpr int kPiece = 32;   // columns of a piece: two mma of 16
constexpr int kOutputs = 16; // weight rows of a tile: the M of an mma
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Dependent launch: what precedes `wait` reads nothing that an earlier kernel of the chain writes. `launch` lets the next
// kernel of the stream begin; it still waits for this one's end where it calls `wait`.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The thread's number, asked for where it is used: what follows from it takes no register in between.
__device__ __forceinline__ int fresh_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Activations are read at L2: another kernel wrote them while this block may already have been resident.
__device__ __forceinline__ uint4 load_rows(const void *p) {
  uint4 r;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p)
               : "memory");
  return r;
}
// Without a branch: loads of several rows are all under way before the first one is used. Where it is not live, r holds anything.
__device__ __forceinline__ void load_rows_if(uint4 &r, const void *p, bool live) {
  asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %5, 0;\n@live ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p), "r"(static_cast<int>(live))
               : "memory");
}
__device__ __forceinline__ float load_float(const float *p) {
  float r;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ int load_int(const int *p) {
  int r;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ void store_bf16(bf16 *p, float v) {
  const bf16 rounded = __float2bfloat16(v);
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(*reinterpret_cast<const unsigned short *>(&rounded)) : "memory");
}
// As it is stored: who needs it late turns it into a number late, and nothing waits for it before.
__device__ __forceinline__ uint32_t load_half(const bf16 *p) {
  uint32_t r;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ float load_bf16(const bf16 *p) { return __uint_as_float(load_half(p) << 16); }
__device__ __forceinline__ int64_t load_long(const int64_t *p) {
  int64_t r;
  asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(r) : "l"(p) : "memory");
  return r;
}
// Weights are read once and never written while a cycle runs. Not `.nc`: ptxas moves such loads behind griddepcontrol.wait.
__device__ __forceinline__ uint4 load_weights(const void *p) {
  uint4 r;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}

// Goes on when what was loaded has come. The memory answers at its own rate however much is asked of it, and what many blocks ask for
// too early is a queue that everything else waits in: rows, packets, the end of the kernel before. So who has time asks for the next
// part when an earlier one is there; 32 to 64 KB a multiprocessor under way are enough. blockDim.z is 1, which ptxas does not know.
__device__ __forceinline__ void await_load(const uint4 &r) {
  if (r.w & (blockDim.z - 1)) __nanosleep(1);
}

// Eight of a norm's gains, from `at` on; ones where there is no norm, or no such column.
__device__ __forceinline__ uint4 load_gains(const bf16 *gamma, int at, bool inside = true) {
  constexpr uint32_t kOnes = 0x3f803f80u; // two of them, in bf16
  return gamma && inside ? load_weights(gamma + at) : make_uint4(kOnes, kOnes, kOnes, kOnes);
}

// Without a branch; where it is not live, r stays as it is.
__device__ __forceinline__ void load_weights_if(uint4 &r, const void *p, bool live) {
  asm volatile("{.reg .pred live;\nsetp.ne.b32 live, %5, 0;\n@live ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
               : "l"(p), "r"(static_cast<int>(live))
               : "memory");
}

// 16 bytes into shared memory; zeros where `inside` is false, and then nothing is read.
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool inside) {
  const uint32_t to = shared_address(shared);
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
// 4 bytes, likewise.
__device__ __forceinline__ void copy_word(int *shared, const int *global) {
  const uint32_t to = shared_address(shared);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Adds one and says how many there were; what this block wrote before is seen by whoever arrives later.
__device__ __forceinline__ unsigned arrive(unsigned *count) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

__device__ __forceinline__ float low(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ uint32_t pack(float a, float b) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t *>(&v);
}
__device__ __forceinline__ float rounded(float v) { return __bfloat162float(__float2bfloat16(v)); }
__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }
// Unsigned keys that sort like the values, NaN like -inf; 0 is below all of them.
__device__ __forceinline__ uint32_t sortable(float v) {
  if (!(v == v)) v = -INFINITY;
  const uint32_t raw = __float_as_uint(v == 0.f ? 0.f : v); // -0 equals 0
  return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}
__device__ __forceinline__ float sorted_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(kAll, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(kAll, v, o));
  return v;
}
// Where a block's even share of `count` begins; 64-bit divisions are long code. count * blocks stays below 2^32.
__device__ __forceinline__ int share_begin(int count, unsigned block) {
  return static_cast<int>(static_cast<unsigned>(count) * block / gridDim.x);
}

// c[16, 8] += a[16, 16] b[16, 8]. Lane (g, t) = (lane / 4, lane % 4) holds c at (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
__device__ __forceinline__ void mma(float4 &c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// A piece: rows g and g+8 of A, column g of B, 16 bytes each.
__device__ __forceinline__ void mma_piece(float4 &c, const uint4 &top, const uint4 &bottom, const uint4 &b) {
  mma(c, top.x, bottom.x, top.y, bottom.y, b.x, b.y);
  mma(c, top.z, bottom.z, top.w, bottom.w, b.z, b.w);
}
// Four 8x8 matrices; lane l points at row l mod 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const bf16 *at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(at))
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const bf16 *at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(at))
               : "memory");
}
__device__ __forceinline__ float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Reads columns of row `row` of a group (8 consecutive ones a piece and lane) into B operands; rows past the last are zeros.
template <int kPieces>
__device__ __forceinline__ void load_group(uint4 (&b)[kPieces], const bf16 *x, bool live) {
#pragma unroll
  for (int i = 0; i < kPieces; i++) b[i] = live ? load_rows(x + i * kPiece) : make_uint4(0, 0, 0, 0);
}

// Sum of products of two rows' columns, in four chains: one alone would wait for itself.
template <int kPieces>
__device__ __forceinline__ float product_of(const uint4 (&a)[kPieces], const uint4 (&b)[kPieces]) {
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kPieces; i++) {
    const uint32_t *x = reinterpret_cast<const uint32_t *>(&a[i]), *y = reinterpret_cast<const uint32_t *>(&b[i]);
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] = fmaf(high(x[j]), high(y[j]), fmaf(low(x[j]), low(y[j]), sum[j]));
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The warps' partial tiles, [4][kThreads] floats: every warp writes its own, then the first 128 threads each sum one output of
// one row over the warps in ascending order. Threads share the work evenly, since all of them wait for the slowest.
template <int kThreads>
__device__ __forceinline__ void store_partial(float *red, const float4 &c) {
  red[threadIdx.x] = c.x;
  red[kThreads + threadIdx.x] = c.y;
  red[2 * kThreads + threadIdx.x] = c.z;
  red[3 * kThreads + threadIdx.x] = c.w;
}
// Sum for component `which` of lane `lane`: 0, 1 are (row g of the weights, rows 2t, 2t + 1), 2 and 3 the same of row g + 8.
template <int kThreads>
__device__ __forceinline__ float sum_partials(const float *red, int which, int lane) {
  const float *from = red + which * kThreads + lane;
  float total = from[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; w++) total += from[w * 32];
  return total;
}

// Launch with dependent launch allowed, so that the kernel's beginning overlaps its predecessor's end. carveout: percent of a
// multiprocessor's memory that the kernel would have shared; one kernel always asks for the same.
template <class... Parameters, class... Arguments>
inline cudaError_t launch_carved(int carveout, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, cudaStream_t stream,
                                 int cluster, Arguments... arguments) {
  // static shared memory counts towards the 48 KB that need no asking
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (e != cudaSuccess) return e;
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout);
  return launch_chained(kernel, grid, threads, shared, stream, cluster, true, arguments...);
}
// One carve-out for all: a multiprocessor must drain before it changes its own. It leaves half to L1, where plain loads in flight
// live: gate and up take 1.3 times as long with all of it shared.
constexpr int kCarveout = 44;
constexpr size_t kCarved = 130 * 1024; // which is at least so much for the blocks of a multiprocessor, beside a few hundred bytes of statics
template <class... Parameters, class... Arguments>
inline cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, cudaStream_t stream,
                          int cluster, Arguments... arguments) {
  return launch_carved(kCarveout, kernel, grid, threads, shared, stream, cluster, arguments...);
}

} // namespace eagle3
