"""The draft head's input: norm(embedding) ‖ norm(hidden), embedding first."""

import torch
import triton
import triton.language as tl

from . import norm


def reference(embedding, embed_norm, hidden, hidden_norm, eps):
    """embedding [N, D], hidden [N, D], two norm weights [D] -> [N, 2D]."""
    return torch.cat([norm.reference(embedding, embed_norm, eps), norm.reference(hidden, hidden_norm, eps)], -1)


@triton.jit
def _concatenate(e_ptr, e_norm_ptr, h_ptr, h_norm_ptr, y_ptr, columns, eps, BC: tl.constexpr):
    """Program (n, half): one norm of row n into its half of the output."""
    row = tl.program_id(0).to(tl.int64) * columns
    if tl.program_id(1) == 0:
        norm.write_normed(e_ptr + row, e_norm_ptr, y_ptr + 2 * row, columns, eps, BC)
    else:
        norm.write_normed(h_ptr + row, h_norm_ptr, y_ptr + 2 * row + columns, columns, eps, BC)


def fused(embedding, embed_norm, hidden, hidden_norm, eps):
    """The twin of `reference`: both norms straight into their halves."""
    rows, columns = embedding.shape
    y = embedding.new_empty(rows, 2 * columns)
    _concatenate[(rows, 2)](
        embedding.contiguous(), embed_norm, hidden.contiguous(), hidden_norm, y, columns, eps,
        BC=norm.chunk(columns), num_warps=4,
    )  # fmt: skip
    return y


def specimens():
    """Compile specimens."""
    pointers = ("e_ptr", "e_norm_ptr", "h_ptr", "h_norm_ptr", "y_ptr")
    return [
        (
            _concatenate,
            dict.fromkeys(pointers, name) | {"columns": "i32", "eps": "fp32"},
            {"BC": norm.chunk(columns)},
            {"num_warps": 4},
        )
        for name in ("*bf16", "*fp16", "*fp32")
        for columns in (2048, 256)
    ]
