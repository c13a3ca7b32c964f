// The last step of attention.cuh: a cluster's sum of a vector goes to the output, or is merged with those of other clusters.
#pragma once

#include "dealing.cuh"
#include "nodes.cuh"

namespace eagle3 {

// One vector of a block: `at` among the `held` of its block.
struct QueryVector {
  int b, group, at, held;
  bf16 *to; // the lane's columns of the output
};

// A cluster's sum of a vector, for a warp: to the output if it is the only one, else to those of the other clusters, and the one
// that comes last merges them, in ascending order.
template <int kWidth, bool kOne>
__device__ __forceinline__ void merge_clusters(const Attention &p, Columns<kWidth> y, float top, float norm, unsigned clusters, int own,
                                       float sink, const QueryVector &v) {
  using Sum = Columns<kWidth>;
  const int lane = threadIdx.x & 31, column = lane * (kWidth / 32);
  const bool several = !kOne && clusters != 1u << own;
  const size_t unit = (static_cast<size_t>(v.b) * gridDim.y + blockIdx.y) * p.groups + v.group, first = unit * kClusters * v.held + v.at;
  constexpr int kMost = kOne ? 1 : kClusters;
  Sum parts[kMost];
  float2 stats[kMost];
#pragma unroll
  for (int i = 0; i < kMost; i++) parts[i] = y, stats[i] = make_float2(top, norm);
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
    for (int i = 0; i < kMost; i++) // beside maxima and norms
      if (clusters >> i & 1) {
        const size_t from = first + static_cast<size_t>(i) * v.held;
        parts[i] = Sum::read(p.sums + from * kWidth + column);
        stats[i] = make_float2(load_float(p.stats + from * 2), load_float(p.stats + from * 2 + 1));
      }
  }
  if (!kOne || sink != -INFINITY) // else the sum is y, to the bit
    y = merge_partials<kWidth, kMost>(top, norm, clusters, sink, [&](int c) { return stats[c]; }, [&](int c) { return parts[c]; });
  const float by = 1.f / norm;
#pragma unroll
  for (int j = 0; j < kWidth / 32; j += 2) // + 0: nothing may hang on the sign of a zero, which adding nothing may change
    *reinterpret_cast<uint32_t *>(v.to + j) = pack(y.v[j] * by + 0.f, y.v[j + 1] * by + 0.f);
}

} // namespace eagle3
