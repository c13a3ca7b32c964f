"""Accept rules: how the target's token after each node of a tree is chosen. The walk then follows the child that equals
it, whatever the rule, so a rule is all there is between greedy decoding and sampling.
"""

from dataclasses import dataclass

import torch

from kernels import philox, sampling


@dataclass
class Draws:
    """What each of B slots draws with: constant while a request runs, read by cycles, written between them."""

    temperature: torch.Tensor  # B fp32, below sampling.TINY: greedy
    top_k: torch.Tensor  # B int64, 0: off
    top_p: torch.Tensor  # B fp32, 1: off
    min_p: torch.Tensor  # B fp32, 0: off
    key: torch.Tensor  # B int64: 64 bits of the request

    @classmethod
    def allocate(cls, batch, device):
        """All slots greedy."""
        floats = torch.zeros(3, batch, device=device)
        ints = torch.zeros(2, batch, dtype=torch.int64, device=device)
        floats[1] = 1
        return cls(floats[0], ints[0], floats[1], floats[2], ints[1])

    def seat(self, slot, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, key=0):
        """Set one slot; nothing given: greedy."""
        for name, value in dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, key=key).items():
            getattr(self, name)[slot] = value

    def slot(self, slot):
        """One slot alone, views."""
        return Draws(*(x[slot : slot + 1] for x in vars(self).values()))

    def repeat(self, rows):
        """(temperature, top_k, top_p, min_p), each [B * rows]: every slot's, once for each of its rows."""
        settings = (self.temperature, self.top_k, self.top_p, self.min_p)
        return [x[:, None].expand(-1, rows).reshape(-1) for x in settings]


@dataclass(frozen=True)
class Greedy:
    """The most likely token, the lowest id among equals. Needs no logits."""

    logits = False
    drafts = False

    def answer(self, ops, ids, state, tree):
        """ids: [B, T] the head's best -> the target's token after each node [B, T]."""
        return ids

    def first(self, ops, ids, logits, position, draws):
        """ids: [1] the head's best after a prompt -> the first token [1]."""
        return ids


@dataclass(frozen=True)
class Sampled:
    """Draws from the filtered distribution; where a child was drawn from q, keeps it with probability min(1, p/q).

    Every number is drawn for (request, position, purpose), so nothing else that runs changes it. Greedy rows stay
    greedy. Lossless: emitted tokens depend on numbers of their own and earlier positions only.
    """

    logits = True  # whole rows of logits are needed
    drafts = True  # a chain's tokens may be drawn from the draft's distribution

    def probabilities(self, ops, logits, draws, rows):
        """[B * rows, V] fp32 of logits [B * rows, V]."""
        return ops.soften(logits, draws.repeat(rows)[0])

    def answer(self, ops, ids, state, tree):
        """The target's token after each node of `tree` (engine.buffers), whose logits, tokens and q are there.

        Args:
            ids: [B, T] the head's best.

        Returns:
            [B, T] int64.
        """
        positions = state.seq_lens[:, None] + tree.depths + 1  # of the token after each node
        child = None if tree.q is None else tree.tokens.roll(-1, 1)  # a chain's next node; the last has no q
        return self._pick(ops, ids, tree.logits, positions, state.draws, tree.q, child)

    def first(self, ops, ids, logits, position, draws):
        """The token after a prompt [1]; ids: [1] the head's best, logits: [1, V], position: [1], draws: of one slot."""
        return self._pick(ops, ids[:, None], logits[:, None], position[:, None], draws)[:, 0]

    def _pick(self, ops, ids, logits, positions, draws, q=None, child=None):
        """ids, positions, child: [B, T]; logits, q: [B, T, V] -> [B, T]."""
        b, t = ids.shape
        p = self.probabilities(ops, logits.flatten(0, 1), draws, t)
        u = ops.uniform(draws.key, positions, philox.TARGET).view(-1)
        if q is None:
            drawn = ops.draw(p, u)
        else:
            coins = ops.uniform(draws.key, positions, philox.COIN).view(-1)
            drawn = ops.draw(p, u, q.flatten(0, 1), child.flatten(), coins)
        return torch.where(draws.temperature[:, None] < sampling.TINY, ids, drawn.view(b, t))

    def propose(self, ops, ids, logits, lse, position, draws):
        """Draw one draft token a sequence.

        Args:
            ids: [B] the draft head's best; logits: [B, Vd] fp32; lse: [B]; position: [B] of the tokens to draw.

        Returns:
            ids [B] in the draft's vocabulary; q [B, Vd] what they were drawn from (the request's own temperature and
            filters), zeros in rows that are greedy or not finite.
        """
        q = self.probabilities(ops, logits, draws, 1)
        drawn = ops.draw(q, ops.uniform(draws.key, position[:, None], philox.DRAFT)[:, 0])
        soft = (draws.temperature >= sampling.TINY) & torch.isfinite(lse)
        return torch.where(soft, drawn, ids), torch.where(soft[:, None], q, 0)


@dataclass(frozen=True)
class Filtered(Sampled):
    """Sampled, with top-k, top-p and min-p: rows are sorted, which unfiltered sessions do without."""

    def probabilities(self, ops, logits, draws, rows):
        """[B * rows, V] fp32 of logits [B * rows, V], zero for what the filters exclude."""
        settings = draws.repeat(rows)
        return ops.soften(logits, settings[0], sampling.cutoff(logits, *settings))


def rule_of(samplings):
    """The rule that serves all of these engine.request.Sampling at once."""
    warm = [s for s in samplings if s.temperature >= sampling.TINY]
    if not warm:
        return Greedy()
    return Filtered() if any((s.top_k, s.top_p, s.min_p) != (0, 1, 0) for s in warm) else Sampled()
