"""Ordered selection shared by the reference twins: by value, the lowest index first among equals.

torch.topk leaves the order of ties open; every selection in this engine must be the same on all ranks and shapes.
"""

import torch


def largest(x, k):
    """Largest `k` of the last dimension by (value, lowest index).

    Args:
        x: [..., M] without NaN (replace NaN by -inf before).
        k: how many, 1 <= k <= M.

    Returns:
        values [..., k], indices [..., k] int64, both in descending order of value.
    """
    if k == 1:
        values, indices = x.max(-1, keepdim=True)  # the first of equal maxima, on CPU and CUDA alike
        return values, indices
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def gather_rows(x, rows):
    """Rows `rows` [B, R] of `x` [B, M, ...] -> [B, R, ...]."""
    index = rows.view(*rows.shape, *([1] * (x.dim() - 2))).expand(*rows.shape, *x.shape[2:])
    return x.gather(1, index)
