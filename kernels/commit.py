"""Move the accepted path's cache rows to the end of the committed prefix, in all layers at once."""

import torch
import triton
import triton.language as tl

from .cache_write import slots
from .splits import slot_of
from .tile import begin, chained


def reference(storage, pages, seq_lens, path, accept_lens, page_size):
    """Copy logical rows n + path[k] to n + k for k < accept_lens, n = seq_lens - accept_lens.

    Args:
        storage: [layers, planes, slots, G, W], changed in place; pages: [B, NP] int32.
        seq_lens: [B] int64 committed rows, those of the path among them (kernels.accept.walk).
        path: [B, P] ascending node indices, path[k] >= k; accept_lens: [B].
    """
    k, prefix = torch.arange(path.shape[1], device=path.device), seq_lens - accept_lens
    keep = k < accept_lens[:, None]
    target = torch.where(keep, prefix[:, None] + k, -1)  # -1: the scratch row
    source = torch.where(keep, prefix[:, None] + path, -1)
    src, dst = (slots(x, pages, page_size).view(-1) for x in (source, target))
    storage[:, :, dst] = storage[:, :, src]  # the right side is a copy: the whole path is read before any store


@triton.jit(do_not_specialize=["table", "steps"])
def _move(
    storage_ptr, pages_ptr, seq_ptr, path_ptr, lens_ptr, lens_stride, table, steps, plane, width,
    PAGE: tl.constexpr, PDL: tl.constexpr, BP: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Program (w, p, b): BW columns of plane p (any layer's) along sequence b's path."""
    begin(PDL)
    b, k = tl.program_id(2), tl.arange(0, BP)
    lens = tl.load(lens_ptr + b * lens_stride)
    keep = k < tl.minimum(lens, steps)
    node = tl.load(path_ptr + b * steps + k, mask=keep, other=0)
    keep = keep & (node != k)  # a row already in its place is neither read nor written
    prefix = tl.load(seq_ptr + b) - lens
    pages_ptr += b.to(tl.int64) * table
    source, target = slot_of(pages_ptr, prefix + node, keep, PAGE), slot_of(pages_ptr, prefix + k, keep, PAGE)
    lane = tl.program_id(0) * BW + tl.arange(0, BW)
    inside = keep[:, None] & (lane < width)[None, :]
    storage_ptr += tl.program_id(1).to(tl.int64) * plane
    rows = tl.load(storage_ptr + source[:, None] * width + lane[None, :], mask=inside, other=0.0)
    tl.debug_barrier()  # the whole path is read before any store
    tl.store(storage_ptr + target[:, None] * width + lane[None, :], rows, mask=inside)


def fused(storage, pages, seq_lens, path, accept_lens, page_size):
    """The twin of `reference`: one launch over all layers and planes."""
    layers, planes, slots, groups, width = storage.shape
    row, (b, steps) = groups * width, path.shape
    if steps == 1:
        return  # the root is in its place
    block = _columns(steps, row)
    _move[(triton.cdiv(row, block), layers * planes, b)](
        storage, pages, seq_lens, path.contiguous(), accept_lens, accept_lens.stride(0), pages.stride(0), steps,
        slots * row, row, PAGE=page_size, BP=triton.next_power_of_2(steps), BW=block, num_warps=4,
        **chained(storage),
    )  # fmt: skip


def _columns(steps, row):
    """Columns a program moves: few for a long path, which is held in registers."""
    return min(128, max(16, 2048 // triton.next_power_of_2(steps)), triton.next_power_of_2(row))


def specimens():
    """Compile specimens: chains and full trees; a plane may pass 2^31 elements."""
    types = {"pages_ptr": "*i32", "seq_ptr": "*i64", "path_ptr": "*i64", "lens_ptr": "*i64", "lens_stride": "i32"}
    types |= {"table": "i32", "steps": "i32", "plane": "i64", "width": "i32"}
    pdl = {"num_warps": 4, "launch_pdl": True}
    return [
        (_move, types | {"storage_ptr": name}, {"PAGE": 16, "PDL": True, "BP": steps, "BW": _columns(steps, 512)}, pdl)
        for name in ("*bf16", "*fp16", "*fp32")
        for steps in (2, 4, 64)
    ]
