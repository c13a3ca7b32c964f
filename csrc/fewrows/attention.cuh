// Launches of attend.cuh: by the sizes of heads, by how long tables are and how many rows there are.
#pragma once

#include "attend.cuh"

#include <algorithm>

namespace eagle3 {

template <int kWidth, int kShare, int kHalf>
inline cudaError_t launch_attend(const Attention &p, int batch, cudaStream_t stream) {
  auto tiles_of = [&](int parts) { return (p.t + parts * kVectors / kShare - 1) / (parts * kVectors / kShare); };
  auto one_cluster = [&](auto kernel, int ranks, int parts, size_t shared) {
    return launch(kernel, dim3(ranks * p.groups, tiles_of(parts), batch), parts * kWarps * 32, shared, stream, ranks, p, NoBoxes{}, 0);
  };
  const int positions = p.columns * p.page, parts = p.t * kShare > kVectors ? kParts : 1;
  if constexpr (kWidth == 64) // two parts share their keys: half as many blocks leave more to the kernel behind
    if (parts > 1 && short_table(positions, kFewer))
      return one_cluster(attend<kWidth, kShare, kHalf, kParts, kFewer, NoBoxes>, kFewer, parts, Stages<kWidth, kParts, kFewer, true>::kBytes);
  // of short tables less shared memory: more fits beside it
  if (short_table(positions, kFewer)) return one_cluster(attend<kWidth, kShare, kHalf, 1, kFewer, NoBoxes>, kFewer, 1, Stages<kWidth, 1, kFewer, true>::kBytes);
  if (short_table(positions, kRanks)) return one_cluster(attend<kWidth, kShare, kHalf, 1, kRanks, NoBoxes>, kRanks, 1, Stages<kWidth, 1, kRanks, true>::kBytes);
  // as many tiles of rows at a time as there is room for what ranks hand over
  const int tiles = tiles_of(parts) * batch, together = kHanded / (p.groups * parts * kVectors);
  if (!p.sums || !together) return cudaErrorInvalidValue;
  Boxes boxes;
  cudaError_t e = make_boxes(boxes, p, kWidth);
  for (int first = 0; e == cudaSuccess && first < tiles; first += together)
    e = launch(attend<kWidth, kShare, kHalf, kParts, kDealt, Boxes>, dim3(kDealt * p.groups, std::min(together, tiles - first)), parts * kWarps * 32,
               Stages<kWidth, kParts, kDealt, false>::kBytes, stream, 1, p, boxes, first);
  return e;
}

template <int kWidth, int kHalf>
inline cudaError_t attend_heads(const Attention &p, int batch, cudaStream_t stream) {
  switch (p.heads / p.groups) {
  case 1: return launch_attend<kWidth, 1, kHalf>(p, batch, stream);
  case 2: return launch_attend<kWidth, 2, kHalf>(p, batch, stream);
  case 4: return launch_attend<kWidth, 4, kHalf>(p, batch, stream);
  case 8: return launch_attend<kWidth, 8, kHalf>(p, batch, stream);
  default: return cudaErrorInvalidValue;
  }
}

inline cudaError_t attention(const Attention &p, int width, int batch, cudaStream_t stream) {
  if (p.t > kTile) return cudaErrorInvalidValue;
  switch (width * 1000 + p.turned) {
  case 64064: return attend_heads<64, 1>(p, batch, stream);
  case 128064: return attend_heads<128, 1>(p, batch, stream);
  case 128128: return attend_heads<128, 2>(p, batch, stream);
  default: return cudaErrorInvalidValue;
  }
}

} // namespace eagle3
