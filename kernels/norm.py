"""RMS norm: fp32 inside, rounded once to the input's dtype."""

import torch
import triton
import triton.language as tl


def reference(x, weight, eps):
    """x [N, D], weight [D] -> [N, D] = x / rms(x) * weight; x itself, which comes normed, where weight is None."""
    if weight is None:
        return x
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


@triton.jit
def write_normed(x_ptr, weight_ptr, y_ptr, columns, eps, BC: tl.constexpr):
    """One row: y = x / rms(x) * weight, in chunks of BC columns; pointers at the row's first element."""
    at = tl.arange(0, BC)
    total = tl.zeros([BC], tl.float32)
    for c in range(0, columns, BC):
        x = tl.load(x_ptr + c + at, mask=c + at < columns, other=0.0).to(tl.float32)
        total += x * x
    scale = tl.math.rsqrt(tl.sum(total, 0) / columns + eps)
    for c in range(0, columns, BC):
        inside = c + at < columns
        x = tl.load(x_ptr + c + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + c + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + c + at, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm(x_ptr, weight_ptr, y_ptr, columns, eps, BC: tl.constexpr):
    """Program n: row n."""
    start = tl.program_id(0).to(tl.int64) * columns
    write_normed(x_ptr + start, weight_ptr, y_ptr + start, columns, eps, BC)


def fused(x, weight, eps):
    """The twin of `reference`: one program a row."""
    if weight is None:
        return x
    x = x.contiguous()
    y = torch.empty_like(x)
    columns = x.shape[-1]
    _norm[(x.numel() // columns,)](x, weight, y, columns, eps, BC=chunk(columns), num_warps=4)
    return y


def chunk(columns):
    """Columns a program takes at a time: a function of the width alone."""
    return min(2048, max(32, triton.next_power_of_2(columns)))


def specimens():
    """Compile specimens."""
    types = {"columns": "i32", "eps": "fp32"}
    return [
        (
            _norm,
            dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), name) | types,
            {"BC": chunk(columns)},
            {"num_warps": 4},
        )
        for name in ("*bf16", "*fp16", "*fp32")
        for columns in (2048, 256, 128, 80)
    ]
