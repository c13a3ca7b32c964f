"""Dense gated MLP block with its norm and residual, cut by width."""

from kernels.activation import ACTIVATIONS

from .linear import RowParallel


class MLP:
    """x + down(act(gate(norm x)) * up(norm x)); intermediate width cut over ranks."""

    def __init__(self, source, norm, hidden, intermediate, activation, ops, tp):
        self.norm, self.activation, self.ops, self.tp = norm, activation, ops, tp
        self.gate_up = source.concat([(f"{n}_proj.weight", (intermediate, hidden)) for n in ("gate", "up")], cut=0)
        self.down = source.take("down_proj.weight", (hidden, intermediate), cut=1)

    def __call__(self, x, normed=None):
        """[N, D] -> [N, D]; normed: norm(x), where it is there already."""
        return self.tp.add(x, lambda carried: self.share(*self.norm.given(x, normed), carried))

    def share(self, x, norm_weight, carried):
        """This rank's part of down(…) of x [N, D], normed where the weight is None, on top of `carried` [N, D] or
        None."""
        return self.ops.mlp(x, norm_weight, self.norm.eps, self.gate_up, self.down, self.activation, carried)


class BiasedMLP:
    """The same with biases on all three projections."""

    def __init__(self, source, norm, hidden, intermediate, activation, ops, tp):
        self.norm, self.activation, self.ops = norm, activation, ops
        self.gate_up = source.concat([(f"{n}_proj.weight", (intermediate, hidden)) for n in ("gate", "up")], cut=0)
        self.bias = source.concat([(f"{n}_proj.bias", (intermediate,)) for n in ("gate", "up")], cut=0)
        self.down = RowParallel(source, "down_proj", hidden, intermediate, ops, tp, bias=True)

    def __call__(self, x, normed=None):
        """[N, D] -> [N, D]; normed: norm(x), where it is there already."""
        rows = self.norm(x) if normed is None else normed
        gate, up = self.ops.linear(rows, self.gate_up, self.bias).chunk(2, -1)
        return self.down(ACTIVATIONS[self.activation](gate, up), x)


def dense(source, norm, config, ops, tp):
    """The plain MLP of a config: hidden, intermediate, activation, mlp_bias."""
    kind = BiasedMLP if config.mlp_bias else MLP
    return kind(source, norm, config.hidden, config.intermediate, config.activation, ops, tp)
