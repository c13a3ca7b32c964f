"""Mixture-of-experts block: norm, router, grouped experts and residual; experts cut by width."""

from weights.formats import ExpertNames


class MoE:
    """x + sum over chosen experts of weight * expert(norm x).

    Args:
        source: weights.Source prefixed with the block's name; experts, intermediate: their number and width.
        routing: kernels.routing.Routing; weight_format: an object of weights.formats.
    """

    def __init__(self, source, norm, hidden, experts, intermediate, routing, activation, weight_format, ops, tp):
        self.norm, self.routing, self.activation, self.ops, self.tp = norm, routing, activation, ops, tp
        self.gate = source.take("gate.weight", (experts, hidden))
        self.experts = weight_format.declare(source, self._names, experts, hidden, intermediate)

    @staticmethod
    def _names(expert):
        return ExpertNames(*(f"experts.{expert}.{part}_proj" for part in ("gate", "up", "down")))

    def __call__(self, x):
        """[N, D] -> [N, D]."""
        normed, ids, weights = self.ops.route(x, self.norm.weight, self.norm.eps, self.gate, self.routing)
        e = self.experts
        return self.tp.add(
            x,
            lambda carried: self.ops.experts(normed, ids, weights, e.gate_up, e.down, self.activation, carried),
        )
