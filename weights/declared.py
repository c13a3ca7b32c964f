"""What a source was asked for, piece by piece, what of it the checkpoint contradicts, and what a load came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weights.checkpoint import Index, listed
from weights.cut import Cut, Shape

KINDS = {
    **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), "floating point"),
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), "integer"),
    torch.bool: "boolean",
}  # float8 has no entry: its numbers mean nothing without their scales, so it only serves as itself


@dataclass(frozen=True)
class Part:
    """One stored tensor, or a slice of it, and the place that it fills. Parts are independent of each other."""

    name: str
    shape: Shape  # as stored
    index: Index | None
    place: torch.Tensor
    gain: float = 1.0  # multiplies what was read
    change: Callable[[torch.Tensor], None] | None = None  # of what was read, in place
    here: bool = True  # on this rank; others are declared so that the whole checkpoint is judged, and not read


@dataclass
class Book:
    """What was declared so far; all prefixed views of a Source write in the same one."""

    parts: list[Part] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)  # patterns
    borrowed: dict[str, str] = field(default_factory=dict)  # name -> reason
    guesses: list[str] = field(default_factory=list)
    cuts: set[tuple[Shape, Cut]] = field(default_factory=set)
    nbytes: int = 0


@dataclass(frozen=True)
class Report:
    """What a load did, by the checkpoint's names. `missing`: borrowed names that the checkpoint lacks."""

    where: str
    loaded: int  # stored tensors read, whole or in part
    nbytes: int  # of this rank's parameters
    borrowed: list[tuple[str, str]]  # name, reason
    missing: list[str]
    unexpected: list[str]
    skipped: list[str]
    guessed: list[str] = field(default_factory=list)  # readings that the files leave open, a sentence each

    def lines(self) -> list[str]:
        """For the load report: one line of totals, then one for each list that is not empty."""
        text = [f"{self.where}: {self.loaded} tensors, {self.nbytes / 1e9:.3f} GB"]
        text += [f"  borrowed {name}: {reason}" for name, reason in self.borrowed]
        for what in ("missing", "unexpected", "skipped"):
            if names := getattr(self, what):
                text.append(f"  {what} {listed('tensor', names)}")
        return text + [f"  GUESSED: {guess}" for guess in self.guessed]


def mismatch(part: Part, found) -> list[str]:
    """What is wrong with a tensor that is there: at most one fault, in words."""
    name, shape, dtype = found.stored(part.name), tuple(found.shape(part.name)), found.dtype(part.name)
    if shape != part.shape:
        return [f"tensor {name} has shape {list(shape)}, expected {list(part.shape)}"]
    due = part.place.dtype
    if KINDS.get(dtype, dtype) != KINDS.get(due, due):
        return [f"tensor {name} is {dtype}, expected {KINDS.get(due) or due}"]
    return []
