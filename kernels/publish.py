"""A cycle's numbers to the host: the device writes them to page-locked memory itself, so that nothing but graphs is on
the stream."""

import torch
import triton
import triton.language as tl

from .tile import begin, chained, up


def reference(block, host, turn):
    """Copy `block` to row turn % R of `host`, then count the turn.

    Args:
        block: [W] int64; host: [R, W] int64, page-locked memory where block is on a GPU; turn: [1] int64, advanced.
    """
    row, kept = torch.arange(host.shape[0], device=block.device), host.to(block.device, non_blocking=True)
    host.copy_(torch.where((row == turn % host.shape[0])[:, None], block, kept), non_blocking=True)
    turn.add_(1)


@triton.jit
def _publish(block_ptr, host_ptr, turn_ptr, rows, width, PDL: tl.constexpr, BW: tl.constexpr):
    """One program: all of the block, then the turn."""
    begin(PDL)
    turn, at = tl.load(turn_ptr), tl.arange(0, BW)
    host_ptr += turn % rows * width
    for start in range(0, width, BW):
        inside = start + at < width
        tl.store(host_ptr + start + at, tl.load(block_ptr + start + at, mask=inside, other=0), mask=inside)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn_ptr, turn + 1)


def fused(block, host, turn):
    """The twin of `reference`."""
    rows, width = host.shape
    _publish[(1,)](block, host, turn, rows, width, BW=min(1024, up(width)), num_warps=4, **chained(block))


def specimens():
    """Compile specimens: one slot and eight."""
    types = dict.fromkeys(("block_ptr", "host_ptr", "turn_ptr"), "*i64") | dict.fromkeys(("rows", "width"), "i32")
    return [
        (_publish, types, {"PDL": True, "BW": width}, {"num_warps": 4, "launch_pdl": True}) for width in (128, 1024)
    ]
