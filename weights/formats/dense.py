"""Experts stored as they are used, and what every format of experts is asked for: names, parameters, their use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weights.source import Source


@dataclass(frozen=True)
class ExpertNames:
    """Names of one expert's matrices without their `.weight`."""

    gate: str
    up: str
    down: str


class Experts(ABC):
    """A layer's experts: what every format's parameters offer."""

    @abstractmethod
    def apply(self, ops, x, norm_weight, eps, router, activation, residual):
        """Route rows and run them through their experts.

        Args:
            ops: the table of operations (kernels.Ops); x: [N, D] before its norm (norm_weight [D], eps; None: after).
            router: gate [E, D], rule, bias and correction [E] or None (engine.layers.moe.Router), and callable
            (ops, x, norm_weight, eps) -> normed [N, D], ids [N, k], weights [N, k] fp32.
            residual: [N, D] or None, added last.

        Returns:
            [N, D].
        """

    def apply_beside(self, ops, x, norm_weight, eps, router, activation, residual, shared):
        """The same and, added last, a shared expert of the same activation (engine.layers.mlp.MLP)."""
        return shared.share(x, norm_weight, self.apply(ops, x, norm_weight, eps, router, activation, residual))


@dataclass(frozen=True)
class DenseExperts(Experts):
    """Parameters of a layer's experts, this rank's share I of the intermediate size."""

    gate_up: torch.Tensor  # [E, 2I, D], gate rows first
    down: torch.Tensor  # [E, D, I]

    def apply(self, ops, x, norm_weight, eps, router, activation, residual):
        """As Experts.apply."""
        r, e = router, self
        choice = (r.gate, r.rule, r.bias, r.correction)
        return ops.moe(x, norm_weight, eps, *choice, e.gate_up, e.down, activation, residual)


@dataclass(frozen=True)
class BiasedExperts(Experts):
    """Parameters of a layer's experts with biases, this rank's share I of the intermediate size."""

    gate_up: torch.Tensor  # [E, 2I, D], gate rows first
    gate_up_bias: torch.Tensor  # [E, 2I], likewise
    down: torch.Tensor  # [E, D, I]
    down_bias: torch.Tensor | None  # [E, D]; a sum over ranks holds it once

    def apply(self, ops, x, norm_weight, eps, router, activation, residual):
        """As Experts.apply."""
        normed, ids, weights = router(ops, x, norm_weight, eps)
        biases = self.gate_up_bias, self.down_bias
        return ops.experts(normed, ids, weights, self.gate_up, self.down, activation, residual, *biases)


class Dense:
    """Weights stored as they are used: one matrix a projection, [out, in]."""

    def view(self, checkpoint):
        """`checkpoint` as models see it: as it is."""
        return checkpoint

    def declare(
        self, source: Source, names: Callable[[int], ExpertNames], experts: int, hidden: int, intermediate: int
    ) -> DenseExperts:
        """`names(e)` of each expert; `intermediate` is the whole size, cut by tensor parallelism."""
        each = [names(e) for e in range(experts)]
        wide, tall = (intermediate, hidden), (hidden, intermediate)
        return DenseExperts(
            gate_up=source.stack([[(n.gate + ".weight", wide), (n.up + ".weight", wide)] for n in each], cut=0),
            down=source.stack([[(n.down + ".weight", tall)] for n in each], cut=1),
        )

    def declare_woven(
        self, source: Source, experts: int, hidden: int, intermediate: int, *, dealt: bool = False
    ) -> BiasedExperts:
        """Experts stored together with their biases, transposed, gate and up in turn (gpt-oss). dealt: whole experts to
        each rank, else its width of all."""
        e, d, i = experts, hidden, intermediate
        down_bias = source.take("down_proj_bias", (e, d), cut=0 if dealt else None)
        wide, tall = (0, 0) if dealt else (2, 1)
        return BiasedExperts(
            gate_up=source.woven("gate_up_proj", (e, d, 2 * i), strands=2, transposed=True, cut=wide),
            gate_up_bias=source.woven("gate_up_proj_bias", (e, 2 * i), strands=2, cut=min(wide, 1)),
            down=source.woven("down_proj", (e, i, d), transposed=True, cut=tall),
            down_bias=down_bias if dealt or source.rank == 0 else None,
        )
