"""Dense gated MLP block with its norm and residual, cut by width."""


class MLP:
    """x + down(act(gate(norm x)) * up(norm x)); intermediate width cut over ranks."""

    def __init__(self, source, norm, hidden, intermediate, activation, ops, tp):
        self.norm, self.activation, self.ops, self.tp = norm, activation, ops, tp
        self.gate_up = source.concat([(f"{n}_proj.weight", (intermediate, hidden)) for n in ("gate", "up")], cut=0)
        self.down = source.take("down_proj.weight", (hidden, intermediate), cut=1)

    def __call__(self, x):
        """[N, D] -> [N, D]."""
        n = self.norm
        return self.tp.add(
            x, lambda carried: self.ops.mlp(x, n.weight, n.eps, self.gate_up, self.down, self.activation, carried)
        )
