// The one binding file: a plain C ABI, loaded by ctypes, so that no torch or Python header is compiled against.
// Every entry point takes raw device pointers and a stream, launches, and returns a cudaError_t as int (0 is success);
// cudaErrorInvalidValue for sizes that no kernel is built for.

#include <cuda_runtime.h>

#include "abi/abi.cuh"
#include "fewrows/attention.cuh"
#include "fewrows/experts.cuh"
#include "fewrows/fp4.cuh"
#include "fewrows/head.cuh"
#include "fewrows/int4.cuh"
#include "fewrows/latent.cuh"
#include "fewrows/project.cuh"
#include "fewrows/router.cuh"

#define EAGLE3_API extern "C" __attribute__((visibility("default")))

// Raised whenever a signature or a struct below changes; the loader refuses a library whose number differs from its own.
EAGLE3_API int eagle3_abi_version() { return eagle3::kAbiVersion; }

// The device that all other calls of this thread mean: this library has a CUDA runtime of its own.
EAGLE3_API int eagle3_device(int device) { return static_cast<int>(cudaSetDevice(device)); }

// Writes the version that the DEVICE code was compiled with to *out (device memory, one int32): the check that this
// library holds code for the GPU at hand.
EAGLE3_API int eagle3_abi_probe(int *out, cudaStream_t stream) {
  eagle3::abi_probe<<<1, 1, 0, stream>>>(out);
  return static_cast<int>(cudaGetLastError());
}

EAGLE3_API int eagle3_project(const eagle3::Projection *p, int gated, int blocks, cudaStream_t stream) {
  return static_cast<int>(gated ? eagle3::project_rows<true>(*p, blocks, stream) : eagle3::project_rows<false>(*p, blocks, stream));
}

EAGLE3_API int eagle3_attention(const eagle3::Attention *p, int width, int batch, cudaStream_t stream) {
  return static_cast<int>(eagle3::attention(*p, width, batch, stream));
}

EAGLE3_API int eagle3_latent_queries(const eagle3::LatentQueries *p, cudaStream_t stream) {
  return static_cast<int>(eagle3::absorb(*p, stream));
}

EAGLE3_API int eagle3_latent(const eagle3::LatentAttention *p, int batch, cudaStream_t stream) {
  return static_cast<int>(eagle3::latent(*p, batch, stream));
}

EAGLE3_API int eagle3_experts(const eagle3::Experts *p, int blocks, cudaStream_t stream) {
  return static_cast<int>(eagle3::experts(*p, blocks, stream));
}

EAGLE3_API int eagle3_route(const eagle3::Router *p, int blocks, cudaStream_t stream) {
  return static_cast<int>(eagle3::routed(*p, blocks, stream));
}

// router: null where rows come routed.
EAGLE3_API int eagle3_int4_experts(const eagle3::Int4Experts *p, const eagle3::Router *router, int blocks, cudaStream_t stream) {
  return static_cast<int>(eagle3::int4_experts(*p, router ? *router : eagle3::Router{}, blocks, stream));
}

EAGLE3_API int eagle3_fp4_experts(const eagle3::Fp4Experts *p, int blocks, cudaStream_t stream) {
  return static_cast<int>(eagle3::fp4_experts(*p, blocks, stream));
}

EAGLE3_API int eagle3_head(const eagle3::Vocabulary *p, int blocks, cudaStream_t stream) {
  return static_cast<int>(eagle3::head(*p, blocks, stream));
}
