"""Norm, router projection and top-k choice of experts."""

from dataclasses import dataclass

from . import norm
from .select import largest


@dataclass(frozen=True)
class Routing:
    """How router logits become experts and weights (softmax over all experts, then the best k)."""

    top_k: int
    renormalise: bool


def reference(x, norm_weight, eps, gate, rule):
    """Choose experts for every row.

    Args:
        x: [N, D] residual stream; norm_weight: [D]; gate: [E, D]; rule: Routing.

    Returns:
        normed [N, D] (the experts' input), ids [N, k] int64 in descending order of weight (equal weights: lowest
        id first), weights [N, k] fp32.
    """
    normed = norm.reference(x, norm_weight, eps)
    logits = normed.float() @ gate.float().T
    weights, ids = largest(logits.softmax(-1), rule.top_k)
    if rule.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return normed, ids, weights
