"""A mixture-of-experts block: norm, routing, experts, residual. One operation, because kernels that share the router's
choice need no list of pairs in memory."""

from dataclasses import replace


def composed(route, run):
    """An operation from its two halves, e.g. routing.fused and experts.fused."""

    def operation(x, norm_weight, eps, gate, rule, bias, correction, gate_up, down, activation, residual):
        """x … correction: as kernels.routing.reference takes them; the others: as kernels.experts.reference does.

        Returns [N, D].
        """
        normed, ids, weights = route(x, norm_weight, eps, gate, rule, bias, correction)
        return run(normed, ids, weights, gate_up, down, activation, residual)

    return operation


def composed_int4(route, run):
    """The same for INT4 experts, e.g. of routing.fused and experts_int4.fused, and for a shared expert beside them."""

    def operation(
        x, norm_weight, eps, gate, rule, bias, correction, gate_up, gate_up_scale, down, down_scale, activation,
        residual=None, shared_gate_up=None, shared_down=None,
    ):  # fmt: skip
        """x … correction: as kernels.routing.reference takes them; gate_up … residual: as kernels.experts_int4 does;
        shared_gate_up [2S, D], gates first, and shared_down [D, S]: of a shared expert (SiLU), or None.

        Returns [N, D].
        """
        beside = () if shared_gate_up is None else (shared_gate_up,)
        normed, ids, weights, *hidden = route(x, norm_weight, eps, gate, rule, bias, correction, *beside)
        packed = gate_up, gate_up_scale, down, down_scale
        return run(normed, ids, weights, *packed, activation, residual, *((*hidden, shared_down) if hidden else ()))

    return operation


def routed_by(ops, route):
    """The table `ops` with another routing wherever one is part of an operation."""
    whole = {"moe": composed(route, ops.experts), "moe_int4": composed_int4(route, ops.experts_int4)}
    return replace(ops, route=route, **whole)
