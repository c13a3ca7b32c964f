"""The greedy accept walk, its cuts, and the hand-over of what it emitted to the drafter's backlog."""

import torch
import triton
import triton.language as tl

from .select import gather_rows
from .tile import begin, chained, copied, up


def walk(
    tokens,
    parents,
    target_ids,
    lse,
    seq_lens,
    limits,
    stop_ids,
    path,
    emitted,
    accept_lens,
    matched,
    done,
    fault,
    chain,
    missed,
    root,
    backlog=None,
    drafted=False,
):
    """Follow the child that equals the target's own token, from the root, as far as it goes; then cut.

    Args:
        tokens, parents, target_ids: [B, T] int64 the tree and the target's token after each node.
        lse: [B, T] fp32 log-sum-exp of the node's logits; not finite where these are not: nothing is emitted after
        such a node.
        seq_lens: [B] committed rows, updated: those of the path that count are among them (kernels.commit puts them in
        their places); limits: [B] how many there may be.
        stop_ids: [B, M] ids that end a sequence (-1: unused).
        path, emitted: [B, P] written; emitted[k] follows node path[k].
        accept_lens: [B] written: how many of them count after the cuts (0 for a sequence already done).
        matched: [B] written: draft tokens that the target agreed with, before the cuts.
        done, fault: [B] flags, updated: the sequence has ended; it ended on non-finite logits.
        chain: [B] written: nodes of the path, before the cuts, up to which each is the first child of the one before:
        what a chain of the likeliest nodes would have kept; missed: [B] 1 where a further one was wrong, 0 where there
        was none.
        root: [B] updated: the last token emitted.
        backlog: [B] rows the drafter has yet to see, or None: those emitted are added, or counted alone where it has
        `drafted` and so has seen the others.
    """
    node, ended, finite = torch.arange(tokens.shape[1], device=tokens.device), done != 0, torch.isfinite(lse)
    at = torch.zeros_like(seq_lens)[:, None]
    alive = finite.gather(1, at)
    broken, steps, lens, match = ~alive, [at], alive.long(), torch.zeros_like(at)
    straight, first, miss = torch.ones_like(alive), torch.zeros_like(at), torch.zeros_like(alive)
    for _ in range(path.shape[1] - 1):
        children = (parents == at) & (node > 0)
        hit = children & (tokens == target_ids.gather(1, at))
        alive = alive & hit.any(1, keepdim=True)
        at = torch.where(alive, hit.long().argmax(1, keepdim=True), at)
        went = straight & alive & (at == children.long().argmax(1, keepdim=True))
        miss = miss | (straight & ~went & children.any(1, keepdim=True))
        straight, first, match = went, first + went, match + alive
        broken = broken | (alive & ~finite.gather(1, at))
        alive = alive & ~broken
        lens = lens + alive
        steps.append(at)
    path.copy_(torch.cat(steps, 1))
    emitted.copy_(target_ids.gather(1, path))

    k, room = torch.arange(path.shape[1], device=tokens.device), limits - seq_lens
    reach = torch.minimum(lens[:, 0], room)
    stop = (emitted[:, :, None] == stop_ids[:, None, :]).any(-1) & (k < reach[:, None])
    stopped = stop.any(1)
    reach = torch.where(stopped, stop.long().argmax(1) + 1, reach)
    broken = broken[:, 0] & ~ended & ~stopped & (reach < room)
    reach = torch.where(ended, 0, reach)
    accept_lens.copy_(reach)
    matched.copy_(match[:, 0])
    chain.copy_(first[:, 0])
    missed.copy_(miss[:, 0])
    fault.copy_((fault != 0) | broken)
    done.copy_(ended | stopped | broken | (reach >= room))
    last = emitted.gather(1, (reach - 1).clamp(min=0)[:, None])[:, 0]
    root.copy_(torch.where(reach > 0, last, root))
    seq_lens.add_(reach)
    if backlog is not None:
        backlog.copy_(reach if drafted else backlog + reach)


def follow(emitted, aux, path, accept_lens, backlog, backlog_tokens, backlog_features):
    """What was emitted, and the target's features under it, to the rows the drafter has yet to see.

    Args:
        emitted, path: [B, P]; aux: [B, T, F] features of the tree's nodes; accept_lens: [B].
        backlog: [B] rows waiting, these among them; backlog_tokens [B, W+1], backlog_features [B, W+1, F]: written at
        backlog - accept_lens + k for k < accept_lens. Row W is scratch: what does not count lands there.
    """
    width, k = backlog_tokens.shape[1] - 1, torch.arange(path.shape[1], device=path.device)
    before = (backlog - accept_lens)[:, None]
    at = torch.where(k < accept_lens[:, None], (before + k).clamp(max=width), width)
    backlog_tokens.scatter_(1, at, emitted)
    features = gather_rows(aux, path)
    backlog_features.scatter_(1, at[..., None].expand_as(features), features)


@triton.jit
def _walk(
    tokens_ptr, parents_ptr, target_ptr, lse_ptr, seq_ptr, limit_ptr, stop_ptr, path_ptr, emitted_ptr,
    lens_ptr, matched_ptr, done_ptr, fault_ptr, chain_ptr, missed_ptr, root_ptr, backlog_ptr, nodes, steps, stops,
    emitted_stride, flag_stride, BACKLOG: tl.constexpr, DRAFTED: tl.constexpr, PDL: tl.constexpr, BT: tl.constexpr,
    BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Program b: the greedy walk of one tree, then the cuts."""
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    node, k, line = tl.arange(0, BT), tl.arange(0, BP), b * nodes
    inside = node < nodes
    token = tl.load(tokens_ptr + line + node, mask=inside, other=-1)
    parent = tl.load(parents_ptr + line + node, mask=inside, other=-1)
    target = tl.load(target_ptr + line + node, mask=inside, other=-1)
    finite = (tl.abs(tl.load(lse_ptr + line + node, mask=inside, other=0.0)) < float("inf")).to(tl.int32)
    alive = tl.sum(tl.where(node == 0, finite, 0), 0)
    broken, lens, match, at = 1 - alive, alive, alive * 0, alive * 0
    path, straight, chain, missed = tl.zeros([BP], tl.int32), alive * 0 + 1, alive * 0, alive * 0
    for step in range(1, steps):
        own = tl.sum(tl.where(node == at, target, 0), 0)
        children = inside & (parent == at) & (node > 0)
        child = tl.min(tl.where(children & (token == own), node, BT), 0)
        eldest = tl.min(tl.where(children, node, BT), 0)
        alive = alive * (child < BT).to(tl.int32)
        at = tl.where(alive > 0, child, at)
        match += alive
        went = straight * alive * (child == eldest).to(tl.int32)
        missed += (straight - went) * (eldest < BT).to(tl.int32)
        straight, chain = went, chain + went
        broken = tl.maximum(broken, alive * (1 - tl.sum(tl.where(node == at, finite, 0), 0)))
        alive = alive * (1 - broken)
        lens += alive
        path = tl.where(k == step, at, path)
    used = k < steps
    emitted = tl.load(target_ptr + line + path, mask=used, other=0)
    tl.store(path_ptr + b * steps + k, path.to(tl.int64), mask=used)
    tl.store(emitted_ptr + b * emitted_stride + k, emitted, mask=used)

    flag, s = b * flag_stride, tl.arange(0, BS)
    committed = tl.load(seq_ptr + b)
    room = tl.load(limit_ptr + b) - committed
    reach = tl.minimum(lens.to(tl.int64), room)
    stop = tl.load(stop_ptr + b * stops + s, mask=s < stops, other=-1)
    same = (emitted[:, None] == stop[None, :]) & (s < stops)[None, :]
    cut = (tl.max(same.to(tl.int32), 1) > 0) & (k < reach)
    first = tl.min(tl.where(cut, k, BP), 0)
    stopped = (first < BP).to(tl.int32)
    reach = tl.where(stopped > 0, (first + 1).to(tl.int64), reach)
    ended = (tl.load(done_ptr + flag) != 0).to(tl.int32)
    broken = broken * (1 - ended) * (1 - stopped) * (reach < room).to(tl.int32)
    reach = tl.where(ended > 0, tl.zeros_like(reach), reach)
    fault = (tl.load(fault_ptr + flag) != 0).to(tl.int32)
    last = tl.sum(tl.where(k == reach - 1, emitted, 0), 0)
    tl.store(lens_ptr + flag, reach)
    tl.store(matched_ptr + flag, match.to(tl.int64))
    tl.store(chain_ptr + flag, chain.to(tl.int64))
    tl.store(missed_ptr + flag, missed.to(tl.int64))
    tl.store(fault_ptr + flag, tl.maximum(fault, broken).to(tl.int64))
    over = tl.maximum(tl.maximum(ended, stopped), tl.maximum(broken, (reach >= room).to(tl.int32)))
    tl.store(done_ptr + flag, over.to(tl.int64))
    tl.store(root_ptr + b, last, mask=reach > 0)
    tl.store(seq_ptr + b, committed + reach)
    if BACKLOG:
        if not DRAFTED:
            reach += tl.load(backlog_ptr + b)
        tl.store(backlog_ptr + b, reach)


def walk_fused(
    tokens,
    parents,
    target_ids,
    lse,
    seq_lens,
    limits,
    stop_ids,
    path,
    emitted,
    accept_lens,
    matched,
    done,
    fault,
    chain,
    missed,
    root,
    backlog=None,
    drafted=False,
):
    """The twin of `walk`; the flags [B] are columns of one block, so they share a stride."""
    (b, nodes), steps, stops = tokens.shape, path.shape[1], stop_ids.shape[1]
    flags = (accept_lens, matched, done, fault, chain, missed)
    if len({f.stride(0) for f in flags}) != 1 or any(f.dtype != torch.int64 for f in flags):
        raise ValueError("walk: accept_lens, matched and the flags share one stride and are int64")
    _walk[(b,)](
        tokens.contiguous(), parents, target_ids, lse, seq_lens, limits, stop_ids, path, emitted,
        *flags, root, root if backlog is None else backlog, nodes, steps, stops, emitted.stride(0), flags[0].stride(0),
        BACKLOG=backlog is not None, DRAFTED=drafted, BT=up(nodes), BP=up(steps), BS=up(stops), num_warps=1,
        **chained(tokens),
    )  # fmt: skip


@triton.jit
def _follow(
    emitted_ptr, aux_ptr, path_ptr, lens_ptr, backlog_ptr, tokens_ptr, features_ptr, steps, nodes, room, width,
    emitted_stride, lens_stride, PDL: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Program (w, k, b): BW features under the k-th emitted token of sequence b; the first program adds the token."""
    begin(PDL)
    k, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    lens = tl.load(lens_ptr + b * lens_stride)
    if k < lens:
        at = tl.minimum(tl.load(backlog_ptr + b) - lens + k, room - 1)
        lane = tl.program_id(0) * BW + tl.arange(0, BW)
        node = tl.load(path_ptr + b * steps + k)
        row = tl.load(aux_ptr + (b * nodes + node) * width + lane, mask=lane < width, other=0.0)
        tl.store(features_ptr + (b * room + at) * width + lane, row, mask=lane < width)
        if tl.program_id(0) == 0:
            tl.store(tokens_ptr + b * room + at, tl.load(emitted_ptr + b * emitted_stride + k))


def follow_fused(emitted, aux, path, accept_lens, backlog, backlog_tokens, backlog_features):
    """The twin of `follow`."""
    b, steps = path.shape
    nodes, width, block = aux.shape[1], aux.shape[2], copied(aux.shape[2])
    _follow[(max(1, triton.cdiv(width, block)), steps, b)](  # no features: the tokens are still written
        emitted, aux.contiguous(), path, accept_lens, backlog, backlog_tokens, backlog_features, steps, nodes,
        backlog_tokens.shape[1], width, emitted.stride(0), accept_lens.stride(0), BW=block, num_warps=4,
        **chained(path),
    )  # fmt: skip


def specimens():
    """Compile specimens: a chain and a full tree."""
    ints = ("tokens_ptr", "parents_ptr", "target_ptr", "seq_ptr", "limit_ptr", "stop_ptr", "path_ptr", "emitted_ptr")
    flags = ("lens_ptr", "matched_ptr", "done_ptr", "fault_ptr", "chain_ptr", "missed_ptr", "root_ptr", "backlog_ptr")
    walked = dict.fromkeys((*ints, *flags), "*i64") | {"lse_ptr": "*fp32"}
    walked |= dict.fromkeys(("nodes", "steps", "stops", "emitted_stride", "flag_stride"), "i32")
    followed = dict.fromkeys(("emitted_ptr", "path_ptr", "lens_ptr", "backlog_ptr", "tokens_ptr"), "*i64")
    followed |= dict.fromkeys(("steps", "nodes", "room", "width", "emitted_stride", "lens_stride"), "i32")
    pdl = {"num_warps": 1, "launch_pdl": True}
    return [
        *(
            (_walk, walked, {"BACKLOG": t < 64, "DRAFTED": t > 1, "PDL": True, "BT": t, "BP": p, "BS": 32}, pdl)
            for t, p in ((1, 1), (4, 4), (64, 8))
        ),
        *(
            (
                _follow,
                followed | dict.fromkeys(("aux_ptr", "features_ptr"), name),
                {"PDL": True, "BW": 1024},
                {"num_warps": 4, "launch_pdl": True},
            )
            for name in ("*bf16", "*fp16", "*fp32")
        ),
    ]
