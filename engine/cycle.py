"""One speculative cycle: draft, verify, accept, commit. Static shapes, no host; and the prefill that precedes it."""

import torch

from .batch import Batch, side_by_side
from .buffers import BACKLOG
from .tp import TP

ALONE = TP()


class Cycle:
    """The four stages over one State and one Tree; drafter None decodes plainly and remembers nothing for a drafter.

    A drafter with Shape(0, 1, 1) decodes plainly too, and keeps the backlog that the drafter has to catch up on.
    tp: all ranks verify rank 0's tree, and take its answers where those depend on what the draft drew from.
    """

    stages = ("draft", "verify", "accept", "commit")

    def __init__(self, target, drafter, cache, state, tree, ops, tp=ALONE):
        self.tp, self.astray = tp, not getattr(drafter, "in_step", False)  # ranks' drafters may propose unlike things
        self.target, self.drafter, self.cache, self.ops = target, drafter, cache, ops
        self.state, self.tree = state, tree

    def run(self, stages=stages):
        """Run the named stages in order; all of them are a cycle that the host is told of."""
        for stage in stages:
            getattr(self, stage)()
        if stages == Cycle.stages:
            self.publish()

    def publish(self):
        """What the cycle came to, to the host."""
        s = self.state
        self.ops.publish(s.block, s.host, s.turn)

    def draft(self):
        """Tokens and parents of the next candidates; the drafter has then seen every committed token."""
        s, t = self.state, self.tree
        if t.q is not None:
            t.q.zero_()
        if t.shape.steps:
            self.drafter.propose(s, t, self.cache)
            if self.astray:
                self.tp.follow(t.tokens)
                self.tp.follow(t.parents)

    def verify(self):
        """The target over all nodes: node j ropes at n + depth and writes row n + j. The rule picks its answers."""
        s, t = self.state, self.tree
        self.ops.plant(
            s.root, s.seq_lens, t.tokens, t.parents, t.depths, t.ancestors, t.positions, t.index, t.shape.steps
        )
        batch = Batch(t.tokens, t.positions, t.index, s.pages, s.seq_lens, t.ancestors)
        hidden, aux = self.target.forward(batch, self.cache)
        logits = None if t.logits is None else t.logits.flatten(0, 1)
        _, ids, lse = self.target.head(hidden, 1, logits)
        ids = t.rule.answer(self.ops, ids.view_as(t.target_ids), s, t)
        self.ops.record(ids, lse, aux, t.target_ids, t.lse, t.aux)
        if self.astray and t.q is not None:
            self.tp.follow(t.target_ids)

    def accept(self):
        """The accepted path, what it emits, the cuts, how many rows are committed; and the rows the drafter will extend
        over."""
        s, t = self.state, self.tree
        emitted = s.emitted[:, : t.shape.path]
        self.ops.walk(
            t.tokens,
            t.parents,
            t.target_ids,
            t.lse,
            s.seq_lens,
            s.limits,
            s.stop_ids,
            t.path,
            emitted,
            s.accept_lens,
            s.matched,
            s.done,
            s.fault,
            s.chain,
            s.missed,
            s.root,
            None if self.drafter is None else s.backlog,
            t.shape.steps > 0,
        )
        if self.drafter is not None:
            self.ops.follow(emitted, t.aux, t.path, s.accept_lens, s.backlog, s.backlog_tokens, s.backlog_features)

    def commit(self):
        """The path's cache rows go where the last committed rows are."""
        s = self.state
        rows = self.cache.storage["target"]
        self.ops.commit(rows, s.pages, s.seq_lens, self.tree.path, s.accept_lens, self.cache.page_size)


CATCH_UP = (8, BACKLOG)  # widths of a catch-up's pass


class CatchUp:
    """Extend the drafter over all but the last row of the backlog: what precedes drafting after plain cycles,
    or after a cycle that emitted more than the next shape's draft looks at.

    width: rows of the pass, padding included. A drafter that can `foresee` (engine.drafters) is compared with the
    tokens that came, which tells what it would have kept, without a verify.
    """

    stages = ("catch_up",)

    def __init__(self, drafter, cache, state, width=BACKLOG, tp=ALONE):
        self.drafter, self.cache, self.state, self.width, self.tp = drafter, cache, state, width, tp
        self.foresee, self.astray = getattr(drafter, "foresee", None), not getattr(drafter, "in_step", False)

    def run(self, stages=stages):
        """Run it."""
        self.catch_up()

    def catch_up(self):
        """One pass; then the last row moves to the front."""
        s, w = self.state, self.width
        start, k = s.seq_lens - s.backlog, torch.arange(w, device=s.seq_lens.device)
        real = k < (s.backlog - 1)[:, None]
        at = start[:, None] + k
        index = torch.where(real, at, -1)
        batch = Batch(s.backlog_tokens[:, :w], torch.where(real, at, 0), index, s.pages, start, None)
        features = s.backlog_features[:, :w].flatten(0, 1)
        if self.foresee is None:
            self.drafter.extend(batch, features, self.cache)
        else:
            right = self.foresee(batch, features, self.cache) == s.backlog_tokens[:, 1 : w + 1]
            s.agreed.copy_((right & real).sum(1))
            s.compared.copy_(real.sum(1))
            if self.astray:
                self.tp.follow(s.agreed)
        last = (s.backlog - 1).clamp(min=0)[:, None]
        s.backlog_tokens[:, :1] = s.backlog_tokens.gather(1, last)
        index = last[..., None].expand(-1, -1, s.backlog_features.shape[-1])
        s.backlog_features[:, :1] = s.backlog_features.gather(1, index)
        s.backlog.clamp_(max=1)


def prefill(target, drafter, cache, tokens, pages, chunk, start=0, logits=None, begin=None, forward=None):
    """Fill the cache with a prompt's rows, in pieces whose borders lie at absolute multiples of `chunk`.

    The target writes rows start..n-1, the drafter rows start..n-2 (row i = token i+1 with the feature at i: the last
    token of a piece that is not the last pairs with the next PROMPT token).

    Args:
        tokens: [1, n] int64; pages: [1, NP]; chunk: rows a pass; start: rows already in the cache;
        logits: [1, V] fp32 written with those of the last row, or None.
        begin: told [committed rows] before each piece (kernels.prefill.FlashInfer.begin), or None; forward: in place
        of the target's own (engine.pieces.Pieces).

    Returns:
        ids [1] the most likely first token, lse [1] of its logits, feature [1, F] under it.
    """
    n, at, forward = tokens.shape[1], start, forward or target.forward
    while at < n:
        end = min(n, (at // chunk + 1) * chunk)
        if begin is not None:
            begin([at])
        rows = min(end, n - 1) - at
        numbers = (at, end - at - 1, max(rows - 1, 0))
        prefix, *last = (torch.full((1,), number, dtype=torch.int64, device=tokens.device) for number in numbers)
        wanted = last if begin is None else (None, None)  # what is told of a pass hears of all its rows
        hidden, aux = forward(Batch.causal(tokens[:, at:end], prefix, pages, wanted[0]), cache)
        if drafter is not None and rows > 0:
            batch = Batch.causal(tokens[:, at + 1 : at + rows + 1], prefix, pages, wanted[1])
            drafter.extend(batch, side_by_side(aux, hidden)[:rows], cache)
        at = end
    _, ids, lse = target.head(hidden[-1:], 1, logits)
    return ids[:, 0], lse, side_by_side([part[-1:] for part in aux], hidden[-1:])
