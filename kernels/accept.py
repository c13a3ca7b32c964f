"""The greedy accept walk, its cuts, and the hand-over of what it emitted to the drafter's backlog."""

import torch

from .select import gather_rows


def walk(
    tokens, parents, target_ids, finite, seq_lens, limits, stop_ids, path, emitted, accept_lens, matched, done, fault, root
):
    """Follow the child that equals the target's own token, from the root, as far as it goes; then cut.

    Args:
        tokens, parents, target_ids: [B, T] int64 the tree and the target's token after each node.
        finite: [B, T] bool, false where the node's logits were not finite: nothing is emitted after such a node.
        seq_lens, limits: [B] committed rows, and how many there may be.
        stop_ids: [B, M] ids that end a sequence (-1: unused).
        path, emitted: [B, P] written; emitted[k] follows node path[k].
        accept_lens: [B] written: how many of them count after the cuts (0 for a sequence already done).
        matched: [B] written: draft tokens that the target agreed with, before the cuts.
        done, fault: [B] flags, updated: the sequence has ended; it ended on non-finite logits.
        root: [B] updated: the last token emitted.
    """
    node, ended = torch.arange(tokens.shape[1], device=tokens.device), done != 0
    at = torch.zeros_like(seq_lens)[:, None]
    alive = finite.gather(1, at)
    broken, steps, lens, match = ~alive, [at], alive.long(), torch.zeros_like(at)
    for _ in range(path.shape[1] - 1):
        hit = (parents == at) & (tokens == target_ids.gather(1, at)) & (node > 0)
        alive = alive & hit.any(1, keepdim=True)
        at = torch.where(alive, hit.long().argmax(1, keepdim=True), at)
        match = match + alive
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
    fault.copy_((fault != 0) | broken)
    done.copy_(ended | stopped | broken | (reach >= room))
    last = emitted.gather(1, (reach - 1).clamp(min=0)[:, None])[:, 0]
    root.copy_(torch.where(reach > 0, last, root))


def follow(emitted, aux, path, accept_lens, backlog, backlog_tokens, backlog_features):
    """Append what was emitted, and the target's features under it, to the rows the drafter has yet to see.

    Args:
        emitted, path: [B, P]; aux: [B, T, F] features of the tree's nodes; accept_lens: [B].
        backlog: [B] rows waiting, advanced; backlog_tokens [B, W+1], backlog_features [B, W+1, F]: written at
        backlog + k for k < accept_lens. Row W is scratch: what does not count lands there.
    """
    width, k = backlog_tokens.shape[1] - 1, torch.arange(path.shape[1], device=path.device)
    at = torch.where(k < accept_lens[:, None], (backlog[:, None] + k).clamp(max=width), width)
    backlog_tokens.scatter_(1, at, emitted)
    features = gather_rows(aux, path)
    backlog_features.scatter_(1, at[..., None].expand_as(features), features)
    backlog.add_(accept_lens)
