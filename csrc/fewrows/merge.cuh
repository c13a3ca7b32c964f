// The last step of attention.cuh: a cluster's sum of a vector goes to the output, or is merged with those of other clusters.
#pragma once

#include "dealing.cuh"
#include "nodes.cuh"

namespace eagle3 {

// One vector of a block: `at` among the `held` of its block.
struct QueryVector {
  int b, group, row, head, at, held;
};

// A cluster's sum of a vector, for a warp: to the output if it is the only one, else to those of the other clusters, and the one
// that comes last merges them, in ascending order.
template <int kWidth, bool kOne>
__device__ __forceinline__ void merge_clusters(const Attention &p, const Columns<kWidth> &y, float top, float norm, unsigned clusters, int own,
                                       const QueryVector &v) {
  using Sum = Columns<kWidth>;
  const int lane = threadIdx.x & 31, column = lane * (kWidth / 32), c = lane % 4, head = v.group * (p.heads / p.groups) + v.head;
  const bool several = !kOne && clusters != 1u << own, has = clusters >> c & 1; // kClusters is at most 4
  const size_t unit = (static_cast<size_t>(v.b) * gridDim.y + blockIdx.y) * p.groups + v.group, first = unit * kClusters * v.held + v.at;
  Sum parts[kClusters];
  const float sink = p.sinks ? __bfloat162float(p.sinks[head]) * 1.4426950408889634f : -INFINITY;
  if (several) {
    const size_t to = first + static_cast<size_t>(own) * v.held;
    *reinterpret_cast<Sum *>(p.sums + to * kWidth + column) = y;
    if (lane == 0) p.stats[to * 2] = top, p.stats[to * 2 + 1] = norm;
    __syncwarp();
    unsigned *const arrivals = p.arrivals + unit * v.held + v.at;
    bool last = false;
    if (lane == 0) {
      last = arrive(arrivals) == static_cast<unsigned>(__popc(clusters)) - 1;
      if (last) *arrivals = 0;
    }
    if (!__any_sync(kAll, last)) return;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kClusters; i++) // beside maxima and norms
      if (clusters >> i & 1) parts[i] = Sum::read(p.sums + (first + static_cast<size_t>(i) * v.held) * kWidth + column);
    const float *const from = p.stats + (first + static_cast<size_t>(c) * v.held) * 2;
    if (has) top = load_float(from), norm = load_float(from + 1);
  }
  if (!has) top = -INFINITY, norm = 0.f;
  const Sum all = merge_partials<kWidth, 4>(top, norm, clusters, sink, [&](int c) {
    return several && c < kClusters ? parts[c] : y;
  });
  bf16 *const to = p.y + ((static_cast<int64_t>(v.b) * p.t + v.row) * p.heads + head) * kWidth + column;
  const float by = 1.f / norm;
#pragma unroll
  for (int j = 0; j < kWidth / 32; j += 2) // + 0: nothing may hang on the sign of a zero, which adding nothing may change
    *reinterpret_cast<uint32_t *>(to + j) = pack(all.v[j] * by + 0.f, all.v[j + 1] * by + 0.f);
}

} // namespace eagle3
