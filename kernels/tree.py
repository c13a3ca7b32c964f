"""Growth of the draft tree: the beam of each step, the choice of nodes at the end, and their ancestor bits.

A pool holds every candidate in the order drafted: the root's K children, then K*K a step. Node indices of the pool
ascend with depth, so a parent always precedes its children.
"""

import torch
import triton
import triton.language as tl

from .select import largest
from .tile import SMALLEST, begin, chained, index_of, ordered, up


def grow(values, ids, lse, to_target, seq_lens, beam, pool, step):
    """Score the children of the current beam, append them to the pool, keep the best K as the next beam.

    Args:
        values, ids: [B, Q, K] logits and ids of each beam's best K; lse: [B, Q] their log-sum-exp.
        to_target: [Vd] int64 added to ids below Vd to make them the target's, or None; seq_lens: [B] committed rows n.
        beam: (scores, nodes, bits), each [B, Q]: cumulative log-probability, pool index, and the rows past the prefix
        of itself and of those before it; None: the root (Q = 1).
        pool: (scores, tokens, parents), each [B, M], in the order drafted; step: passes before this one (host int).

    Returns:
        the next beam's pass: tokens, source (which of the Q beams it extends), positions, index (row of the cache),
        each [B, K]; and the next beam.
        A non-finite row proposes nothing: its children get score -inf and token -1.
    """
    b, q, k = values.shape
    if beam is None:
        beam = torch.zeros_like(lse), torch.full_like(ids[..., 0], -1), torch.zeros_like(ids[..., 0])
    scores, nodes, bits = beam
    child = values - lse[..., None] + scores[..., None]
    sound = torch.isfinite(child)
    child = torch.where(sound, child, float("-inf")).view(b, q * k)
    ids = ids if to_target is None else ids + to_target[ids]
    token, offset = torch.where(sound, ids, -1).view(b, q * k), first_of(step, k)
    for buffer, x in zip(pool, (child, token, nodes.repeat_interleave(k, 1)), strict=True):
        buffer[:, offset : offset + q * k] = x
    best, pick = largest(child, k)
    source, own = pick // k, step * k + torch.arange(k, device=ids.device)
    bits = bits.gather(1, source) | (torch.ones_like(own) << (own & 63))  # past 63 no pass follows
    position, index = (seq_lens + step)[:, None].repeat(1, k), seq_lens[:, None] + own
    return token.gather(1, pick), source, position, index, (best, offset + pick, bits)


def first_of(step, k):
    """First pool index of the candidates of a step."""
    return k + (step - 1) * k * k if step else 0


def choose(pool, root, tokens, parents):
    """Keep the best T-1 nodes of the pool, in pool order, parents renumbered to tree nodes.

    Args:
        pool: (scores, tokens, parents), each [B, M], M >= T-1; root: [B] token of node 0.
        tokens, parents: [B, T] the tree, written. parents[0] = 0.
    """
    scores, pool_tokens, pool_parents = pool
    pick = largest(scores, tokens.shape[1] - 1)[1].sort(1).values  # a parent scores no less than its child
    parent = pool_parents.gather(1, pick)
    tokens[:, 0] = root
    tokens[:, 1:] = pool_tokens.gather(1, pick)
    parents[:, 0] = 0
    parents[:, 1:] = torch.where(parent < 0, 0, torch.searchsorted(pick, parent.contiguous()) + 1)


def plant(root, seq_lens, tokens, parents, depths, ancestors, positions, index, steps):
    """What a verify pass needs of a tree, from its parents.

    Args:
        root, seq_lens: [B] token of node 0, committed rows n; parents: [B, T], parents[0] = 0 and parents[j] < j.
        tokens: [B, T], node 0 is written; depths, ancestors, positions (n + depth), index (n + node): [B, T], written.
        steps: greatest depth (host int). Bit j of a node's ancestors is set for itself and every ancestor j.
    """
    node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    bits, at, depth = torch.ones_like(parents) << node, node, torch.zeros_like(parents)
    for _ in range(steps):
        depth = depth + (at > 0)
        at = parents.gather(1, at)
        bits = bits | (torch.ones_like(bits) << at)
    tokens[:, 0] = root
    for out, x in ((depths, depth), (ancestors, bits), (positions, seq_lens[:, None] + depth)):
        out.copy_(x)
    index.copy_(seq_lens[:, None] + node)


@triton.jit
def _grow(
    values_ptr, ids_ptr, lse_ptr, map_ptr, seq_ptr, scores_ptr, nodes_ptr, bits_ptr, pool_scores_ptr, pool_tokens_ptr,
    pool_parents_ptr, token_out, source_out, position_out, index_out, score_out, node_out, bits_out,
    beams, k, candidates, offset, step,
    MAP: tl.constexpr, ROOT: tl.constexpr, PDL: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program b: children of the beam into the pool, the best k of them out. ROOT: the beam is the root."""
    begin(PDL)
    b, at, pick = tl.program_id(0).to(tl.int64), tl.arange(0, BC), tl.arange(0, BK)
    inside, beam = at < beams * k, b * beams + at // k
    child = tl.load(values_ptr + b * beams * k + at, mask=inside, other=0.0)
    child -= tl.load(lse_ptr + beam, mask=inside, other=0.0)
    node = tl.full([BC], -1, tl.int64)
    if not ROOT:
        child += tl.load(scores_ptr + beam, mask=inside, other=0.0)
        node = tl.load(nodes_ptr + beam, mask=inside, other=0)
    sound = tl.abs(child) < float("inf")
    child = tl.where(sound, child, float("-inf"))
    token = tl.load(ids_ptr + b * beams * k + at, mask=inside, other=0)
    if MAP:
        token += tl.load(map_ptr + token, mask=inside, other=0)
    token = tl.where(sound, token, -1)
    slot = b * candidates + offset + at
    tl.store(pool_scores_ptr + slot, child, mask=inside)
    tl.store(pool_tokens_ptr + slot, token, mask=inside)
    tl.store(pool_parents_ptr + slot, node, mask=inside)
    keys = tl.where(inside, ordered(child, at), SMALLEST)
    best, score, chosen = tl.zeros([BK], tl.int64), tl.zeros([BK], tl.float32), tl.zeros([BK], tl.int64)
    for j in range(k):
        key = tl.max(keys, 0)
        hit = keys == key
        best = tl.where(pick == j, index_of(key), best)
        score = tl.where(pick == j, tl.max(tl.where(hit, child, float("-inf")), 0), score)
        chosen = tl.where(pick == j, tl.sum(tl.where(hit, token, 0), 0), chosen)
        keys = tl.where(hit, SMALLEST, keys)
    out, wanted, source, own = b * k + pick, pick < k, best // k, (step * k + pick).to(tl.int64)
    prefix = tl.load(seq_ptr + b)
    bits = tl.full([BK], 1, tl.int64) << (own & 63)
    if not ROOT:
        bits = bits | tl.load(bits_ptr + b * beams + source, mask=wanted, other=0)
    tl.store(token_out + out, chosen, mask=wanted)
    tl.store(source_out + out, source, mask=wanted)
    tl.store(position_out + out, prefix + step + pick * 0, mask=wanted)
    tl.store(index_out + out, prefix + own, mask=wanted)
    tl.store(score_out + out, score, mask=wanted)
    tl.store(node_out + out, best + offset, mask=wanted)
    tl.store(bits_out + out, bits, mask=wanted)


def grow_fused(values, ids, lse, to_target, seq_lens, beam, pool, step):
    """The twin of `grow`."""
    b, q, k = values.shape
    tokens, source, position, index, nodes, bits = ids.new_empty(6, b, k)
    scores, size = values.new_empty(b, k), max(16, up(q * k))
    _grow[(b,)](
        values.contiguous(), ids.contiguous(), lse.contiguous(), to_target, seq_lens,
        *((None,) * 3 if beam is None else (x.contiguous() for x in beam)), *pool,
        tokens, source, position, index, scores, nodes, bits, q, k, pool[0].shape[1], first_of(step, k), step,
        MAP=to_target is not None, ROOT=beam is None, BC=size, BK=up(k), num_warps=1 if size <= 128 else 4,
        **chained(values),
    )  # fmt: skip
    return tokens, source, position, index, (scores, nodes, bits)


@triton.jit
def _choose(
    scores_ptr, pool_tokens_ptr, pool_parents_ptr, root_ptr, tokens_ptr, parents_ptr, candidates, nodes,
    PDL: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Program b: the best nodes - 1 of the pool in pool order, parents renumbered."""
    begin(PDL)
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
    tl.store(tokens_ptr + line, tl.load(root_ptr + b))


def choose_fused(pool, root, tokens, parents):
    """The twin of `choose`."""
    b, nodes = tokens.shape
    candidates = pool[0].shape[1]
    size = max(16, up(candidates))
    _choose[(b,)](
        *pool, root, tokens, parents, candidates, nodes, BC=size, BT=up(nodes), num_warps=1 if size <= 128 else 4,
        **chained(root),
    )  # fmt: skip


@triton.jit
def _plant(
    root_ptr, seq_ptr, tokens_ptr, parents_ptr, depths_ptr, ancestors_ptr, positions_ptr, index_ptr, nodes, steps,
    PDL: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Program b: walk every node to the root at once."""
    begin(PDL)
    b, node = tl.program_id(0).to(tl.int64), tl.arange(0, BT)
    line, inside, at = b * nodes, node < nodes, node.to(tl.int64)
    prefix, one = tl.load(seq_ptr + b), tl.full([BT], 1, tl.int64)
    bits, depth = one << at, tl.zeros([BT], tl.int64)
    tl.store(tokens_ptr + line, tl.load(root_ptr + b))
    tl.store(index_ptr + line + node, prefix + node, mask=inside)
    for _ in range(steps):
        depth += (at > 0).to(tl.int64)
        at = tl.load(parents_ptr + line + at, mask=inside, other=0)
        bits = bits | (one << at)
    tl.store(depths_ptr + line + node, depth, mask=inside)
    tl.store(ancestors_ptr + line + node, bits, mask=inside)
    tl.store(positions_ptr + line + node, prefix + depth, mask=inside)


def plant_fused(root, seq_lens, tokens, parents, depths, ancestors, positions, index, steps):
    """The twin of `plant`."""
    b, nodes = parents.shape
    outputs = (depths, ancestors, positions, index)
    options = chained(root) | {"num_warps": 1}
    _plant[(b,)](root, seq_lens, tokens, parents, *outputs, nodes, steps, BT=up(nodes), **options)


def specimens():
    """Compile specimens: a chain, a usual and a wide tree."""
    pool = {"pool_tokens_ptr": "*i64", "pool_parents_ptr": "*i64", "candidates": "i32"}
    ints = dict.fromkeys(("ids_ptr", "map_ptr", "seq_ptr", "nodes_ptr", "bits_ptr", "token_out", "source_out"), "*i64")
    ints |= dict.fromkeys(("position_out", "index_out", "node_out", "bits_out"), "*i64")
    floats = dict.fromkeys(("values_ptr", "lse_ptr", "scores_ptr", "pool_scores_ptr", "score_out"), "*fp32")
    grown = ints | floats | pool | dict.fromkeys(("beams", "k", "offset", "step"), "i32")
    beam = ("scores_ptr", "nodes_ptr", "bits_ptr")
    first = {name: kind for name, kind in grown.items() if name not in beam}
    chosen = pool | {"scores_ptr": "*fp32", "root_ptr": "*i64", "tokens_ptr": "*i64", "parents_ptr": "*i64"}
    planted = dict.fromkeys(("root_ptr", "seq_ptr", "tokens_ptr", "parents_ptr", "depths_ptr"), "*i64")
    planted |= dict.fromkeys(("ancestors_ptr", "positions_ptr", "index_ptr"), "*i64") | {"nodes": "i32", "steps": "i32"}
    sizes, pdl = {"MAP": True, "ROOT": False, "PDL": True}, {"launch_pdl": True}
    return [
        *(
            (_grow, grown, sizes | {"BC": c, "BK": k}, pdl | {"num_warps": w})
            for c, k, w in ((16, 1, 1), (1024, 32, 4))
        ),
        (_grow, first, dict.fromkeys(beam) | {"MAP": False, "ROOT": True, "PDL": False, "BC": 16, "BK": 4}, {}),
        *(
            (_choose, chosen | {"nodes": "i32"}, {"PDL": True, "BC": c, "BT": t}, pdl | {"num_warps": w})
            for c, t, w in ((16, 4, 1), (256, 64, 4), (4096, 64, 4))
        ),
        *((_plant, planted, {"PDL": True, "BT": t}, pdl | {"num_warps": 1}) for t in (1, 4, 64)),
    ]
