// The sum over ranks of rows of bf16, with the residual and the RMS norm that follow it: fp32, in rank order, rounded once,
// so that all ranks hold the same bits and a row's do not depend on the other rows. kernels/peers.py has the twin.
//
// One shot: everybody sends its rows to everybody and adds up all of them. Two shots, for many rows: row i goes to rank
// i % size alone, which adds it up and sends the sum to everybody. The arithmetic, and so every bit, is the same. (One shot
// with the norm took 265 us at 16 rows of 7168 on two H200s, and the cause is not known: kernels/peers.py takes
// two shots there.)
//
// Long rows are cut into parts, a block each, so that a block has little to send; the blocks of a row form a cluster, which
// adds up the squares of its norm through each other's shared memory.
#pragma once

#include "../launch/launch.cuh"
#include "links.cuh"

namespace eagle3 {

constexpr int kPer = 8;  // columns of a thread: 16 bytes
constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;
constexpr int kMostParts = 8;      // of a row: the largest cluster that every GPU with clusters takes
constexpr int kMostSent = 8192;    // bytes that a block sends, where there are multiprocessors for more blocks

// x, residual (or null), y: [rows, columns] bf16. normed = y / rms(y) * gamma, where gamma [columns] is given.
struct Reduction {
  const __nv_bfloat16 *x, *residual, *gamma;
  __nv_bfloat16 *y, *normed;
  float eps;
  int rows, columns;
};

__device__ __forceinline__ void unpack(uint4 v, float (&f)[kPer]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f[2 * i] = __uint_as_float(words[i] << 16);
    f[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ uint4 rounded(const float (&f)[kPer]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t *>(&pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ float across_warp(float v) {
#pragma unroll
  for (int apart = kWarp / 2; apart; apart /= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, apart));
  return v;
}

// The barrier of all threads of a row's blocks, in two halves.
__device__ __forceinline__ void row_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void row_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}
// *place = v in the shared memory of all of a row's blocks. A warp calls it, all lanes with the same.
__device__ __forceinline__ void store_for_row(float *place, float v) {
  const uint32_t lane = threadIdx.x % kWarp;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) {
    if (lane >= gridDim.x) return;
    uint32_t theirs = static_cast<uint32_t>(__cvta_generic_to_shared(place));
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(theirs) : "r"(lane));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(theirs), "f"(v) : "memory");
    return;
  }
#endif
  if (lane == 0) *place = v;
}

// One row's norm. The sum of squares: a thread's in order, then halving trees over lanes and over the row's warps, whose
// sums `partial` takes. All threads of the row's blocks call it, with another `partial` than for the row before.
__device__ __forceinline__ void norm_row(const Reduction &r, uint4 sum, uint4 gains, int row, int column, bool inside,
                                         float *partial) {
  float f[kPer] = {}, squares = 0.f;
  if (inside) {
    unpack(sum, f);
    squares = __fmul_rn(f[0], f[0]);
#pragma unroll
    for (int i = 1; i < kPer; i++) squares = __fadd_rn(squares, __fmul_rn(f[i], f[i]));
  }
  const int lane = threadIdx.x % kWarp, warps = gridDim.x * blockDim.x / kWarp;
  store_for_row(partial + column / (kPer * kWarp), across_warp(squares));
  row_arrive();
  row_wait();
  const float total = across_warp(lane < warps ? partial[lane] : 0.f);
  const float scale = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(total, static_cast<float>(r.columns)), r.eps)));
  if (!inside) return;
  float gain[kPer];
  unpack(gains, gain);
#pragma unroll
  for (int i = 0; i < kPer; i++) f[i] = __fmul_rn(__fmul_rn(f[i], scale), gain[i]);
  *reinterpret_cast<uint4 *>(r.normed + static_cast<size_t>(row) * r.columns + column) = rounded(f);
}

__device__ __forceinline__ uint4 load16(const __nv_bfloat16 *p) { return __ldcg(reinterpret_cast<const uint4 *>(p)); }

// This thread's columns of a row summed over ranks: `own` of this rank, the others' from their places `at` of the inbox,
// last the residual where there is one.
template <int kRanks>
__device__ __forceinline__ uint4 add_up(const Links &l, const Places &places, Wait &wait, uint32_t number, uint4 own, int at,
                                        int column, uint4 residual, bool more) {
  uint4 v[kRanks];
  bool all;
  int missing = 0;
  do {
    all = true;
#pragma unroll
    for (int rank = 0; rank < kRanks; rank++) {
      if (rank == l.rank) {
        v[rank] = own;
      } else if (!arrived(l.inbox[l.rank] + places.part(number, rank, at) + column / 2, v[rank], number)) {
        all = false;
        missing = rank;
      }
    }
  } while (!all && wait.again(missing));
  float total[kPer], part[kPer];
  unpack(v[0], total);
#pragma unroll
  for (int rank = 1; rank < kRanks; rank++) {
    unpack(v[rank], part);
#pragma unroll
    for (int i = 0; i < kPer; i++) total[i] = __fadd_rn(total[i], part[i]);
  }
  if (more) {
    unpack(residual, part);
#pragma unroll
    for (int i = 0; i < kPer; i++) total[i] = __fadd_rn(total[i], part[i]);
  }
  return rounded(total);
}

// A block takes its part, blockIdx.x, of rows blockIdx.y, + gridDim.y, …; it sends all it has to before it waits for
// anything, and all blocks are resident at once: nothing waits for what waits for it.
template <int kRanks, bool kTwoShots>
__global__ void __launch_bounds__(kMostThreads) reduce_rows(const __grid_constant__ Links l, const __grid_constant__ Reduction r) {
  __shared__ float partial[2][kWarp];
  const Places places(l);
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kPer;
  const bool inside = column < r.columns, more = r.residual != nullptr, norm = r.gamma != nullptr;
  const auto owner = [](int row) { return row % kRanks; };
  const uint4 none = make_uint4(0, 0, 0, 0);
  const uint4 gains = norm && inside ? __ldg(reinterpret_cast<const uint4 *>(r.gamma + column)) : none;
  if (norm) row_arrive();  // that it has begun, and may be written to
  after_predecessor();
  const uint32_t number = call_number(l);
  Wait wait(l);

  for (int row = blockIdx.y; row < r.rows && inside; row += gridDim.y) {
    const uint4 own = load16(r.x + static_cast<size_t>(row) * r.columns + column);
    if (kTwoShots) {
      if (owner(row) == l.rank) continue;
      send(l.inbox[owner(row)] + places.part(number, l.rank, row / kRanks) + column / 2, own, number);
    } else {
#pragma unroll
      for (int away = 1; away < kRanks; away++) {
        const int peer = (l.rank + away) % kRanks;
        send(l.inbox[peer] + places.part(number, l.rank, row) + column / 2, own, number);
      }
    }
  }
  number_read(l, blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
  if (kTwoShots) {
    for (int row = blockIdx.y; row < r.rows && inside; row += gridDim.y) {
      if (owner(row) != l.rank) continue;
      const size_t at = static_cast<size_t>(row) * r.columns + column;
      const uint4 own = load16(r.x + at), residual = more ? load16(r.residual + at) : none;
      const uint4 sum = add_up<kRanks>(l, places, wait, number, own, row / kRanks, column, residual, more);
#pragma unroll
      for (int away = 1; away < kRanks; away++) {
        const int peer = (l.rank + away) % kRanks;
        send(l.inbox[peer] + places.whole(number, kRanks, row) + column / 2, sum, number);
      }
      *reinterpret_cast<uint4 *>(r.y + at) = sum;
    }
  }
  if (norm) row_wait();
  for (int row = blockIdx.y, turn = 0; row < r.rows; row += gridDim.y, turn ^= 1) {
    const size_t at = static_cast<size_t>(row) * r.columns + column;
    uint4 sum = none;
    if (inside) {
      if (!kTwoShots) {
        const uint4 own = load16(r.x + at), residual = more ? load16(r.residual + at) : none;
        sum = add_up<kRanks>(l, places, wait, number, own, row, column, residual, more);
        *reinterpret_cast<uint4 *>(r.y + at) = sum;
      } else if (owner(row) == l.rank) {
        sum = load16(r.y + at);  // this thread wrote it
      } else {
        const uint64_t *from = l.inbox[l.rank] + places.whole(number, kRanks, row) + column / 2;
        while (!arrived(from, sum, number) && wait.again(owner(row))) {
        }
        *reinterpret_cast<uint4 *>(r.y + at) = sum;
      }
    }
    if (norm) norm_row(r, sum, gains, row, column, inside, partial[turn]);
  }
}

// Everybody's `words` 4-byte words side by side: y [size, words].
__global__ void __launch_bounds__(kMostThreads) gather_words(const __grid_constant__ Links l, const uint32_t *x, uint32_t *y, int words) {
  after_predecessor();
  const uint32_t number = call_number(l);
  const Places places(l);
  const int step = gridDim.y * blockDim.x, first = blockIdx.y * blockDim.x + threadIdx.x;
  Wait wait(l);
  for (int at = first * 2; at < words; at += step * 2) {
    const uint64_t mark = static_cast<uint64_t>(number) << 32;
    const uint32_t a = __ldcg(x + at), b = at + 1 < words ? __ldcg(x + at + 1) : 0;
    for (int away = 1; away < l.size; away++) {
      const int peer = (l.rank + away) % l.size;
      store_words(l.inbox[peer] + places.part(number, l.rank, 0) + at, mark | a, mark | b);
    }
    y[static_cast<size_t>(l.rank) * words + at] = a;
    if (at + 1 < words) y[static_cast<size_t>(l.rank) * words + at + 1] = b;
  }
  number_read(l, blockIdx.y, gridDim.y);
  for (int at = first * 2; at < words; at += step * 2) {
    for (int away = 1; away < l.size; away++) {
      const int peer = (l.rank + l.size - away) % l.size;
      uint64_t a, b;
      do {
        load_words(l.inbox[l.rank] + places.part(number, peer, 0) + at, a, b);
      } while (((a >> 32) != number || (b >> 32) != number) && wait.again(peer));
      y[static_cast<size_t>(peer) * words + at] = static_cast<uint32_t>(a);
      if (at + 1 < words) y[static_cast<size_t>(peer) * words + at + 1] = static_cast<uint32_t>(b);
    }
  }
}

template <int kRanks>
inline cudaError_t reduce(const Links &l, const Reduction &r, int two_shots, int blocks, cudaStream_t stream) {
  const int warps = (r.columns / kPer + kWarp - 1) / kWarp;
  const int sent = r.columns / 2 * static_cast<int>(sizeof(uint64_t)) * (kRanks - 1);  // of a row
  const auto fit = [&](int parts) { return parts <= kMostParts && parts <= warps && parts * r.rows <= blocks; };
  int parts = 1;
  while (l.hopper && sent > parts * kMostSent && fit(2 * parts)) parts *= 2;
  const int threads = (warps + parts - 1) / parts * kWarp, high = r.rows < blocks ? r.rows : blocks;
  return two_shots ? launch_chained(reduce_rows<kRanks, true>, dim3(parts, high), threads, 0, stream, parts, l.hopper, l, r)
                   : launch_chained(reduce_rows<kRanks, false>, dim3(parts, high), threads, 0, stream, parts, l.hopper, l, r);
}

// blocks: at most as many as are resident at once, one a multiprocessor. cudaErrorInvalidValue for what does not fit.
inline cudaError_t reduce(const Links &l, const Reduction &r, int two_shots, int blocks, cudaStream_t stream) {
  const int most = two_shots ? l.rows * l.size : l.rows;
  if (r.columns > l.columns || r.columns % kPer || r.columns > kPer * kMostThreads) return cudaErrorInvalidValue;
  if (r.rows < (two_shots ? l.size : 1) || r.rows > most || (r.gamma == nullptr) != (r.normed == nullptr)) return cudaErrorInvalidValue;
  switch (l.size) {
    case 2: return reduce<2>(l, r, two_shots, blocks, stream);
    case 3: return reduce<3>(l, r, two_shots, blocks, stream);
    case 4: return reduce<4>(l, r, two_shots, blocks, stream);
    case 5: return reduce<5>(l, r, two_shots, blocks, stream);
    case 6: return reduce<6>(l, r, two_shots, blocks, stream);
    case 7: return reduce<7>(l, r, two_shots, blocks, stream);
    case 8: return reduce<8>(l, r, two_shots, blocks, stream);
    default: return cudaErrorInvalidValue;
  }
}

inline cudaError_t gather(const Links &l, const uint32_t *x, uint32_t *y, int words, int blocks, cudaStream_t stream) {
  constexpr int threads = 256;
  if (words < 1 || words > l.rows * (l.columns / 2) || l.size > kMostRanks) return cudaErrorInvalidValue;
  const int needed = (words + 2 * threads - 1) / (2 * threads);
  return launch_chained(gather_words, dim3(1, needed < blocks ? needed : blocks), threads, 0, stream, 1, l.hopper, l, x, y, words);
}

}  // namespace eagle3
