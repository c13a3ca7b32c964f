"""How tensor parallelism divides what is stored: equal shares of whole parts, or a refusal that names the sizes that
would work."""

from __future__ import annotations

from dataclasses import dataclass

from weights.checkpoint import Index
from weights.fields import Refused

Shape = tuple[int, ...]
SIZES = range(1, 65)  # of tensor parallelism


class Misfit(Refused):
    """A tensor that a tensor parallel size does not divide; `fault`: what is wrong, without the sizes that work."""

    def __init__(self, fault: str, works: list[int]):
        super().__init__(f"{fault}; sizes that work: {', '.join(map(str, works))}")
        self.fault = fault


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism divides a stored tensor: dimension `dim` into equal shares of whole `parts` (heads; None:
    single rows). A share never holds a piece of a part. shared: where ranks are a multiple of the parts, each holds one
    part, and several the same (heads of keys and values)."""

    dim: int
    parts: int | None = None
    shared: bool = False

    def fits(self, shape: Shape, size: int) -> bool:
        """Whether `size` ranks can hold a tensor of this shape."""
        parts = self.parts or shape[self.dim]
        return shape[self.dim] % parts == 0 and (parts % size == 0 or (self.shared and size % parts == 0))

    def index(self, name: str, shape: Shape, rank: int, size: int) -> Index | None:
        """The slices of `rank`; None for the whole. Raises Misfit."""
        if size == 1:
            return None
        parts = self.parts or shape[self.dim]
        if not self.fits(shape, size):
            raise Misfit(
                f"tensor '{name}' {list(shape)}: dimension {self.dim} has {parts} equal parts, which tensor "
                f"parallel size {size} does not divide",
                [n for n in SIZES if self.fits(shape, n)],
            )
        held = max(1, size // parts)  # ranks that hold the same
        share = shape[self.dim] * held // size
        start = rank // held * share
        return tuple(slice(start, start + share) if d == self.dim else slice(None) for d in range(len(shape)))
