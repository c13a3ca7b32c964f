"""A drafter of one's own, as a user would write it: a chain of what followed the last n tokens where they stood last.
It follows the Drafter protocol of engine.drafters and keeps no cache rows."""

import torch

from engine.drafters.history import History


class NGram:
    """Args: cache: `engine.cache`; n: tokens that must agree."""

    cache_rows = None

    def __init__(self, cache, n=2):
        self.history, self.n = History(cache), n

    def extend(self, batch, features, cache):
        """Committed text: remember it."""
        self.history.extend(batch)

    def propose(self, state, tree, cache):
        """Tensor operations alone: this runs inside a captured graph."""
        text, end = self.history.read(state), state.seq_lens[:, None]  # B L; B 1
        at, node = (torch.arange(n, device=text.device) for n in (text.shape[1], tree.shape.draft_tokens))
        same = (at >= self.n) & (at < end)
        for back in range(self.n):
            same = same & (text.roll(back, 1) == text.gather(1, (end - back).clamp(min=0)))
        found = torch.where(same, at, -1).amax(1, keepdim=True)
        after = found + 1 + (node - 1) % (end - found)  # past the end, the repetition goes on
        chain = (node > 0) & (node <= tree.shape.steps)
        tokens = torch.where(chain & (found >= 0), text.gather(1, after.clamp(0, text.shape[1] - 1)), -1)
        tree.tokens.copy_(torch.where(node == 0, state.root[:, None], tokens))
        tree.parents.copy_(torch.where(chain, node - 1, 0).expand_as(tokens))


def emitted(prompt, output, steps, n=2):
    """Tokens that each cycle of a chain must emit, by the same rule in plain Python: what is accepted of `output`, of
    which the prompt's pass gave the first token and plain decoding the rest."""
    text, counts, begin = [-1, *prompt[1:], *output], [], len(prompt)  # begin: the root's place
    while begin < len(text) - 1:
        places = [at for at in range(n, begin) if text[at - n + 1 : at + 1] == text[begin - n + 1 : begin + 1]]
        guess = [text[places[-1] + 1 + k % (begin - places[-1])] for k in range(steps)] if places else []
        right = next((k for k, token in enumerate(guess) if text[begin + 1 + k : begin + 2 + k] != [token]), len(guess))
        counts.append(min(right + 1, len(text) - 1 - begin))
        begin += right + 1
    return counts
