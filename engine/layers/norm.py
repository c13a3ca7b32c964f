"""RMS norm layer."""


class Norm:
    """x / rms(x) * weight over [N, D]; the weight is the stored one times `gain`."""

    def __init__(self, source, name, size, eps, ops, *, gain=1.0):
        self.weight, self.eps, self.ops = source.take(f"{name}.weight", (size,), gain=gain), eps, ops

    def __call__(self, x):
        return self.ops.norm(x, self.weight, self.eps)

    def given(self, x, normed):
        """(rows, weight or None) for an operation that norms its rows: `normed` where a sum over ranks has made it."""
        return (x, self.weight) if normed is None else (normed, None)
