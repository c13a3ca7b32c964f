"""Teacher-forced scores of a text: what the target says of every token, given all before it."""

from dataclasses import dataclass

import torch

from .batch import Batch, side_by_side

ROWS = 64  # rows whose logits exist at once


@dataclass(frozen=True)
class Score:
    """Scores of n tokens.

    token_ids: list of n; logprobs: [n - 1] fp32, entry i of token i + 1 (log-softmax, no temperature);
    boundaries: [n, F] the captured boundaries `layers` (numbers of B_k, ascending) of every token side by side; F is 0
    where none are captured.
    """

    token_ids: list[int]
    logprobs: torch.Tensor
    boundaries: torch.Tensor
    layers: tuple[int, ...]


def score(target, cache, ids, pages, chunk, device):
    """Run `ids` through the target in prefill chunks, in cache pages `pages` that nobody else uses."""
    tokens = torch.tensor([ids], device=device)
    table = torch.tensor([pages], dtype=torch.int32, device=device)
    found, captured = [], []
    for at in range(0, len(ids), chunk):
        piece = tokens[:, at : at + chunk]
        prefix = torch.full((1,), at, dtype=torch.int64, device=device)
        hidden, aux = target.forward(Batch.causal(piece, prefix, table), cache)
        captured.append(side_by_side(aux, hidden))
        following = tokens[0, at + 1 : at + 1 + len(hidden)]
        for low in range(0, len(following), ROWS):
            after = following[low : low + ROWS]
            rows = hidden[low : low + len(after)]
            logits = torch.empty(len(after), target.head.vocabulary, device=device)
            _, _, lse = target.head(rows, 1, logits)
            found.append(logits.gather(1, after[:, None])[:, 0] - lse)
    logprobs = torch.cat(found) if found else torch.zeros(0, device=device)
    return Score(list(ids), logprobs, torch.cat(captured), tuple(target.boundaries))
