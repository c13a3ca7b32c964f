"""How an EAGLE-3 head makes one hidden of the target's features: g = fc(F), with a norm before fc in later recipes."""

import torch

from ..layers.linear import Linear
from ..layers.norm import Norm


class Identity:
    """x as it is: the one feature of a head without fc, or a hidden that is recycled before its norm."""

    def __call__(self, x):
        return x


class Plain:
    """fc over the joined features.

    Args:
        source: weights.Source with canonical names; width: A*D_target columns of the joined features.
    """

    def __init__(self, source, config, width, ops):
        self.fc = Linear(source, "fc", config.hidden, width, ops, bias=config.fc_bias)

    def __call__(self, features):
        """[N, A*D] -> [N, h]."""
        return self.fc(features)


class Normed(Plain):
    """fc over one norm of the whole concat (`norm_before_fc`)."""

    def __init__(self, source, config, width, ops):
        super().__init__(source, config, width, ops)
        self.norm = Norm(source, "input_norm", width, config.eps, ops)

    def __call__(self, features):
        return self.fc(self.norm(features))


class PerFeature(Plain):
    """fc over a norm of each feature (`fc_norm`, EAGLE-3.1)."""

    def __init__(self, source, config, width, ops):
        super().__init__(source, config, width, ops)
        count = config.aux_count
        self.norms = [Norm(source, f"fc_norm.{j}", width // count, config.eps, ops) for j in range(count)]

    def __call__(self, features):
        parts = features.chunk(len(self.norms), -1)
        return self.fc(torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], -1))


class Reordered:
    """Another fusion over the features in another order: that of a head trained on them so.

    Args:
        order: for each feature of `fusion`, its place among those handed in.
    """

    def __init__(self, fusion, order):
        self.fusion, self.order = fusion, order

    def __call__(self, features):
        parts = features.chunk(len(self.order), -1)
        return self.fusion(torch.cat([parts[i] for i in self.order], -1))


FUSIONS = {"plain": Plain, "normed": Normed, "per-feature": PerFeature, "final": lambda *_: Identity()}
