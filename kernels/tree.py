"""Growth of the draft tree: the beam of each step, the choice of nodes at the end, and their ancestor bits.

A pool holds every candidate in the order drafted: the root's K children, then K*K a step. Node indices of the pool
ascend with depth, so a parent always precedes its children.
"""

import torch
import triton
import triton.language as tl

from .select import largest
from .tile import SMALLEST, index_of, ordered, up


def grow(values, ids, lse, scores, nodes, pool, offset):
    """Score the children of the current beam, append them to the pool, keep the best K as the next beam.

    Args:
        values, ids: [B, Q, K] logits and target ids of each beam's best K; lse: [B, Q] their log-sum-exp.
        scores: [B, Q] cumulative log-probability of the beam; nodes: [B, Q] its pool indices (-1: the root).
        pool: (scores, tokens, parents), each [B, M], written at [offset, offset + Q*K).
        offset: first free pool index (host int).

    Returns:
        tokens, scores, nodes, source, each [B, K]: the next beam; source = which of the Q beams it extends.
        A non-finite row proposes nothing: its children get score -inf and token -1.
    """
    b, q, k = values.shape
    child = values - lse[..., None] + scores[..., None]
    sound = torch.isfinite(child)
    child = torch.where(sound, child, float("-inf")).view(b, q * k)
    token = torch.where(sound, ids, -1).view(b, q * k)
    for buffer, x in zip(pool, (child, token, nodes.repeat_interleave(k, 1)), strict=True):
        buffer[:, offset : offset + q * k] = x
    best, pick = largest(child, k)
    return token.gather(1, pick), best, offset + pick, pick // k


def choose(pool, tokens, parents):
    """Keep the best T-1 nodes of the pool, in pool order, parents renumbered to tree nodes.

    Args:
        pool: (scores, tokens, parents), each [B, M], M >= T-1.
        tokens, parents: [B, T] the tree; nodes 1..T-1 are written, node 0 is the root. parents[0] = 0.
    """
    scores, pool_tokens, pool_parents = pool
    pick = largest(scores, tokens.shape[1] - 1)[1].sort(1).values  # a parent scores no less than its child
    parent = pool_parents.gather(1, pick)
    tokens[:, 1:] = pool_tokens.gather(1, pick)
    parents[:, 0] = 0
    parents[:, 1:] = torch.where(parent < 0, 0, torch.searchsorted(pick, parent.contiguous()) + 1)


def ancestry(parents, depths, ancestors, steps):
    """Depths and ancestor bits of every node from the parents.

    Args:
        parents: [B, T] int64, parents[0] = 0 and parents[j] < j; depths, ancestors: [B, T] int64, written.
        steps: greatest depth (host int). Bit j of a node's ancestors is set for itself and every ancestor j.
    """
    node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    bits, at, depth = torch.ones_like(parents) << node, node, torch.zeros_like(parents)
    for _ in range(steps):
        depth = depth + (at > 0)
        at = parents.gather(1, at)
        bits = bits | (torch.ones_like(bits) << at)
    depths.copy_(depth)
    ancestors.copy_(bits)


@triton.jit
def _grow(
    values_ptr, ids_ptr, lse_ptr, scores_ptr, nodes_ptr, pool_scores_ptr, pool_tokens_ptr, pool_parents_ptr,
    token_out, score_out, node_out, source_out, beams, k, candidates, offset, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program b: children of the beam into the pool, the best k of them out."""
    b, at, pick = tl.program_id(0).to(tl.int64), tl.arange(0, BC), tl.arange(0, BK)
    inside, beam = at < beams * k, b * beams + at // k
    value = tl.load(values_ptr + b * beams * k + at, mask=inside, other=0.0)
    child = value - tl.load(lse_ptr + beam, mask=inside, other=0.0) + tl.load(scores_ptr + beam, mask=inside, other=0.0)
    sound = tl.abs(child) < float("inf")
    child = tl.where(sound, child, float("-inf"))
    token = tl.where(sound, tl.load(ids_ptr + b * beams * k + at, mask=inside, other=-1), -1)
    slot = b * candidates + offset + at
    tl.store(pool_scores_ptr + slot, child, mask=inside)
    tl.store(pool_tokens_ptr + slot, token, mask=inside)
    tl.store(pool_parents_ptr + slot, tl.load(nodes_ptr + beam, mask=inside, other=0), mask=inside)
    keys = tl.where(inside, ordered(child, at), SMALLEST)
    best, score, chosen = tl.zeros([BK], tl.int64), tl.zeros([BK], tl.float32), tl.zeros([BK], tl.int64)
    for j in range(k):
        key = tl.max(keys, 0)
        hit = keys == key
        best = tl.where(pick == j, index_of(key), best)
        score = tl.where(pick == j, tl.max(tl.where(hit, child, float("-inf")), 0), score)
        chosen = tl.where(pick == j, tl.sum(tl.where(hit, token, 0), 0), chosen)
        keys = tl.where(hit, SMALLEST, keys)
    out, wanted = b * k + pick, pick < k
    tl.store(token_out + out, chosen, mask=wanted)
    tl.store(score_out + out, score, mask=wanted)
    tl.store(node_out + out, best + offset, mask=wanted)
    tl.store(source_out + out, best // k, mask=wanted)


def grow_fused(values, ids, lse, scores, nodes, pool, offset):
    """The twin of `grow`."""
    b, q, k = values.shape
    tokens, out_nodes, source = (ids.new_empty(b, k) for _ in range(3))
    best = values.new_empty(b, k)
    _grow[(b,)](
        values.contiguous(), ids.contiguous(), lse.contiguous(), scores.contiguous(), nodes.contiguous(), *pool,
        tokens, best, out_nodes, source, q, k, pool[0].shape[1], offset,
        BC=max(16, up(q * k)), BK=up(k), num_warps=4,
    )  # fmt: skip
    return tokens, best, out_nodes, source


@triton.jit
def _choose(
    scores_ptr, pool_tokens_ptr, pool_parents_ptr, tokens_ptr, parents_ptr, candidates, nodes,
    BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Program b: the best nodes - 1 of the pool in pool order, parents renumbered."""
    b, at, pick = tl.program_id(0).to(tl.int64), tl.arange(0, BC), tl.arange(0, BT)
    inside = at < candidates
    keys = ordered(tl.load(scores_ptr + b * candidates + at, mask=inside, other=0.0), at)
    keys = tl.where(inside, keys, SMALLEST)
    chosen = tl.full([BT], 1 << 40, tl.int64)
    for j in range(nodes - 1):
        key = tl.max(keys, 0)
        chosen = tl.where(pick == j, index_of(key), chosen)
        keys = tl.where(keys == key, SMALLEST, keys)
    wanted = pick < nodes - 1
    place = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), 1) + 1  # node number: rank in pool order
    parent = tl.load(pool_parents_ptr + b * candidates + chosen, mask=wanted, other=-1)
    above = tl.sum((chosen[None, :] < parent[:, None]).to(tl.int64), 1) + 1
    line = b * nodes
    tl.store(tokens_ptr + line + place, tl.load(pool_tokens_ptr + b * candidates + chosen, mask=wanted), mask=wanted)
    tl.store(parents_ptr + line + place, tl.where(parent < 0, 0, above), mask=wanted)
    tl.store(parents_ptr + line, tl.zeros([], tl.int64))


def choose_fused(pool, tokens, parents):
    """The twin of `choose`."""
    b, nodes = tokens.shape
    candidates = pool[0].shape[1]
    _choose[(b,)](*pool, tokens, parents, candidates, nodes, BC=max(16, up(candidates)), BT=up(nodes), num_warps=4)


@triton.jit
def _ancestry(parents_ptr, depths_ptr, ancestors_ptr, nodes, steps, BT: tl.constexpr):
    """Program b: walk every node to the root at once."""
    line, node = tl.program_id(0).to(tl.int64) * nodes, tl.arange(0, BT)
    inside, at = node < nodes, node.to(tl.int64)
    one = tl.full([BT], 1, tl.int64)
    bits, depth = one << at, tl.zeros([BT], tl.int64)
    for _ in range(steps):
        depth += (at > 0).to(tl.int64)
        at = tl.load(parents_ptr + line + at, mask=inside, other=0)
        bits = bits | (one << at)
    tl.store(depths_ptr + line + node, depth, mask=inside)
    tl.store(ancestors_ptr + line + node, bits, mask=inside)


def ancestry_fused(parents, depths, ancestors, steps):
    """The twin of `ancestry`."""
    b, nodes = parents.shape
    _ancestry[(b,)](parents, depths, ancestors, nodes, steps, BT=up(nodes), num_warps=1)


def specimens():
    """Compile specimens: a chain, a usual and a wide tree."""
    pool = {"pool_tokens_ptr": "*i64", "pool_parents_ptr": "*i64", "candidates": "i32"}
    ints = dict.fromkeys(("ids_ptr", "nodes_ptr", "token_out", "node_out", "source_out"), "*i64")
    floats = dict.fromkeys(("values_ptr", "lse_ptr", "scores_ptr", "pool_scores_ptr", "score_out"), "*fp32")
    grown = ints | floats | pool | dict.fromkeys(("beams", "k", "offset"), "i32")
    chosen = pool | {"scores_ptr": "*fp32", "tokens_ptr": "*i64", "parents_ptr": "*i64", "nodes": "i32"}
    bits = dict.fromkeys(("parents_ptr", "depths_ptr", "ancestors_ptr"), "*i64") | {"nodes": "i32", "steps": "i32"}
    return [
        *((_grow, grown, {"BC": c, "BK": k}, {"num_warps": 4}) for c, k in ((16, 1), (64, 8), (1024, 32))),
        *((_choose, chosen, {"BC": c, "BT": t}, {"num_warps": 4}) for c, t in ((16, 4), (256, 64), (4096, 64))),
        *((_ancestry, bits, {"BT": t}, {"num_warps": 1}) for t in (4, 64)),
    ]
