"""One rank's share of a tensor-parallel model alone on its device, so that the work of a rank of a model that fits no
single device can be measured there. What ranks would exchange is left out: the ids mean nothing."""

from .tp import TP


class Apart:
    """Links of `size` ranks of which only one is there: others are taken to hold what it holds."""

    def __init__(self, size):
        self.size = size
        self.name = f"nothing (one rank of {size} alone, its collectives left out)"
        self.facts = {"tp_slice": size}

    def sum(self, x, residual=None):
        """This rank's part of a sum, + residual."""
        return x if residual is None else x + residual

    def sum_and_norm(self, x, residual, weight, eps):
        """`sum`, and None: no norm comes with it."""
        return self.sum(x, residual), None

    def gather(self, x):
        """x in the place of all ranks' -> [size, *x.shape]."""
        return x.expand(self.size, *x.shape)

    def check(self):
        """Nobody can be lost."""


class Slice(TP):
    """Rank 0 of `size` ranks, without the others: it holds and computes what that rank would."""

    @classmethod
    def of(cls, size):
        """size: ranks that the model is cut for."""
        return cls(0, size, Apart(size))

    def add(self, residual, product):
        """residual + this rank's part; in its own kernel, as on one device."""
        return product(residual)

    def add_and_norm(self, residual, product, norm):
        """As `add`; what follows norms its rows itself."""
        return product(residual), None

    def known(self, ids, share):
        """Ids of others as ids of its own share: rows of zeros would route alike, and read fewer experts."""
        return ids.clamp(min=0) % share

    def follow(self, x):
        """x is this rank's own."""

    def word(self, make):
        return make()

    def together(self, make):
        return make()

    def every(self, value):
        return [value]

    def held(self, weights):
        return f"one rank of {self.size} alone holds {weights} GB of weights; its collectives are left out"
