"""Linear layers: cut by output rows (no collective) or by input columns (summed over ranks)."""


class Linear:
    """y = x W^T + b, all of it on every rank, or this rank's output rows."""

    def __init__(self, source, name, out_features, in_features, ops, *, cut=None, bias=False):
        self.ops = ops
        self.weight = source.take(f"{name}.weight", (out_features, in_features), cut=cut)
        self.bias = source.take(f"{name}.bias", (out_features,), cut=cut) if bias else None

    def __call__(self, x):
        """[N, I] -> [N, O]."""
        return self.ops.linear(x, self.weight, self.bias)


class RowParallel:
    """y = residual + x W^T + b, the input cut over ranks and the products summed in rank order."""

    def __init__(self, source, name, out_features, in_features, ops, tp, *, bias=False):
        self.ops, self.tp = ops, tp
        self.weight = source.take(f"{name}.weight", (out_features, in_features), cut=1)
        own = source.take(f"{name}.bias", (out_features,)) if bias else None
        self.bias = own if tp.rank == 0 else None  # a sum over ranks holds it once

    def __call__(self, x, residual):
        """[N, I/size], [N, O] -> [N, O]."""
        return self.tp.add(residual, lambda carried: self._share(x, carried))

    def and_norm(self, x, residual, norm):
        """The same, and what the norm that follows makes of it, or None (TP.add_and_norm)."""
        return self.tp.add_and_norm(residual, lambda carried: self._share(x, carried), norm)

    def _share(self, x, carried):
        return self.ops.linear(x, self.weight, self.bias, carried)
