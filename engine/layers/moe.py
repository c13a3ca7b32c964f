"""Mixture-of-experts block: norm, router, grouped experts and residual; experts cut by width."""

from dataclasses import dataclass

import torch

from kernels.routing import Routing
from weights.formats import ExpertNames


@dataclass(frozen=True)
class Router:
    """What chooses a row's experts: what every format of expert weights hands on to the table of operations."""

    gate: torch.Tensor  # [E, D]
    rule: Routing

    def __call__(self, ops, x, norm_weight, eps):
        """x [N, D], before its norm -> normed [N, D], ids [N, k], weights [N, k] fp32 (kernels.routing)."""
        return ops.route(x, norm_weight, eps, self.gate, self.rule)


class MoE:
    """x + sum over chosen experts of weight * expert(norm x).

    Args:
        source: weights.Source prefixed with the block's name; experts, intermediate: their number and width.
        routing: kernels.routing.Routing; weight_format: an object of weights.formats.
    """

    def __init__(self, source, norm, hidden, experts, intermediate, routing, activation, weight_format, ops, tp):
        self.norm, self.activation, self.ops, self.tp = norm, activation, ops, tp
        self.router = Router(source.take("gate.weight", (experts, hidden)), routing)
        self.experts = weight_format.declare(source, self._names, experts, hidden, intermediate)

    @staticmethod
    def _names(expert):
        return ExpertNames(*(f"experts.{expert}.{part}_proj" for part in ("gate", "up", "down")))

    def __call__(self, x):
        """[N, D] -> [N, D]."""
        n = self.norm
        return self.tp.add(
            x,
            lambda carried: self.experts.apply(self.ops, x, n.weight, n.eps, self.router, self.activation, carried),
        )
