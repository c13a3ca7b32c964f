"""Time stamps taken where the work runs: the device's own clock inside a graph, the host's on the CPU."""

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


def reference(stamps, number):
    """Write the current time in nanoseconds to stamps[number]; stamps: [S] int64."""
    stamps[number] = time.perf_counter_ns()


@triton.jit(do_not_specialize=["number"])
def _stamp(stamps_ptr, number):
    tl.store(stamps_ptr + number, globaltimer().to(tl.int64))


def fused(stamps, number):
    """The twin of `reference` on a CUDA device: its global timer, read when the stream gets there."""
    if not stamps.is_cuda:  # Triton's interpreter has no device clock
        return reference(stamps, number)
    _stamp[(1,)](stamps, number, num_warps=1)


def specimens():
    """Compile specimens."""
    return [(_stamp, {"stamps_ptr": "*i64", "number": "i32"}, {}, {"num_warps": 1})]
