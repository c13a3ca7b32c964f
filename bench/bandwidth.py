"""Read bandwidth of the device at hand, measured by streaming a block many times its cache."""

import time

import torch
import triton
import triton.language as tl

GPU_BYTES, CPU_BYTES, REPEATS = 8 << 30, 1 << 28, 7


@triton.jit
def _read(x_ptr, out_ptr, per_program, BLOCK: tl.constexpr):
    """Program p sums its own stretch of int32 words; the store keeps the reads alive."""
    at = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, per_program, BLOCK):
        total += tl.load(x_ptr + at + start)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth(device):
    """Repeats of bytes/s read from memory, e.g. [4.45e12, …]."""
    if device.type != "cuda":
        block = torch.ones(CPU_BYTES // 8, dtype=torch.int64)
        return [CPU_BYTES / _seconds(block.sum) for _ in range(REPEATS)]
    programs, size = 132 * 16, 4096
    per_program = GPU_BYTES // 4 // programs // size * size
    block = torch.ones(programs * per_program, dtype=torch.int32, device=device)
    out = torch.empty(programs, dtype=torch.int32, device=device)

    def once():
        _read[(programs,)](block, out, per_program, size, num_warps=8)

    once()
    spans = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        once()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) / 1e3)
    return [block.nbytes / span for span in spans]


def _seconds(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
