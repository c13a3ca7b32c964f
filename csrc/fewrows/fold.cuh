// What attend.cuh does with one warp's vectors and positions: norm and RoPE, scores, a running softmax, sums of values.
//
// Rows of keys and values lie in shared memory without padding; 16-byte chunks of a row change places by the row's number, so
// that what a warp reads at a time lies on different banks.
#pragma once

#include "common.cuh"
#include "dealing.cuh"

namespace eagle3 {

// Elements of keys and values in shared memory: of column `c` (a multiple of 8) of a row, and of piece i of the same row, from
// that of its first. Of keys two neighbouring rows are read at a time, pieces of 32 columns; of values 8 rows, pieces of 16.
template <int kWidth, bool kBoxed>
struct Layout { // whole rows
  static __device__ __forceinline__ int key(int row, int c) { return row * kWidth + (c ^ (row & 1) * 32); }
  static __device__ __forceinline__ int value(int row, int c) { return row * kWidth + (c ^ (row & 7) * 8); }
  static __device__ __forceinline__ int key_piece(int first, int i) { return first ^ i * 32; }
  static __device__ __forceinline__ int value_piece(int first, int i) { return first ^ i * 16; }
};
template <int kWidth>
struct Layout<kWidth, true> { // as boxes.cuh's copies lay them: of every 8 rows a line of 64 columns each, then of 64 more
  static __device__ __forceinline__ int line(int row, int half) {
    return (row >> 3) * 8 * kWidth + half * 512 + ((row & 1) * 4 + (row >> 1 & 3)) * 64;
  }
  static __device__ __forceinline__ int key(int row, int c) { return line(row, c >> 6) + ((c & 63) ^ ((row & 1) * 4 + (row >> 1 & 3)) * 8); }
  static __device__ __forceinline__ int value(int row, int c) { return key(row, c); }
  static __device__ __forceinline__ int key_piece(int first, int i) { return (first ^ (i & 1) * 32) + (i >> 1) * 512; }
  static __device__ __forceinline__ int value_piece(int first, int i) { return (first ^ (i & 3) * 16) + (i >> 2) * 512; }
};
// Element of column `c` of the sums of vector `v`: 8 vectors are written at a time.
template <int kWidth>
__device__ __forceinline__ int sum_at(int v, int c) {
  return v * kWidth + (c ^ (v & 7) * 8);
}

// 2^x; 0 where that is below 2^-126.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Norm and RoPE of one head vector in registers: a lane holds columns j * 32 + lane, of which the first 2 * kHalf * 32 turn.
template <int kWidth, int kHalf>
__device__ __forceinline__ void turn(float (&v)[kWidth / 32], const float (&gain)[kWidth / 32], bool normed,
                                     const float (&angle)[kWidth / 32], float eps) {
  if (normed) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kWidth / 32; j++) sum = fmaf(v[j], v[j], sum);
    const float scale = rsqrtf(warp_sum(sum) * (1.f / kWidth) + eps);
#pragma unroll
    for (int j = 0; j < kWidth / 32; j++) v[j] = rounded(v[j] * scale * gain[j]);
  }
#pragma unroll
  for (int j = 0; j < kHalf; j++) {
    const float a = v[j], b = v[j + kHalf];
    v[j] = rounded(a * angle[j] - b * angle[j + kHalf]);
    v[j + kHalf] = rounded(b * angle[j] + a * angle[j + kHalf]);
  }
}

// Cosines then sines of one position for a lane's columns of an operand: 8 of every 32 from 8 * (lane mod 4).
template <int kHalf>
struct Angles {
  float4 at[2 * kHalf][2];
  __device__ __forceinline__ void load(const float *line) {
#pragma unroll
    for (int i = 0; i < 2 * kHalf; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) at[i][j] = *reinterpret_cast<const float4 *>(line + i * 32 + (threadIdx.x & 3) * 8 + j * 4);
  }
  __device__ __forceinline__ float of(int i, int e) const { return (&at[i][e / 4].x)[e % 4]; }
};

// The same norm and RoPE where a vector lies in an operand's pieces, four lanes a vector.
template <int kWidth, int kHalf>
__device__ __forceinline__ void turn(uint4 (&q)[kWidth / 32], const uint4 (&gain)[kWidth / 32], bool normed, const Angles<kHalf> &angle,
                                     float eps) {
  float scale = 1.f;
  if (normed) {
    float sum = product_of(q, q);
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    scale = rsqrtf(sum * (1.f / kWidth) + eps);
  }
  auto word = [](uint4 &v, int j) -> uint32_t & { return (&v.x)[j]; };
  auto scaled = [&](int i, int j) { // by one where there is no norm
    const uint32_t v = word(q[i], j), by = (&gain[i].x)[j];
    return pack(low(v) * scale * low(by), high(v) * scale * high(by));
  };
#pragma unroll
  for (int i = 0; i < kHalf; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t x = scaled(i, j), y = scaled(i + kHalf, j);
      const float c0 = angle.of(i, 2 * j), c1 = angle.of(i, 2 * j + 1), s0 = angle.of(i + kHalf, 2 * j), s1 = angle.of(i + kHalf, 2 * j + 1);
      word(q[i], j) = pack(low(x) * c0 - low(y) * s0, high(x) * c1 - high(y) * s1);
      word(q[i + kHalf], j) = pack(low(y) * c0 + low(x) * s0, high(y) * c1 + high(x) * s1);
    }
#pragma unroll
  for (int i = 2 * kHalf; i < kWidth / 32; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) word(q[i], j) = scaled(i, j);
}

// What a warp's positions gave 16 query vectors (rows of the pass times heads of the group). Lane (g, t) = (lane / 4, lane % 4) is
// concerned with columns i * 32 + t * 8 … of vectors g and g + 8. The vectors themselves lie in shared memory, as a product takes
// them: with the sums beside them in registers there would be no room for keys.
template <int kWidth, bool kBoxed>
struct Fold {
  using Rows = Layout<kWidth, kBoxed>;
  static constexpr int kQueries = 2 * kWidth; // pieces of 16 bytes of 16 vectors
  float4 out[kWidth / 8];
  float top[2], norm[2];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kWidth / 8; i++) out[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    top[0] = top[1] = -INFINITY;
    norm[0] = norm[1] = 0.f;
  }

  // Keeps a lane's columns of vectors g (half 0) or g + 8 where `slice` finds them: of piece i the words x and y of both, then z and w.
  static __device__ __forceinline__ void keep(uint4 *queries, const uint4 (&q)[kWidth / 32], int half) {
    uint32_t *const to = reinterpret_cast<uint32_t *>(queries + (threadIdx.x & 31)) + half;
#pragma unroll
    for (int i = 0; i < kWidth / 32; i++) to[i * 256] = q[i].x, to[i * 256 + 2] = q[i].y, to[i * 256 + 128] = q[i].z, to[i * 256 + 130] = q[i].w;
  }

  // Elements of `memory`: where a lane reads first of keys, of positions lane / 4 and 8 more, and of values, of position lane mod 16.
  struct Place {
    int keys[2], values;
  };
  static __device__ __forceinline__ int key_column() { return (threadIdx.x & 3) * 8; }
  static __device__ __forceinline__ int value_column() { return (threadIdx.x & 31) >> 4 << 3; }
  // Of positions that lie in a row, from a row that is a multiple of 8.
  static __device__ __forceinline__ Place place_at(int row0) {
    const int lane = threadIdx.x & 31, first = row0 * kWidth + Rows::key(lane >> 2, key_column());
    return {{first, first + 8 * kWidth}, (row0 + kTile) * kWidth + Rows::value(lane & 15, value_column())};
  }
  // row(i): of position i.
  template <class Row>
  static __device__ __forceinline__ Place place_of(Row row) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    return {{Rows::key(row(g), key_column()), Rows::key(row(8 + g), key_column())}, Rows::value(row(lane & 15) + kTile, value_column())};
  }

  // The warp's 16 positions of a tile, from `first`. Half h of the vectors (g and g + 8) sees positions in (after[h], upto[h]], or
  // all of them where they are not masked.
  __device__ __forceinline__ void slice(const uint4 *queries, const bf16 *memory, const Place &place, bool masked, int first,
                                        const int (&after)[2], const int (&upto)[2], float scale) {
    const int lane = threadIdx.x & 31, t = lane & 3;
    float4 s[2], even[2] = {}, odd[2] = {};
    float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kWidth / 32; i++) { // four chains: one alone would wait for itself
      const uint4 q0 = queries[i * 64 + lane], q1 = queries[i * 64 + 32 + lane];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const uint4 k = *reinterpret_cast<const uint4 *>(memory + Rows::key_piece(place.keys[n], i));
        mma(even[n], q0.x, q0.y, q0.z, q0.w, k.x, k.y);
        mma(odd[n], q1.x, q1.y, q1.z, q1.w, k.z, k.w);
      }
    }
    constexpr int kEarly = kWidth / 16 / (kBoxed ? 2 : 1); // a loop of long tables has registers for so many
    uint32_t r[kWidth / 16][4]; // values are on their way while weights are made
#pragma unroll
    for (int i = 0; i < kEarly; i++) load_transposed(r[i], memory + Rows::value_piece(place.values, i));
#pragma unroll
    for (int n = 0; n < 2; n++) { // products are rounded, masked or not
      s[n] = add(even[n], odd[n]);
      s[n] = make_float4(__fmul_rn(s[n].x, scale), __fmul_rn(s[n].y, scale), __fmul_rn(s[n].z, scale), __fmul_rn(s[n].w, scale));
    }
    if (masked)
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int at = first + n * 8 + 2 * t;
        s[n].x = at > after[0] && at <= upto[0] ? s[n].x : -INFINITY;
        s[n].y = at + 1 > after[0] && at + 1 <= upto[0] ? s[n].y : -INFINITY;
        s[n].z = at > after[1] && at <= upto[1] ? s[n].z : -INFINITY;
        s[n].w = at + 1 > after[1] && at + 1 <= upto[1] ? s[n].w : -INFINITY;
      }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      most[0] = fmaxf(most[0], fmaxf(s[n].x, s[n].y));
      most[1] = fmaxf(most[1], fmaxf(s[n].z, s[n].w));
    }
    float base[2], keep[2], sum[2] = {0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      most[h] = fmaxf(most[h], __shfl_xor_sync(kAll, most[h], 1));
      most[h] = fmaxf(most[h], __shfl_xor_sync(kAll, most[h], 2));
      const float now = fmaxf(top[h], most[h]);
      base[h] = now == -INFINITY ? 0.f : now;
      keep[h] = power_of_two(top[h] - base[h]);
      top[h] = now;
    }
    uint32_t weight[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float a = power_of_two(s[n].x - base[0]), b = power_of_two(s[n].y - base[0]);
      const float c = power_of_two(s[n].z - base[1]), d = power_of_two(s[n].w - base[1]);
      sum[0] += a + b;
      sum[1] += c + d;
      weight[n][0] = pack(a, b);
      weight[n][1] = pack(c, d);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(kAll, sum[h], 1);
      sum[h] += __shfl_xor_sync(kAll, sum[h], 2);
      norm[h] = fmaf(norm[h], keep[h], sum[h]);
    }
#pragma unroll
    for (int i = 0; i < kWidth / 8; i++) {
      float4 &o = out[i];
      if (i % 2 == 0 && i / 2 + kEarly < kWidth / 16) load_transposed(r[i / 2 + kEarly], memory + Rows::value_piece(place.values, i / 2 + kEarly));
      o.x *= keep[0], o.y *= keep[0], o.z *= keep[1], o.w *= keep[1];
      mma(o, weight[0][0], weight[0][1], weight[1][0], weight[1][1], r[i / 2][i % 2 * 2], r[i / 2][i % 2 * 2 + 1]);
    }
  }

  // Partials of the warp's vectors, or of half of them: sums of values [16, kWidth], maximum and norm [16].
  __device__ __forceinline__ void store(float *result, float2 *stats, int halves) const {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h == halves) break;
#pragma unroll
      for (int i = 0; i < kWidth / 8; i++)
        *reinterpret_cast<float2 *>(result + sum_at<kWidth>(g + 8 * h, i * 8 + 2 * t)) = h ? make_float2(out[i].z, out[i].w) : make_float2(out[i].x, out[i].y);
      if (t == 0) stats[g + 8 * h] = make_float2(top[h], norm[h]);
    }
  }
};

// A lane's columns of one vector, kWidth / 32 neighbours, and what scales them: partials of it are added in one order.
template <int kWidth>
struct alignas(kWidth / 8) Columns {
  float v[kWidth / 32];
  __device__ __forceinline__ void add(float share, const Columns &other) {
#pragma unroll
    for (int j = 0; j < kWidth / 32; j++) v[j] = fmaf(share, other.v[j], v[j]);
  }
};

// Partials 0 … kCount - 1 of one vector, by a warp: stat(c) gives maximum and norm of partial c, -inf and 0 where it is of nothing, of(c)
// the lane's columns where live(c) says that there are any. Every lane makes all shares itself: shuffles below a condition wait for one another.
template <int kWidth, int kCount>
struct Partials {
  float2 stats[kCount];
  Columns<kWidth> part[kCount];
  template <class Live, class Stat, class Of>
  __device__ __forceinline__ void load(Live live, Stat stat, Of of) {
#pragma unroll
    for (int c = 0; c < kCount; c++) stats[c] = stat(c);
#pragma unroll
    for (int c = 0; c < kCount; c++)
      if (live(c)) part[c] = of(c);
  }
  // In ascending order; norm and maximum (-inf: it sees nothing) of the sum are left.
  template <class Live>
  __device__ __forceinline__ Columns<kWidth> merged(float &top, float &norm, Live live) const {
    Columns<kWidth> y = {};
    float most = -INFINITY;
#pragma unroll
    for (int c = 0; c < kCount; c++) most = fmaxf(most, stats[c].x);
    const float base = most == -INFINITY ? 0.f : most;
    float sum = 0.f, share[kCount];
#pragma unroll
    for (int c = 0; c < kCount; c++) share[c] = power_of_two(stats[c].x - base);
#pragma unroll
    for (int c = 0; c < kCount; c++) {
      sum = fmaf(share[c], stats[c].y, sum);
      if (live(c)) y.add(share[c], part[c]);
    }
    top = most, norm = sum;
    return y;
  }
};
template <int kWidth, int kCount, class Live, class Stat, class Of>
__device__ __forceinline__ Columns<kWidth> merge_partials(float &top, float &norm, Live live, Stat stat, Of of) {
  Partials<kWidth, kCount> partials;
  partials.load(live, stat, of);
  return partials.merged(top, norm, live);
}

} // namespace eagle3
