"""Growth of the draft tree: the beam of each step, the choice of nodes at the end, and their ancestor bits.

A pool holds every candidate in the order drafted: the root's K children, then K*K a step. Node indices of the pool
ascend with depth, so a parent always precedes its children.
"""

import torch

from .select import largest


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
