"""What one forward pass sees."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Batch:
    """T rows of each of B sequences. A row's RoPE position and its cache row differ inside a tree.

    tokens, positions, index: [B, T] int64; index = logical cache row written (prefix + node), -1 for padding.
    pages: [B, NP] int32 page table; prefix: [B] int64 committed rows; tree: [B, T] int64 ancestor bits or None.
    wanted: [1] int64, of one causal sequence: the row after which the next token is asked for, None: any. A target may
    then hand out the hidden of that row alone; its features are of all rows, and all rows are written.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    index: torch.Tensor
    pages: torch.Tensor
    prefix: torch.Tensor
    tree: torch.Tensor | None
    wanted: torch.Tensor | None = None

    @property
    def rows(self):
        """B, T."""
        return self.tokens.shape

    @property
    def whole(self):
        """The same for layers of which every row is needed."""
        return replace(self, wanted=None)

    def going_on(self, q, residual):
        """Rows that go on where keys and values are written: all of q and residual [N, …] and `prefix`, or the wanted
        row of both and the committed rows before it."""
        if self.wanted is None:
            return q, residual, self.prefix
        return q[self.wanted], residual[self.wanted], self.prefix + self.wanted

    @classmethod
    def causal(cls, tokens, start, pages, wanted=None):
        """Rows `tokens` [B, T] that follow `start` [B] committed rows, each seeing all before it."""
        at = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return cls(tokens, at, at, pages, start, None, wanted)


def side_by_side(aux, rows):
    """A pass's features: of each boundary its [N, D] -> [N, F]; rows: [N, …], which says N where there are none."""
    return torch.cat(aux, -1) if aux else rows.new_empty(len(rows), 0)
