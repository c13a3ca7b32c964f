"""The sum of what all ranks hold of some rows: in rank order in fp32, the residual last, rounded once. A row's bits do
not depend on the other rows."""

import torch
import triton
import triton.language as tl

COLUMNS = 512  # a program's


def reference(parts, residual=None):
    """parts [R, N, D], rank after rank; residual [N, D] or None -> [N, D]."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if residual is not None:
        total = total + residual.float()
    return total.to(parts.dtype)


@triton.jit(do_not_specialize=["size"])
def _total(parts_ptr, residual_ptr, y_ptr, size, ranks, RESIDUAL: tl.constexpr, BC: tl.constexpr):
    """Program c: BC of the `size` elements, rows side by side."""
    at = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    inside = at < size
    total = tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for _ in range(1, ranks):
        parts_ptr += size
        total += tl.load(parts_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


def fused(parts, residual=None):
    """The twin of `reference`: one launch."""
    parts, size = parts.contiguous(), parts[0].numel()
    y = torch.empty_like(parts[0])
    residual = None if residual is None else residual.contiguous()
    _total[(triton.cdiv(size, COLUMNS),)](
        parts, residual, y, size, len(parts), RESIDUAL=residual is not None, BC=COLUMNS, num_warps=4
    )
    return y


def specimens():
    """Compile specimens."""
    return [
        (
            _total,
            dict.fromkeys(("parts_ptr", "residual_ptr", "y_ptr"), name) | {"size": "i32", "ranks": "i32"},
            {"RESIDUAL": residual, "BC": COLUMNS},
            {"num_warps": 4},
        )
        for name in ("*bf16", "*fp16", "*fp32")
        for residual in (True, False)
    ]
