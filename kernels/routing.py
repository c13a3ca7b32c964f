"""Norm, router projection and top-k choice of experts."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import linear, norm
from .select import largest
from .tile import SMALLEST, index_of, ordered, up


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


@triton.jit
def _best(
    logits_ptr, ids_ptr, weights_ptr, experts, top_k, RENORMALISE: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr
):
    """Program n: softmax over all experts of row n, its best top_k by (weight, lowest id)."""
    row, lane, choice = tl.program_id(0).to(tl.int64), tl.arange(0, BE), tl.arange(0, BK)
    inside = lane < experts
    logits = tl.load(logits_ptr + row * experts + lane, mask=inside, other=float("-inf"))
    raised = tl.exp(logits - tl.max(logits, 0))
    share = raised / tl.sum(raised, 0)
    # a row of NaN still chooses experts that exist
    keys = tl.where(inside, ordered(tl.where(share == share, share, -1.0), lane), SMALLEST)
    ids, weights = tl.zeros([BK], tl.int64), tl.zeros([BK], tl.float32)
    for j in range(top_k):
        key = tl.max(keys, 0)
        chosen = index_of(key)
        ids = tl.where(choice == j, chosen, ids)
        weights = tl.where(choice == j, tl.sum(tl.where(lane == chosen, share, 0.0), 0), weights)
        keys = tl.where(keys == key, SMALLEST, keys)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 0)
    tl.store(ids_ptr + row * top_k + choice, ids, mask=choice < top_k)
    tl.store(weights_ptr + row * top_k + choice, weights, mask=choice < top_k)


def best(logits, rule):
    """Logits [N, E] fp32 -> ids [N, k], weights [N, k]."""
    (rows, experts), k = logits.shape, rule.top_k
    ids = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    _best[(rows,)](
        logits, ids, weights, experts, k, RENORMALISE=rule.renormalise, BE=max(32, up(experts)), BK=up(k), num_warps=1
    )
    return ids, weights


def fused(x, norm_weight, eps, gate, rule):
    """The twin of `reference`: norm; projection to fp32 logits; softmax and choice."""
    normed = norm.fused(x, norm_weight, eps)
    return normed, *best(linear.project(normed, None, 0.0, gate, dtype=torch.float32), rule)


def specimens():
    """Compile specimens; norm and projection have their own."""
    types = {"logits_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32", "experts": "i32", "top_k": "i32"}
    return [
        (_best, types, {"RENORMALISE": renormalise, "BE": experts, "BK": 8}, {"num_warps": 1})
        for experts, renormalise in ((128, True), (16, False))
    ]
