// The binding of csrc/allreduce, a library of its own: it compiles for every GPU from sm_80 on, the few-row kernels do not.
// Same manner as binding.cu: plain C, a cudaError_t as int.

#include <cuda_runtime.h>
#include <string.h>

#include "allreduce/allreduce.cuh"

#define EAGLE3_API extern "C" __attribute__((visibility("default")))

EAGLE3_API int eagle3_links_version() { return eagle3::kLinksVersion; }

// The device that all other calls of this thread mean: this library has a CUDA runtime of its own.
EAGLE3_API int eagle3_links_device(int device) { return cudaSetDevice(device); }

// What an error means, for the reader.
EAGLE3_API const char *eagle3_links_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

// Bytes of an inbox for `rows` rows of each sender (a two-shot sum: that many for each rank) of `columns` elements.
EAGLE3_API size_t eagle3_inbox_bytes(int size, int rows, int columns) {
  eagle3::Links l = {};
  l.size = size, l.rows = rows, l.columns = columns;
  return 2 * eagle3::Places(l).half * sizeof(uint64_t);
}

// Memory of the current device, zeroed; `handle` (64 bytes): how other processes open it.
EAGLE3_API int eagle3_inbox_make(size_t bytes, void **inbox, void *handle) {
  cudaError_t e = cudaMalloc(inbox, bytes);
  if (e != cudaSuccess) return e;
  e = cudaMemset(*inbox, 0, bytes);
  if (e == cudaSuccess) e = cudaDeviceSynchronize();
  cudaIpcMemHandle_t made;
  if (e == cudaSuccess) e = cudaIpcGetMemHandle(&made, *inbox);
  if (e != cudaSuccess) {
    cudaFree(*inbox);
    return e;
  }
  memcpy(handle, &made, sizeof made);
  return cudaSuccess;
}

EAGLE3_API int eagle3_inbox_open(const void *handle, void **inbox) {
  cudaIpcMemHandle_t own;
  memcpy(&own, handle, sizeof own);
  return cudaIpcOpenMemHandle(inbox, own, cudaIpcMemLazyEnablePeerAccess);
}

EAGLE3_API int eagle3_inbox_close(void *inbox) { return cudaIpcCloseMemHandle(inbox); }
EAGLE3_API int eagle3_inbox_free(void *inbox) { return cudaFree(inbox); }

// One int of host memory that the device reads and writes, zero.
EAGLE3_API int eagle3_flag_make(void **host, void **device) {
  cudaError_t e = cudaHostAlloc(host, sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable);
  if (e != cudaSuccess) return e;
  memset(*host, 0, sizeof(int));
  return cudaHostGetDevicePointer(device, *host, 0);
}

EAGLE3_API int eagle3_flag_free(void *host) { return cudaFreeHost(host); }

EAGLE3_API int eagle3_reduce(const eagle3::Links *l, const eagle3::Reduction *r, int two_shots, int blocks, cudaStream_t stream) {
  return eagle3::reduce(*l, *r, two_shots, blocks, stream);
}

EAGLE3_API int eagle3_gather(const eagle3::Links *l, const void *x, void *y, int words, int blocks, cudaStream_t stream) {
  return eagle3::gather(*l, static_cast<const uint32_t *>(x), static_cast<uint32_t *>(y), words, blocks, stream);
}
