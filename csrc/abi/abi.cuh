// The version of the C ABI, known to host and device code alike.
#pragma once

namespace eagle3 {

constexpr int kAbiVersion = 18;

__global__ void abi_probe(int *out) { *out = kAbiVersion; }

}  // namespace eagle3
