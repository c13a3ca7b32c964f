// Launches of kernels that follow one another on a stream: dependent launch, clusters.
#pragma once

#include <cuda_runtime.h>

namespace eagle3 {

// cluster: blocks along x that form one, 1 for none. chained: the kernel's beginning may overlap its predecessor's end (it
// waits by griddepcontrol); false also leaves clusters out, for GPUs that have neither.
template <class... Parameters, class... Arguments>
inline cudaError_t launch_chained(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, cudaStream_t stream,
                                  int cluster, bool chained, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = !chained ? 0 : cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

} // namespace eagle3
