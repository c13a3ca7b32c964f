"""Names -> parameters. A model's constructor declares what it needs by the checkpoint's own names and gets empty
tensors of this rank's share; `check` judges the whole list before memory is filled, `fill` reads every piece
straight to its place."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import translate

import torch

from weights.checkpoint import Index, listed
from weights.cut import Cut, Shape
from weights.declared import Book, Part, Report, mismatch
from weights.fields import Refused

Piece = tuple[str, Shape] | tuple[str, Shape, "int | Cut | None"]  # name, stored shape, own cut


def nothing(name: str) -> bool:
    """The tolerance of a target: every unexpected tensor is refused."""
    return False


class Source:
    """`checkpoint` read for one rank, to `device` in `dtype`. Device "meta" is the dry pass: the same declarations
    give `nbytes` and `check` without memory. `tolerates(name)`: unexpected tensors that are reported rather than
    refused."""

    def __init__(
        self,
        checkpoint,
        device: torch.device | str,
        dtype: torch.dtype,
        rank: int = 0,
        size: int = 1,
        *,
        tolerates: Callable[[str], bool] = nothing,
    ):
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.dtype = dtype
        self.rank = rank
        self.size = size
        self.tolerates = tolerates
        self.prefix = ""
        self.here = True
        self._book = Book()

    def prefixed(self, prefix: str) -> Source:
        """The same source with `prefix` before every name (and pattern) given to it."""
        return self._view(prefix=self.prefix + prefix)

    def whole(self) -> Source:
        """The same source for every rank alike: nothing declared through it is cut."""
        return self._view(rank=0, size=1)

    def elsewhere(self) -> Source:
        """The same source for what other ranks hold: declared and checked, neither counted nor read."""
        return self._view(rank=0, size=1, device=torch.device("meta"), here=False)

    def _view(self, **changes) -> Source:
        view = copy.copy(self)
        vars(view).update(changes)
        return view

    def deal(self, what: str, count: int) -> range:
        """This rank's part of `count` whole things (experts). Raises Misfit where they do not divide."""
        start = Cut(0).index(self.prefix + what, (count,), self.rank, self.size)
        self._book.cuts.add(((count,), Cut(0)))
        return range(count)[start[0]] if start else range(count)

    def fits(self, size: int) -> bool:
        """Whether `size` ranks could divide all that was declared."""
        return all(cut.fits(shape, size) for shape, cut in self._book.cuts)

    def take(
        self,
        name: str,
        shape: Shape,
        *,
        cut: int | Cut | None = None,
        dtype: torch.dtype | None = None,
        gain: float = 1.0,
        change: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """The parameter `name`, stored with `shape`, times `gain`; `cut` is the dimension that tensor parallelism
        divides. `change` is called with this rank's part when it has been read, to change it in place. Empty until
        `fill`. Refused: a cut that does not divide."""
        local = self._locate(name, shape, cut)
        return self._allocate((1, *local[-1]), dtype, [[local]], gain, change)[0]

    def concat(
        self, pieces: Sequence[Piece], *, cut: int | Cut | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Several stored tensors joined along dimension 0 (q, k, v; gate, up), each cut on its own: rank r holds [q_r;
        k_r; v_r]."""
        return self._joined([pieces], cut, dtype)[0]

    def stack(
        self, groups: Sequence[Sequence[Piece]], *, cut: int | Cut | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """[len(groups), ...]: one `concat` a group (experts: gate, up cut along 0; down along 1). All groups are of
        one shape."""
        return self._joined(groups, cut, dtype)

    def woven(
        self,
        name: str,
        shape: Shape,
        *,
        strands: int = 1,
        transposed: bool = False,
        cut: int | Cut | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor [E, …] whose last dimension holds `strands` sequences in turn (gate 0, up 0, gate 1, …), taken
        apart: they follow each other in dimension 1. transposed: stored [E, in, out] -> [E, out, in]. `cut` names a
        stored dimension; the last one is cut between whole turns."""
        if cut == len(shape) - 1:
            cut = Cut(cut, shape[-1] // strands)
        name, shape, index, local = self._locate(name, shape, cut)
        laid = (local[0], local[2], local[1]) if transposed else local
        whole = torch.empty(laid, dtype=dtype or self.dtype, device=self.device)
        *others, last = index or (slice(None),) * len(shape)
        start, stop, _ = last.indices(shape[-1])
        self.checkpoint.expect(name, shape, whole.dtype)
        for strand, own in enumerate(whole.chunk(strands, 1)):
            at = (*others, slice(start + strand, stop, strands))
            self._book.parts.append(Part(name, shape, at, own.transpose(1, 2) if transposed else own))
        self._book.nbytes += whole.nbytes
        return whole

    def optional(self, name: str) -> bool:
        """Whether the checkpoint has `name`. Declares nothing."""
        return self.checkpoint.has(self.prefix + name)

    def ignore(self, pattern: str) -> None:
        """Names (shell wildcards) that are expected and skipped on purpose: listed as skipped when there."""
        self._book.skips.append(self.prefix + pattern)

    def alias(self, name: str) -> None:
        """One name that may be stored and is not used: another tensor serves in its place (tied head)."""
        self.ignore(name)

    def borrowed(self, name: str, reason: str) -> None:
        """Records that `name` comes from elsewhere (the target, an identity); a stored one is skipped."""
        self.ignore(name)
        self._book.borrowed[self.prefix + name] = reason

    def guess(self, sentence: str) -> None:
        """Records a reading that the files leave open, for the report."""
        self._book.guesses.append(sentence)

    @property
    def where(self) -> str:
        """The checkpoint, for messages."""
        return self.checkpoint.where

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters declared so far, this rank's share."""
        return self._book.nbytes

    def check(self) -> Report:
        """Compares the declarations with the checkpoint; reads nothing. Refused, all in one line: tensors that are
        missing, of another shape or kind of dtype, or unexpected."""
        found, book = self.checkpoint, self._book
        faults, declared = [], {part.name: part for part in book.parts}
        if missing := [f"{n} {list(p.shape)}" for n, p in declared.items() if not found.has(n)]:
            faults.append(f"lacks {listed('tensor', missing)}")
        for part in declared.values():
            if found.has(part.name):
                faults += mismatch(part, found)
        skip = re.compile("|".join(map(translate, book.skips)) or r"(?!)")
        others = [name for name in found.names() if name not in declared]
        skipped = [found.stored(n) for n in others if skip.match(n)]
        unexpected = [n for n in others if not skip.match(n)]
        if refused := [found.stored(n) for n in unexpected if not self.tolerates(n)]:
            faults.append(f"has unexpected {listed('tensor', refused)}")
        if faults:
            more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
            raise Refused(f"{found.where}: {'; '.join(faults[:4])}{more}")
        return Report(
            where=found.where,
            loaded=len({part.name for part in book.parts if part.here}),
            nbytes=book.nbytes,
            borrowed=sorted(book.borrowed.items()),
            missing=sorted(n for n in book.borrowed if not found.has(n)),
            unexpected=[found.stored(n) for n in unexpected],
            skipped=skipped,
            guessed=list(book.guesses),
        )

    def fill(self, progress: Callable[[int, int], None] | None = None) -> Report:
        """Checks, then reads every part to its place. `progress(bytes_done, bytes_total)` after each. Raises
        ValueError on "meta"."""
        if self.device.type == "meta":
            raise ValueError("a source on device 'meta' is a dry pass: it has no memory to fill")
        report, done = self.check(), 0
        parts = [part for part in self._book.parts if part.here]
        threads = self.checkpoint.threads if self.device.type == "cuda" else 1
        with ThreadPoolExecutor(threads) as pool:
            try:
                for part in map(self._read, parts) if threads == 1 else pool.map(self._read, parts):
                    done += part.place.nbytes
                    if progress:
                        progress(done, self._book.nbytes)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return report

    @torch.no_grad()
    def _read(self, part: Part) -> Part:
        self.checkpoint.read_into(part.place, part.name, part.index)
        if part.gain != 1:
            part.place.mul_(part.gain)
        if part.change:
            part.change(part.place)
        return part

    def _locate(self, name: str, shape: Shape, cut: int | Cut | None) -> tuple[str, Shape, Index | None, Shape]:
        """(full name, stored shape, this rank's index, local shape)."""
        name, shape = self.prefix + name, tuple(shape)
        cut = Cut(cut) if isinstance(cut, int) else cut
        if cut and self.here:
            self._book.cuts.add((shape, cut))
        index = cut.index(name, shape, self.rank, self.size) if cut else None
        local = shape if index is None else tuple(len(range(n)[s]) for n, s in zip(shape, index, strict=True))
        return name, shape, index, local

    def _joined(
        self, groups: Sequence[Sequence[Piece]], cut: int | Cut | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        located = [[self._locate(name, shape, *(own or (cut,))) for name, shape, *own in group] for group in groups]
        shapes = {(sum(p[-1][0] for p in group), *group[0][-1][1:]) for group in located}
        ragged = any(piece[-1][1:] != group[0][-1][1:] for group in located for piece in group)
        if len(shapes) != 1 or ragged:
            raise ValueError(f"pieces do not join: {[[p[-1] for p in group] for group in located[:2]]}")
        return self._allocate((len(groups), *shapes.pop()), dtype, located)

    def _allocate(
        self, shape: Shape, dtype: torch.dtype | None, located: list[list], gain: float = 1.0, change=None
    ) -> torch.Tensor:
        """An empty tensor and the parts that will fill it: `located[i]` fills row i."""
        whole = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        for i, group in enumerate(located):
            start = 0
            for name, stored, index, local in group:
                place = whole[i] if len(group) == 1 else whole[i].narrow(0, start, local[0])
                start += local[0] if local else 0
                self.checkpoint.expect(name, stored, whole.dtype)
                self._book.parts.append(Part(name, stored, index, place, gain, change, self.here))
        self._book.nbytes += math.prod(shape) * whole.dtype.itemsize * self.here
        return whole
