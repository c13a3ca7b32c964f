// The one binding file: a plain C ABI, loaded by ctypes, so that no torch or Python header is compiled against.
// Every entry point takes raw device pointers and a stream, launches, and returns a cudaError_t as int (0 is success).

#include <cuda_runtime.h>

#include "abi/abi.cuh"

#define EAGLE3_API extern "C" __attribute__((visibility("default")))

// Raised whenever a signature below changes; the loader refuses a library whose number differs from its own.
EAGLE3_API int eagle3_abi_version() { return eagle3::kAbiVersion; }

// Writes the version that the DEVICE code was compiled with to *out (device memory, one int32): the check that this
// library holds code for the GPU at hand.
EAGLE3_API int eagle3_abi_probe(int *out, cudaStream_t stream) {
  eagle3::abi_probe<<<1, 1, 0, stream>>>(out);
  return static_cast<int>(cudaGetLastError());
}
