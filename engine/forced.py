"""Teacher-forced passes: what a target says of every position of a text, and what a head says there from the target's
features, pass by pass, as if it drafted.

Shapes: B sequences, L tokens, F joint width of the boundaries, V vocabulary, Vd draft vocabulary.
"""

import contextlib
from dataclasses import dataclass

import torch

from .batch import Batch, side_by_side
from .cache import Cache

PAGE = 64  # rows a page of the scratch cache
LOGITS = 1 << 28  # most logits of the target at once
ROWS = 64  # rows of later draft passes at once, and rows of one text whose logits exist at once


@dataclass(frozen=True)
class Lesson:
    """What the target says of windows: features [B, L, F], its distribution over the draft vocabulary [B, L, Vd]
    (renormalised), its own next token [B, L]."""

    tokens: torch.Tensor
    features: torch.Tensor
    wanted: torch.Tensor
    best: torch.Tensor


@dataclass(frozen=True)
class Passed:
    """A text [L] that went through the target: features [L, F], the residual stream after the last layer [L, D], the
    target's own next token after each position [L]."""

    features: torch.Tensor
    hidden: torch.Tensor
    best: torch.Tensor


@contextlib.contextmanager
def handing_out(target, boundaries):
    """Let a target hand out other boundaries for a while. No cycle may have been captured over it."""
    before, target.boundaries = target.boundaries, boundaries
    try:
        yield target
    finally:
        target.boundaries = before


def lesson_of(target, tokens, features, hidden, draft_ids, sharpen=1.0):
    """The Lesson of tokens [B, L] whose features [B, L, F] and last residual stream [B, L, D] are known.

    Args:
        target: what has the target's `head`; draft_ids: [Vd] ids of the draft vocabulary.
        sharpen: factor on the logits that make the wanted distribution.
    """
    wanted, best = [], []
    vocabulary = target.head.vocabulary
    for part in hidden.split(max(1, LOGITS // (vocabulary * tokens.shape[1]))):
        rows = part.flatten(0, 1)
        logits = rows.new_empty(len(rows), vocabulary, dtype=torch.float32)
        best.append(target.head(rows, 1, logits)[1].view(part.shape[:2]))
        wanted.append((sharpen * logits[:, draft_ids]).softmax(-1).view(*part.shape[:2], -1))
    return Lesson(tokens, features, torch.cat(wanted), torch.cat(best))


class Teacher:
    """A target with a scratch cache for up to `rows` sequences of `length` tokens."""

    def __init__(self, target, rows, length, device, dtype=torch.float32):
        self.target, columns = target, -(-length // PAGE)
        self.cache = Cache({"target": target.cache_rows}, 1 + rows * columns, PAGE, dtype, device)
        pages = torch.arange(1, 1 + rows * columns, dtype=torch.int32, device=device)
        self.pages = pages.view(rows, columns)

    def forward(self, tokens, start):
        """tokens [B, T] that follow `start` tokens of each window -> hidden [B, T, D], features [B, T, F]."""
        (b, t), columns = tokens.shape, -(-(start + tokens.shape[1]) // PAGE)
        prefix = torch.full((b,), start, dtype=torch.int64, device=tokens.device)
        hidden, aux = self.target.forward(Batch.causal(tokens, prefix, self.pages[:b, :columns]), self.cache)
        return hidden.view(b, t, -1), side_by_side(aux, hidden).view(b, t, -1)

    @torch.no_grad()
    def lesson(self, tokens, draft_ids, sharpen=1.0):
        """tokens [B, L] -> Lesson, as `lesson_of` says."""
        hidden, features = self.forward(tokens, 0)
        return lesson_of(self.target, tokens, features, hidden, draft_ids, sharpen)

    @torch.no_grad()
    def read(self, ids, chunk):
        """Pass a text, a list of ids, through the target in pieces of `chunk` -> Passed."""
        tokens, hidden, features, best = torch.tensor([ids], device=self.pages.device), [], [], []
        for at in range(0, len(ids), chunk):
            rows, aux = self.forward(tokens[:, at : at + chunk], at)
            hidden.append(rows[0].clone())
            features.append(aux[0].clone())
            best += [self.target.head(part, 1)[1][:, 0] for part in rows[0].split(ROWS)]
        return Passed(torch.cat(features), torch.cat(hidden), torch.cat(best))

    @torch.no_grad()
    def continued(self, prefixes, length, draws=None):
        """prefixes [B, P] -> [B, length]: each with the target's own continuation: greedy, or drawn with `draws`, a
        torch.Generator on the device."""
        b, known = prefixes.shape
        ids = prefixes.new_zeros(b, length)
        ids[:, :known] = prefixes
        at = 0
        while at < length - 1:
            end = min(at + PAGE, known) if at < known else at + 1
            hidden, _ = self.forward(ids[:, at:end], at)
            if end >= known:
                ids[:, end] = self._next(hidden[:, -1], draws)
            at = end
        return ids

    def _next(self, hidden, draws):
        """hidden [B, D] -> the next token of each [B]."""
        if draws is None:
            return self.target.head(hidden)[1][:, 0]
        logits = hidden.new_empty(len(hidden), self.target.head.vocabulary, dtype=torch.float32)
        self.target.head(hidden, 1, logits)
        noise = torch.empty_like(logits).exponential_(generator=draws)
        return (logits - noise.log()).argmax(-1)  # Gumbel's way of drawing from softmax(logits)


def due(best, steps):
    """What `guesses` should say: best [L] -> [L - steps, steps], entry (i, j) the target's token after i + j + 1."""
    return best[1:].unfold(0, steps, 1)


@torch.no_grad()
def guesses(drafter, ids, features, steps, k, device, dtype):
    """The head's k best ids of every pass on a text, as it would draft them in a chain, teacher-forced.

    Row i pairs the target's features at i with token i + 1. Pass 0 sees true features; pass j goes on from the hidden
    of pass j - 1 with token i + j + 1, and is asked for the target's next choice after that. The cache has one row a
    page, so that rows of many positions can share what precedes them and keep their own later passes apart.

    Args:
        ids: the text, a list; features: [len(ids), F] in the order of the target's boundaries.

    Returns:
        [len(ids) - steps, steps, k] target ids, pass 0 first.
    """
    rows, tokens = len(ids) - steps, torch.tensor(ids, device=device)
    cache = Cache({"draft": drafter.cache_rows}, 1 + rows + ROWS * steps, 1, dtype, device)
    shared = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    known = Batch.causal(tokens[None, 1 : rows + 1], start, shared[None])
    first = drafter.extend(known, features[:rows], cache)
    out = tokens.new_empty(rows, steps, k)
    for low in range(0, rows, ROWS):
        row = torch.arange(low, min(low + ROWS, rows), device=device)
        hidden, b = first[row], len(row)
        own = rows + 1 + torch.arange(b * steps, dtype=torch.int32, device=device).view(b, steps)
        table = torch.zeros(b, rows + steps, dtype=torch.int32, device=device)
        table[:, :rows] = shared
        table.scatter_(1, (row + 1)[:, None] + torch.arange(steps, device=device), own)
        for step in range(steps):
            if step:
                at, bits = (row + step)[:, None], torch.full((b, 1), (1 << step) - 1, device=device)
                batch = Batch(tokens[row + step + 1][:, None], at, at, table, row + 1, bits)
                hidden = drafter.forward(tokens[row + step + 1], drafter.recycle(hidden), batch, cache)
            out[row, step] = drafter.in_target(drafter.best(hidden[:, None], k)[1][:, 0])
    return out
