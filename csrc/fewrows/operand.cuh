// What a product's operands are where weights come straight into registers: tiles of weights, a block's rows normed and laid out as
// B, and the products of both.
#pragma once

#include "common.cuh"

namespace eagle3 {

// A tile of 16 weight rows in registers, a warp's slice of its columns or the first kDepth pieces of it: while a piece is
// multiplied, the one that will follow in its place is on its way.
template <int kDepth>
struct Tile {
  uint4 top[kDepth], bottom[kDepth];
  __device__ __forceinline__ void fetch(int i, const bf16 *from, const bf16 *below) {
    top[i] = load_weights(from + i * kPiece);
    bottom[i] = load_weights(below + i * kPiece);
  }
  __device__ __forceinline__ void fetch(const bf16 *from, const bf16 *below) {
#pragma unroll
    for (int i = 0; i < kDepth; i++) fetch(i, from, below);
  }
  // The same, never more than kAhead pieces under way, of which none is at its end.
  template <int kAhead>
  __device__ __forceinline__ void fetch_paced(const bf16 *from, const bf16 *below) {
#pragma unroll
    for (int i = 0; i < kDepth; i += kAhead) {
      if (i) await_load(bottom[i - 1]);
#pragma unroll
      for (int j = i; j < i + kAhead && j < kDepth; j++) fetch(j, from, below);
    }
    await_load(bottom[kDepth - 1]);
  }
};

// A piece of a row times a norm's gains, rounded once; its squares are added to `sum`. The row's own factor comes with the sums.
__device__ __forceinline__ uint4 gained(const uint4 &x, const uint4 &gains, float &sum) {
  uint4 out;
  const uint32_t *v = reinterpret_cast<const uint32_t *>(&x);
  const __nv_bfloat162 *pair = reinterpret_cast<const __nv_bfloat162 *>(&x), *gain = reinterpret_cast<const __nv_bfloat162 *>(&gains);
  __nv_bfloat162 *o = reinterpret_cast<__nv_bfloat162 *>(&out);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    sum = fmaf(high(v[j]), high(v[j]), fmaf(low(v[j]), low(v[j]), sum));
    o[j] = __hmul2(pair[j], gain[j]);
  }
  return out;
}
// A piece of a row whose norm's factor is known, times factor and gains, rounded once.
__device__ __forceinline__ uint4 normed_piece(uint4 v, float factor, const uint4 &gains) {
  uint32_t *w = reinterpret_cast<uint32_t *>(&v);
  const uint32_t *gain = reinterpret_cast<const uint32_t *>(&gains);
#pragma unroll
  for (int j = 0; j < 4; j++) w[j] = pack(low(w[j]) * factor * low(gain[j]), high(w[j]) * factor * high(gain[j]));
  return v;
}
// Eight rows' sums over the warp, each in the same order: lane l gets that of row l / 4.
__device__ __forceinline__ float sum_of_rows(float (&v)[kRows]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = kRows / 2, o = 16; n; n >>= 1, o >>= 1) {
    const bool upper = lane & o;
#pragma unroll
    for (int j = 0; j < n; j++) v[j] = (upper ? v[j + n] : v[j]) + __shfl_xor_sync(kAll, upper ? v[j] : v[j + n], o);
  }
  v[0] += __shfl_xor_sync(kAll, v[0], 2);
  return v[0] + __shfl_xor_sync(kAll, v[0], 1);
}
// The same of the first `live` rows, kept at their numbers: of one row alone in fewer steps.
__device__ __forceinline__ void keep_sums(float (&v)[kRows], int live, float *to) {
  const int lane = threadIdx.x & 31;
  if (live == 1) {
    const float total = warp_sum(v[0]);
    if (lane == 0) to[0] = total;
  } else {
    const float total = sum_of_rows(v);
    if ((lane & 3) == 0) to[lane >> 2] = total;
  }
}

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

// A block's rows as B operands: the first group in registers where they have room for it, others in shared memory. A single
// staged group stays there, which leaves registers to the weights; of several groups the first one's last kAside pieces do too.
template <int kThreads, int kPieces, int kGroups, bool kStaged = false, int kAside = 0>
struct Operand {
  static constexpr int kOutside = kPieces > 8 || (kStaged && kGroups == 1) ? kGroups : kGroups - 1; // groups in shared memory
  static constexpr int kWarps = kThreads / 32, kColumns = kThreads * kPieces, kChunks = kColumns / 8;
  static constexpr int kOwn = (kChunks + kThreads - 1) / kThreads; // chunks of a row that pass through a thread
  static constexpr int kPitch = kChunks + 4; // chunks of 8 columns; neighbouring rows lie on different banks
  static constexpr int kFirst = kOutside == kGroups ? 0 : kPieces - kAside;  // pieces of the first group in registers
  static constexpr int kAsidePitch = kFirst ? kAside * kWarps * 4 + 4 : 0;
  static constexpr size_t kBytes = static_cast<size_t>(kOutside * kPitch + kAsidePitch) * kRows * 16;
  uint4 first[kFirst ? kFirst : 1];
  uint4 *const shared; // [kOutside][kRows][kPitch], then [kRows][kAsidePitch]
  uint4 *more;         // this lane's place there: a piece every 4 chunks
  __device__ __forceinline__ explicit Operand(void *memory)
      : shared(static_cast<uint4 *>(memory)),
        more(shared + ((threadIdx.x & 31) >> 2) * kPitch + (threadIdx.x >> 5) * kPieces * 4 + (threadIdx.x & 3)) {}
  __device__ __forceinline__ uint4 get(int group, int i) const {
    const int place = group - (kGroups - kOutside);
    return place >= 0 ? more[place * kRows * kPitch + i * 4] : i < kFirst ? first[i] : *aside(i);
  }
  __device__ __forceinline__ uint4 *aside(int i) const {
    return shared + kOutside * kRows * kPitch + ((threadIdx.x & 31) >> 2) * kAsidePitch + ((threadIdx.x >> 5) * kAside + i - kFirst) * 4 + (threadIdx.x & 3);
  }
  __device__ __forceinline__ void set_first(int i, const uint4 &v) {
    if (i < kFirst)
      first[i] = v;
    else
      *aside(i) = v; // the lane's own
  }
  // Rows as they are. x: the thread's row of the first group, which is row `row` of `rows`, at the thread's first column.
  __device__ __forceinline__ void load(const bf16 *x, size_t stride, int row, int rows) {
#pragma unroll
    for (int group = kGroups - 1; group >= 0; group--) {
      const int place = group - (kGroups - kOutside);
      uint4 b[kPieces];
      load_group(b, x + static_cast<size_t>(group * kRows) * stride, row + group * kRows < rows);
#pragma unroll
      for (int i = 0; i < kPieces; i++) {
        if (place < 0)
          set_first(i, b[i]);
        else
          more[place * kRows * kPitch + i * 4] = b[i];
      }
    }
  }

  static __host__ __device__ size_t bytes(int rows) { return kGroups == 1 && rows < kRows ? static_cast<size_t>(rows) * kPitch * 16 : kBytes; } // staged
  // The thread's chunks of a norm's gains, which may be asked for before the wait. gamma: [columns] or null: ones.
  struct Gains {
    uint4 of[kOwn];
  };
  static __device__ __forceinline__ Gains gain(const bf16 *gamma) {
    Gains gains;
#pragma unroll
    for (int k = 0; k < kOwn; k++) {
      const int chunk = threadIdx.x + k * kThreads;
      gains.of[k] = load_gains(gamma, chunk * 8, chunk < kChunks);
    }
    return gains;
  }
  // Rows `begin` and on of x times the gains; each column passes through one thread of the block. Sums of them lack the row's
  // factor, for which `squares` has each warp's sums. Rows that do not exist are whatever lies there: nobody reads their sums.
  // All threads of the block call it. beside(): what is asked for behind the first rows, so that they do not come behind it.
  template <class Beside = Nothing>
  __device__ __forceinline__ void stage(const bf16 *x, size_t stride, int begin, int rows, const Gains &gains, float (*squares)[kWarps][kRows],
                                        Beside beside = {}) {
    static_assert(kStaged, "there is room");
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      const int begin_of = begin + group * kRows;
      float sum[kRows];
#pragma unroll
      for (int r = 0; r < kRows; r++) sum[r] = 0.f;
#pragma unroll
      for (int k = 0; k < kOwn; k++) {
        const int chunk = threadIdx.x + k * kThreads, live = chunk < kChunks ? rows - begin_of : 0;
        const bf16 *from = x + static_cast<size_t>(begin_of) * stride + chunk * 8;
#pragma unroll
        for (int half = 0; half < kRows; half += kRows / 2) { // as many as there are registers for
          if (half && half >= live) break;
          uint4 v[kRows / 2];
#pragma unroll
          for (int r = 0; r < kRows / 2; r++)
            load_rows_if(v[r], from + (half + r) * stride, half + r < live);
          if (!group && !k && !half) beside();
          if (group && !k && !half) __syncthreads(); // the group before is in registers
#pragma unroll
          for (int r = 0; r < kRows / 2; r++) {
            if (half + r >= live) break;
            shared[(half + r) * kPitch + chunk] = gained(v[r], gains.of[k], sum[half + r]);
          }
        }
      }
      keep_sums(sum, rows - begin_of, squares[group][threadIdx.x >> 5]);
      __syncthreads();
      if (group || kGroups == 1) continue;
#pragma unroll
      for (int i = 0; i < kPieces; i++) set_first(i, more[i * 4]);
    }
    if (kGroups == 1 && lane >> 2 >= rows - begin) more -= (lane >> 2) * kPitch; // the first row's
  }
  // The same of a single group in two steps, between which a thread may ask for more: its answers come behind these.
  struct Asked {
    uint4 of[kRows];
  };
  static __device__ __forceinline__ void ask(Asked &asked, const bf16 *x, size_t stride, int begin, int rows) {
    static_assert(kStaged && kGroups == 1 && kChunks == kThreads, "a chunk of a row a thread");
#pragma unroll
    for (int r = 0; r < kRows; r++) load_rows_if(asked.of[r], x + (begin + r) * stride + threadIdx.x * 8, begin + r < rows);
  }
  __device__ __forceinline__ void keep(const Asked &asked, int begin, int rows, const uint4 &gain, float (*squares)[kRows]) {
    float sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) sum[r] = 0.f;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (begin + r >= rows) break;
      shared[r * kPitch + threadIdx.x] = gained(asked.of[r], gain, sum[r]);
    }
    keep_sums(sum, rows - begin, squares[threadIdx.x >> 5]);
    const int lane = threadIdx.x & 31;
    __syncthreads();
    if (lane >> 2 >= rows - begin) more = shared + (more - shared) % kPitch; // the first row's
  }
  // What sums of row r of a group are still to be multiplied by.
  static __device__ __forceinline__ float factor(const float (*squares)[kRows], int r, bool normed, float eps) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += squares[w][r];
    const float factor = rsqrtf(total * (1.f / kColumns) + eps);
    return normed ? factor : 1.f;
  }
};

// Products of one tile and every group of rows, kChains a group, each in ascending columns: a second one halves the time to their end,
// for 4 registers a group. next(part, i) refills place i when its piece of part `part` of the slice has been multiplied.
template <int kChains = 2, int kThreads, int kPieces, int kGroups, bool kStaged, int kAside, int kDepth, class Next>
__device__ __forceinline__ void multiply(Tile<kDepth> &tile, const Operand<kThreads, kPieces, kGroups, kStaged, kAside> &b, float4 (&c)[kGroups], Next next) {
  static_assert(kPieces % kDepth == 0, "parts are whole");
  float4 odd[kGroups];
#pragma unroll
  for (int group = 0; group < kGroups; group++) c[group] = odd[group] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int part = 0; part < kPieces / kDepth; part++)
#pragma unroll
    for (int i = 0; i < kDepth; i++) {
      const uint4 &top = tile.top[i], &bottom = tile.bottom[i];
#pragma unroll
      for (int group = 0; group < kGroups; group++) {
        const uint4 v = b.get(group, part * kDepth + i);
        mma(c[group], top.x, bottom.x, top.y, bottom.y, v.x, v.y);
        mma(kChains == 2 ? odd[group] : c[group], top.z, bottom.z, top.w, bottom.w, v.z, v.w);
      }
      next(part, i);
    }
#pragma unroll
  for (int group = 0; group < kGroups; group++)
    if (kChains == 2) c[group] = add(c[group], odd[group]);
}

} // namespace eagle3
