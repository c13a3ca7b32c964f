"""Final norm, output head and the best k of the vocabulary."""

import torch

from . import norm
from .select import largest


def reference(x, norm_weight, eps, weight, k, logits=None):
    """Best k entries of every row's logits.

    Args:
        x: [N, D] residual stream; norm_weight [D]; weight [V, D].
        k: entries wanted; logits: [N, V] fp32 written in place, or None where nobody asked for them.

    Returns:
        values [N, k] fp32 logits by (value, lowest id), ids [N, k] int64, lse [N] fp32 log-sum-exp over the row.
        A row with a NaN or +inf, or of -inf only, has a non-finite lse; its ids stay inside the vocabulary.
    """
    y = norm.reference(x, norm_weight, eps).float() @ weight.float().T
    if logits is not None:
        logits.copy_(y)
    lse = y.logsumexp(-1)
    values, ids = largest(y.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")), k)
    return values, ids, lse


def merge(values, ids, lse, k):
    """Combine the bests of vocabulary shares, rank order along dim 1: values, ids [N, R*k], lse [N, R]."""
    best, at = largest(values, k)  # shares ascend with rank, so the lowest position is the lowest id
    return best, ids.gather(1, at), torch.logsumexp(lse, 1)
