// Launches of latent attention: latent_attend.cuh, then latent_values.cuh.
#pragma once

#include "latent_values.cuh"

namespace eagle3 {

inline cudaError_t latent(const LatentAttention &p, int batch, cudaStream_t stream) {
  if (p.heads % kHeadBlock || p.lanes > kLatentLanes) return cudaErrorInvalidValue;
  const dim3 grid(p.lanes + (p.t > 1), batch * ((p.t + kPair - 1) / kPair), p.heads / kHeadBlock);
  const bool once = p.columns * p.page <= kLatentLanes * kLatentTile; // a block folds one tile for all rows
  const cudaError_t e = once ? launch(latent_attend<2>, grid, kLatentThreads, kLatentBytes<2>, stream, 1, p)
                             : launch(latent_attend<4>, grid, kLatentThreads, kLatentBytes<4>, stream, 1, p);
  if (e != cudaSuccess) return e;
  const int per = value_rows(p.rows);
  return launch(latent_values, dim3(p.heads * 4, (p.rows + per - 1) / per), 256, 0, stream, 1, p);
}

} // namespace eagle3
