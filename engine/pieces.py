"""A prompt's passes through the target: those of few rows are captured graphs, because the GPU is through with them
before the host has launched them; those of many are launched as they come."""

import torch

from .batch import Batch

# Rows of captured passes, so near to one another that few rows are computed for nothing
WIDTHS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)


class Piece:
    """The target's pass over up to `width` rows of a prompt, over buffers of its own.

    Rows past the piece's own repeat its last token. Whatever they write lies past the piece, in rows that are written
    again before anybody reads them, or in the scratch page; so all that the pass reads was written by a pass over text.

    Args:
        target: as prompts call it (engine.programs); columns: of the page table; most: positions there are.
    """

    stages = ("prompt",)

    def __init__(self, target, cache, width, columns, most):
        self.target, self.cache, self.width, self.most = target, cache, width, most
        sizes = (1, width), (1,), (1,)
        self.tokens, self.start, self.wanted = (torch.zeros(n, dtype=torch.int64, device=cache.device) for n in sizes)
        self.pages = torch.zeros(1, columns, dtype=torch.int32, device=cache.device)
        self.hidden = self.aux = None  # of the last run, until another graph runs

    def take(self, batch):
        """The rows of the next run: a causal batch [1, T] over as many columns of the page table, its last row
        wanted."""
        _, rows = batch.rows
        self.tokens[:, :rows] = batch.tokens
        self.tokens[:, rows:] = batch.tokens[:, -1:]
        self.start.copy_(batch.prefix)
        self.pages.copy_(batch.pages)
        self.wanted.fill_(rows - 1)

    def run(self, stages=stages):
        """One pass over all rows."""
        b = Batch.causal(self.tokens, self.start, self.pages)
        inside = b.index < self.pages.shape[1] * self.cache.page_size
        index = torch.where(inside, b.index, -1)
        batch = Batch(b.tokens, b.positions.clamp(max=self.most - 1), index, b.pages, b.prefix, None, self.wanted)
        self.hidden, self.aux = self.target.forward(batch, self.cache)

    @property
    def state(self):
        """What engine.graph keeps over the run before a capture: nothing, since the same rows are written again."""
        return self

    def snapshot(self):
        """Nothing to keep."""

    def restore(self, kept):
        """Nothing to put back."""


class Pieces:
    """`forward` of a target for prompts: pieces of up to the widest of WIDTHS captured by width on first use, each with
    one pass to warm up; longer ones go straight to the target.

    Args:
        graphs: engine.graph.Graphs; columns, most: as Piece takes them.
    """

    def __init__(self, target, graphs, columns, most):
        self.target, self.graphs, self.sizes, self.pieces = target, graphs, (columns, most), {}

    def __call__(self, batch, cache):
        """batch: causal, of one sequence, its last row wanted -> hidden [T, D] or [1, D], of each boundary [T, D], the
        captured ones until a graph runs."""
        _, rows = batch.rows
        width = min((width for width in WIDTHS if width >= rows), default=None)
        if width is None:
            return self.target.forward(batch, cache)
        if width not in self.pieces:
            self.pieces[width] = Piece(self.target, cache, width, *self.sizes)
        piece = self.pieces[width]
        piece.take(batch)
        self.graphs.run(piece, 1, f"prompt of {width}", piece.stages)
        return piece.hidden[:rows], [part[:rows] for part in piece.aux]
