// Shared memory of attend.cuh.
#pragma once

#include "common.cuh"
#include "dealing.cuh"

namespace eagle3 {

// Where things lie in shared memory: stages, one or three a side, in long tables the last one of nodes where there are any, in short
// ones whose blocks have two parts one more of nodes; partials over them, when they have been read, and the inbox behind those. In
// short tables (kOne) others may send before this block has read its tiles: there the inbox lies behind the stages too, and the first
// part's partials of a side lie where its own tile did. In long tables sums of some ranks wait in the inbox for the others'. Queries
// lie behind everything.
template <int kWidth, int kMost, int kUsed, bool kOne>
struct Stages {
  static constexpr int kReceived = (kMost * kVectors + kUsed - 1) / kUsed * kUsed; // partials, at most: of a rank's vectors, one of each rank
  static constexpr int kDepth = kOne ? 1 : 3, kStage = 2 * kTile * kWidth; // elements of a stage
  static constexpr int kResult = kMost * kWarps * kVectors * kWidth, kStats = 2 * kMost * kWarps * kVectors; // floats
  static constexpr int kInbox = kResult + kStats, kEnd = kInbox + kReceived * (kWidth + 2);
  static constexpr size_t kOfStages = (2 * kDepth + (kOne && kMost > 1)) * kStage * sizeof(bf16), kQueries = kOne ? kEnd * sizeof(float) : kOfStages; // bytes
  static constexpr size_t kBytes = kQueries + 2 * kMost * kVectors * kWidth * sizeof(bf16); // queries of each side
  static_assert(kEnd * sizeof(float) <= kQueries && kQueries % 16 == 0, "all fits");
  static_assert(!kOne || (kMost > 1 ? kResult * sizeof(float) > kOfStages : kResult * sizeof(float) == kOfStages), "a side's own");
};

// Copies of boxes lay rows at places that follow from addresses, repeated every 1,024 bytes.
template <bool kOne>
__device__ __forceinline__ uint4 *stages_memory() {
  if constexpr (kOne) {
    extern __shared__ uint4 attention_memory[];
    return attention_memory;
  } else {
    extern __shared__ __align__(1024) uint4 boxed_memory[];
    return boxed_memory;
  }
}

} // namespace eagle3
