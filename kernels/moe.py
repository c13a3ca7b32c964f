"""A mixture-of-experts block: norm, routing, experts, residual. One operation, because kernels that share the router's
choice need no list of pairs in memory."""


def composed(route, run):
    """An operation from its two halves, e.g. routing.fused and experts.fused."""

    def operation(x, norm_weight, eps, gate, rule, bias, correction, gate_up, down, activation, residual):
        """x … correction: as kernels.routing.reference takes them; the others: as kernels.experts.reference does.

        Returns [N, D].
        """
        normed, ids, weights = route(x, norm_weight, eps, gate, rule, bias, correction)
        return run(normed, ids, weights, gate_up, down, activation, residual)

    return operation
