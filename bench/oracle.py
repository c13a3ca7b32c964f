"""Drafters for measuring: each lets the real one do its work, so that a cycle costs what it costs, and then puts other
tokens in its tree: a text that is known, for acceptance of one's choice, or rows that route as one wants."""

import random

import torch

from engine.shape import MAX_NODES
from weights.config import Refused


class Stand:
    """A drafter in front of another one, or of none; tensors live on the device and nothing waits for it."""

    def __init__(self, real):
        self.real, self.in_step = real, True  # what it puts in the tree is the same on all ranks
        self.cache_rows, self.config = getattr(real, "cache_rows", None), getattr(real, "config", None)

    def extend(self, batch, features, cache):
        """The real one's."""
        return None if self.real is None else self.real.extend(batch, features, cache)

    def propose(self, state, tree, cache):
        """The real one's work, then `replace`."""
        if self.real is not None:
            self.real.propose(state, tree, cache)
        self.replace(state, tree)


class Delayed(Stand):
    """Spins before it drafts: a delay of known size (engine.profile must book it under `draft` alone)."""

    def __init__(self, real, spin):
        super().__init__(real)
        self.spin, self.in_step = spin, getattr(real, "in_step", False)

    def replace(self, state, tree):
        """Leaves the real one's tree."""
        self.spin()


class Independent(Stand):
    """Random ids in every row, the root's too: rows route as if they had nothing to do with each other."""

    def __init__(self, real, vocabulary, length, device):
        super().__init__(real)
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocabulary, (length + MAX_NODES, MAX_NODES), generator=draw)
        self.ids = ids.to(device)

    def replace(self, state, tree):
        """New ids at every position of every request."""
        apart = torch.arange(state.batch, device=state.seq_lens.device) * 997
        tree.tokens.copy_(self.ids[(state.seq_lens + apart) % len(self.ids), : tree.shape.draft_tokens])


class Repeated(Stand):
    """The root's token in every row, at depth 1: rows that differ in nothing but their place, and route alike."""

    def replace(self, state, tree):
        """All nodes are children of the root."""
        tree.tokens.copy_(state.root[:, None].expand_as(tree.tokens))
        tree.parents.zero_()


class Oracle(Stand):
    """Replays a known text, right at each depth as often as asked: SYNTHETIC acceptance at the cost of a real cycle.

    Args:
        real: the drafter whose work is done first, or None; rates: share of cycles that shall keep draft token 1, 2, …
        (not rising; none past the last); length: positions of the longest text; seed: of the coins. One request at a
        time: `seat` its text, prompt included, before it runs.
    """

    def __init__(self, real, rates, vocabulary, length, device, seed=0):
        super().__init__(real)
        self.vocabulary, self.layouts = vocabulary, {}
        coins = torch.rand(length + MAX_NODES + 1, MAX_NODES, generator=torch.Generator().manual_seed(seed))
        self.coins = coins.to(device)
        self.text = torch.zeros(length + MAX_NODES + 1, dtype=torch.int64, device=device)
        self.chances = torch.zeros(MAX_NODES, device=device)
        self.bounds = torch.zeros(2, dtype=torch.int64, device=device)
        self.aim(rates)

    def aim(self, rates, first=0, last=None):
        """Change the rates, in place: what is captured follows. Tokens at positions outside first … last - 1 are
        wrong."""
        self.bounds.copy_(torch.tensor([first, len(self.text) if last is None else last]))
        kept = [rate / before if before else 0.0 for before, rate in zip([1.0, *rates], rates, strict=False)]
        self.chances.zero_()
        self.chances[: len(kept)] = torch.tensor(kept, dtype=torch.float32, device=self.chances.device)

    def seat(self, ids):
        """The text of the request that comes next."""
        self.text.zero_()
        self.text[: len(ids)] = torch.tensor(ids, device=self.text.device)

    def layout(self, shape):
        """parents, depths and whether a node is on the right branch, each [T]: a chain, or a branch of first children,
        as a head's likeliest ones are, that is spread over the tree with the other nodes below the root."""
        if shape not in self.layouts:
            nodes, length = shape.draft_tokens, shape.path
            path = [0, *(1 + round(i * (nodes - 2) / max(1, length - 2)) for i in range(length - 1))]
            parents, depths = [0] * nodes, [0] + [1] * (nodes - 1)
            for depth, (above, node) in enumerate(zip(path, path[1:], strict=False), 1):
                parents[node], depths[node] = above, depth
            right = [node in path for node in range(nodes)]
            self.layouts[shape] = tuple(torch.tensor(x, device=self.text.device) for x in (parents, depths, right))
        return self.layouts[shape]

    def _inside(self, position):
        return (position >= self.bounds[0]) & (position < self.bounds[1])

    def foresee(self, batch, features, cache):
        """The real one's work; row p, of the token at p + 1, is right about p + 2 where a tree at p + 1 would be."""
        getattr(self.real, "foresee", self.extend)(batch, features, cache)
        row = batch.index.clamp(min=0)
        truth, right = self.text[row + 2], (self.coins[row + 1, 0] < self.chances[0]) & self._inside(row + 2)
        return torch.where(right, truth, (truth + 1) % self.vocabulary)

    def replace(self, state, tree):
        """Right tokens on the branch as far as the coins say, wrong ones elsewhere."""
        parents, depths, branch = self.layout(tree.shape)
        n = state.seq_lens[:, None]
        truth = self.text[n + depths]
        depth = (depths - 1).clamp(min=0)
        right = branch & (self.coins[n, depth] < self.chances[depth]) & self._inside(n + depths)
        node = torch.arange(tree.shape.draft_tokens, device=n.device)
        wrong = (truth + 1 + node % (self.vocabulary - 1)) % self.vocabulary
        tree.tokens.copy_(torch.where(right, truth, wrong))
        tree.tokens[:, 0] = state.root
        tree.parents.copy_(parents)


def rates_of(length: float, steps: int) -> list[float]:
    """Acceptance by position p, p², … of a chain of `steps` whose mean is `length` tokens a cycle. Raises Refused."""
    if not 1 <= length <= steps + 1:
        raise Refused(f"--accept-length {length:g}: {steps} steps emit 1 to {steps + 1} tokens a cycle")
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**k for k in range(steps + 1)) < length else (low, p)
    return [high**k for k in range(1, steps + 1)]


def share_embeddings(weight: torch.Tensor, share: float) -> None:
    """Gives all rows of random embeddings [V, D], in place, one part in common, `share` of their mean square; the size
    of a row stays. So rows of different ids choose some experts alike, at every depth of a random model: with a share
    of 0.6 four rows of Qwen3-30B-A3B's shapes meet about 20 different experts a layer instead of 29."""
    common = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))  # alike on all ranks
    common = (common / common.square().mean().sqrt()).to(weight.device)
    size = weight[:4096].float().square().mean().sqrt()
    weight.mul_((1 - share) ** 0.5).add_((common * size * share**0.5).to(weight.dtype))


def random_prompt(tokens: int, vocabulary: int, seed: int = 0) -> list[int]:
    """So many random ids."""
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(tokens)]
