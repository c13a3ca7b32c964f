"""Ways to share a model out other than cutting every tensor: whole experts to each rank, a whole draft on all."""

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch

from kernels import moe
from weights.formats import Experts

from .layers.embedding import Embedding
from .tp import TP


@dataclass(frozen=True)
class Dealt:
    """A weight format (weights.formats) that deals whole experts to ranks instead of cutting each by width."""

    form: object

    def declare(self, source, names, experts, hidden, intermediate):
        """As the format's own; foreign experts are declared as other ranks', so that a checkpoint is judged whole."""
        mine = source.deal("experts", experts)
        for foreign in (range(mine.start), range(mine.stop, experts)):
            self._declare(source.elsewhere(), names, foreign, hidden, intermediate)
        return DealtExperts(self._declare(source.whole(), names, mine, hidden, intermediate), mine)

    def declare_woven(self, source, *sizes):
        """As the format's own, for experts stored together; sizes: their number first."""
        mine = source.deal("experts", sizes[0])
        return DealtExperts(self.form.declare_woven(source, *sizes, dealt=True), mine)

    def _declare(self, source, names, experts, hidden, intermediate):
        if not experts:
            return None
        return self.form.declare(source, lambda e: names(experts[e]), len(experts), hidden, intermediate)


@dataclass(frozen=True)
class DealtExperts(Experts):
    """Parameters of the experts `mine`; a row's other experts count zero here."""

    experts: object
    mine: range

    def apply(self, ops, x, norm_weight, eps, router, activation, residual):
        """As the format's own, with a table whose choices are of `mine` alone."""

        def own(*args):
            normed, ids, weights = ops.route(*args)
            local = ids - self.mine.start
            here = (local >= 0) & (local < len(self.mine))
            # a foreign choice becomes one of the row's own, which is read anyway, of weight zero
            stand_in = torch.where(here, local, 0).amax(1, keepdim=True)
            return normed, torch.where(here, local, stand_in), torch.where(here, weights, 0)

        return self.experts.apply(moe.routed_by(ops, own), x, norm_weight, eps, router, activation, residual)


class Lent:
    """The target as a replicated draft sees it: what it borrows is read whole, on first use."""

    def __init__(self, target, source):
        self.target, self.source, self.features = target, source.whole(), target.features

    @cached_property
    def embedding(self):
        """The whole embedding."""
        own = self.target.embedding
        return Embedding(self.source, own.name, own.vocabulary, own.weight.shape[1], own.ops, TP())

    @cached_property
    def head(self):
        """The whole head: .weight [V, D]."""
        own = self.target.head
        if own.name is None:  # tied
            return SimpleNamespace(weight=self.embedding.weight)
        return SimpleNamespace(weight=self.source.take(own.name, (own.vocabulary, own.weight.shape[1])))
