"""RMS norm layer."""


class Norm:
    """x / rms(x) * weight over [N, D]."""

    def __init__(self, source, name, size, eps, ops):
        self.weight, self.eps, self.ops = source.take(f"{name}.weight", (size,)), eps, ops

    def __call__(self, x):
        return self.ops.norm(x, self.weight, self.eps)
