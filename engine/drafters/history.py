"""The text itself, for drafters that read it: every committed token, kept by cache slot as the cache keeps rows, so
that batches, refilled slots and shared prefixes need nothing more."""

import torch

from kernels.cache_write import slots


class History:
    """Committed tokens of all requests. Like a drafter's rows, slot of row p holds token p + 1.

    A drafter owns one, hands it every batch that its `extend` gets, and reads it in `propose`; nothing waits for the
    device. Args: cache: the engine's (`engine.cache`).
    """

    def __init__(self, cache):
        self.page_size = cache.page_size
        self.tokens = torch.zeros(cache.pages * cache.page_size, dtype=torch.int64, device=cache.device)

    def extend(self, batch):
        """Take the tokens of a batch of committed text."""
        self._write(batch.tokens, batch.index, batch.pages)

    def read(self, state):
        """Take the backlog too -> [B, L + 1]: the token at each position up to state.seq_lens, which holds the root.

        Entry 0, a prompt's first token, is -1 (no drafter is shown it); entries past seq_lens mean nothing.
        """
        waiting = torch.arange(state.backlog_tokens.shape[1], device=self.tokens.device)
        row = (state.seq_lens - state.backlog)[:, None] + waiting
        self._write(state.backlog_tokens, torch.where(waiting < state.backlog[:, None], row, -1), state.pages)
        every = torch.arange(state.pages.shape[1] * self.page_size, device=self.tokens.device)
        text = self.tokens[slots(every.expand(state.batch, -1), state.pages, self.page_size)]
        return torch.cat([torch.full_like(text[:, :1], -1), text], 1)

    def _write(self, tokens, index, pages):
        # rows past the table belong to padding
        index = torch.where(index < pages.shape[1] * self.page_size, index, -1)
        self.tokens.index_copy_(0, slots(index, pages, self.page_size).view(-1), tokens.reshape(-1))
