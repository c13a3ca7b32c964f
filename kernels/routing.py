"""Norm, router projection and top-k choice of experts, for every kind of router."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import linear, mlp, norm
from .select import largest
from .tile import SMALLEST, index_of, ordered, up

SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "logits": lambda logits: logits,
}
LEAST_SUM = 1e-20  # added to a sum that divides: sigmoids of a row may all be zero


@dataclass(frozen=True)
class Routing:
    """How router logits become experts and weights.

    score: "softmax" over all experts (Qwen3, Mixtral, DeepSeek-V2), "sigmoid" of each (DeepSeek-V3, GLM-4.5), or
    "logits": the best are chosen by their logits and weighted by a softmax over the chosen (gpt-oss).
    Experts stand in `groups` of equal size; only those of the `top_groups` best groups may be chosen, a group being as
    good as the sum of its `group_best` best (DeepSeek-V3: 2, V2: 1). renormalise: the chosen weights are divided by
    their sum; scale multiplies them after that.
    """

    top_k: int
    renormalise: bool
    score: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    scale: float = 1.0


def _candidates(choice, rule):
    """choice [N, E] with -inf for the experts of groups that are not among the best."""
    if rule.groups == 1:
        return choice
    members = choice.unflatten(-1, (rule.groups, -1))
    best, _ = largest(members, rule.group_best)
    _, kept = largest(best.sum(-1), rule.top_groups)
    allowed = torch.zeros(members.shape[:-1], dtype=torch.bool, device=choice.device).scatter(-1, kept, True)
    return members.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)


def reference(x, norm_weight, eps, gate, rule, bias=None, correction=None, shared=None):
    """Choose experts for every row.

    Args:
        x: [N, D] residual stream; norm_weight: [D], or None where x comes normed; gate: [E, D]; rule: Routing;
        bias: [E], of the logits, or None; correction: [E] fp32 or None, added to the scores for the choice alone.

    Returns:
        normed [N, D] (the experts' input), ids [N, k] int64 in descending order of what they were chosen by (equals:
        lowest id first), weights [N, k] fp32; and, where a shared expert's gate and up are given (shared [2S, D], gates
        first), silu(gate) * up [N, S] of the normed rows.
    """
    normed = norm.reference(x, norm_weight, eps)
    logits = normed.float() @ gate.float().T
    if bias is not None:
        logits = logits + bias.float()
    scores = SCORES[rule.score](logits)
    choice = scores if correction is None else scores + correction.float()
    choice = choice.masked_fill(choice.isnan(), float("-inf"))  # a row of NaN still chooses experts that exist
    _, ids = largest(_candidates(choice, rule), rule.top_k)
    weights = scores.gather(1, ids)
    if rule.score == "logits":
        weights = weights.softmax(-1)
    if rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    chosen = normed, ids, weights * rule.scale
    return chosen if shared is None else (*chosen, mlp.widened(normed, shared, "silu"))


@triton.jit
def _allowed(choice, lane, inside, size, groups, top_groups, BEST: tl.constexpr, BG: tl.constexpr):
    """Which lanes lie in the best groups: `size` lanes a group, a group's value the sum of its BEST best."""
    at = tl.arange(0, BG)
    values = tl.full([BG], float("-inf"), tl.float32)
    for g in range(groups):
        keys, value = tl.where(inside & (lane // size == g), ordered(choice, lane), SMALLEST), 0.0
        for _ in tl.static_range(BEST):
            key = tl.max(keys, 0)
            value += tl.sum(tl.where(lane == index_of(key), choice, 0.0), 0)
            keys = tl.where(keys == key, SMALLEST, keys)
        values = tl.where(at == g, value, values)
    keys = tl.where(at < groups, ordered(values, at), SMALLEST)
    allowed = lane < 0
    for _ in range(top_groups):
        key = tl.max(keys, 0)
        allowed = allowed | (lane // size == index_of(key))
        keys = tl.where(keys == key, SMALLEST, keys)
    return allowed


@triton.jit
def _best(
    logits_ptr, correction_ptr, ids_ptr, weights_ptr, experts, top_k, groups, top_groups, scale,
    SCORE: tl.constexpr, CORRECTION: tl.constexpr, RENORMALISE: tl.constexpr, GROUPED: tl.constexpr,
    BEST: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Program n: scores of row n, its best top_k by (score + correction, lowest id)."""
    row, lane, place = tl.program_id(0).to(tl.int64), tl.arange(0, BE), tl.arange(0, BK)
    inside = lane < experts
    score = tl.load(logits_ptr + row * experts + lane, mask=inside, other=float("-inf"))
    if SCORE == "softmax":
        raised = tl.exp(score - tl.max(score, 0))
        score = raised / tl.sum(raised, 0)
    elif SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    choice = score
    if CORRECTION:
        choice = score + tl.load(correction_ptr + lane, mask=inside, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))
    keys = tl.where(inside, ordered(choice, lane), SMALLEST)
    if GROUPED:
        allowed = _allowed(choice, lane, inside, experts // groups, groups, top_groups, BEST, BG)
        keys = tl.where(allowed, keys, SMALLEST)
    ids, weights = tl.zeros([BK], tl.int64), tl.zeros([BK], tl.float32)
    for j in range(top_k):
        key = tl.max(keys, 0)
        chosen = index_of(key)
        ids = tl.where(place == j, chosen, ids)
        weights = tl.where(place == j, tl.sum(tl.where(lane == chosen, score, 0.0), 0), weights)
        keys = tl.where(keys == key, SMALLEST, keys)
    if SCORE == "logits":
        real = place < top_k
        raised = tl.where(real, tl.exp(weights - tl.max(tl.where(real, weights, float("-inf")), 0)), 0.0)
        weights = raised / tl.sum(raised, 0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(ids_ptr + row * top_k + place, ids, mask=place < top_k)
    tl.store(weights_ptr + row * top_k + place, weights * scale, mask=place < top_k)


def _constants(experts, rule, correction):
    """Compile-time arguments of `_best`."""
    return {
        "SCORE": rule.score, "CORRECTION": correction, "RENORMALISE": rule.renormalise, "GROUPED": rule.groups > 1,
        "BEST": rule.group_best, "BE": max(32, up(experts)), "BK": up(rule.top_k), "BG": up(rule.groups),
    }  # fmt: skip


def best(logits, rule, correction=None):
    """Logits [N, E] fp32 -> ids [N, k], weights [N, k]."""
    (rows, experts), k = logits.shape, rule.top_k
    ids = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    _best[(rows,)](
        logits, correction, ids, weights, experts, k, rule.groups, rule.top_groups, rule.scale,
        **_constants(experts, rule, correction is not None), num_warps=1,
    )  # fmt: skip
    return ids, weights


def fused(x, norm_weight, eps, gate, rule, bias=None, correction=None, shared=None):
    """The twin of `reference`: norm; projection to fp32 logits; scores and choice; the shared expert."""
    normed = norm.fused(x, norm_weight, eps)
    chosen = normed, *best(linear.project(normed, None, 0.0, gate, bias, dtype=torch.float32), rule, correction)
    return chosen if shared is None else (*chosen, mlp.widened_fused(normed, None, 0.0, shared, "silu"))


def specimens():
    """Compile specimens: Qwen3-30B-A3B, the demo target, gpt-oss, GLM-4.5, Kimi-K2, DeepSeek-V3 and V2; norm and
    projection have their own."""
    types = {"logits_ptr": "*fp32", "correction_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32"}
    types |= dict.fromkeys(("experts", "top_k", "groups", "top_groups"), "i32") | {"scale": "fp32"}
    return [
        (_best, types, _constants(experts, rule, corrected), {"num_warps": 1})
        for experts, rule, corrected in (
            (128, Routing(8, True), False),
            (16, Routing(8, False), False),
            (128, Routing(4, False, "logits"), False),
            (160, Routing(8, True, "sigmoid", scale=2.5), True),
            (384, Routing(8, True, "sigmoid", scale=2.827), True),
            (256, Routing(8, True, "sigmoid", 8, 4, 2, 2.5), True),
            (160, Routing(6, False, "softmax", 8, 3, 1, 16.0), False),
        )
    ]
