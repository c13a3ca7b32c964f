"""A quantised checkpoint as its models see it: experts packed as they are stored, any other quantised matrix under the
name and in the shape it had before, dequantised where it is read."""

from __future__ import annotations

import torch

from weights.checkpoint import Index
from weights.fields import Refused
from weights.formats.modules import PROJECTION

PLAIN = (torch.float32, torch.float16, torch.bfloat16)


class Dequantised:
    """`inner` with the matrices that `form` packs.

    What a model declares decides: `X.weight` of a floating point dtype is dequantised as it is read, the packed tensors
    of X by their own names are read as they are. `form` (a format of weights.formats) has `covered` (Modules),
    `suffixes` (of a packed module's tensors, the telling one first), `shape(inner, module)` of the matrix and
    `matrix(inner, module, rows, device)`: those rows of it in fp32.

    Refused on construction: a packed module that the config leaves out, a plain projection that the config packs.
    """

    def __init__(self, inner, form):
        self.inner, self.form = inner, form
        self.where: str = inner.where
        self.config: dict = inner.config
        self.generation: dict = inner.generation
        names = inner.names()
        self.modules = {name.removesuffix(form.suffixes[0]) for name in names if name.endswith(form.suffixes[0])}
        self._whole: set[str] = set()  # names of matrices declared dequantised
        self._raw: set[str] = set()  # modules declared packed
        self._agree(names)

    def _agree(self, names: list[str]) -> None:
        for module in sorted(self.modules):
            if not self.form.covered.covers(module):
                raise Refused(
                    f"{self.where}: tensor {module}{self.form.suffixes[0]} is there, but config.json's "
                    f"quantization_config leaves {module} unquantised"
                )
        for name in names:
            module = name.removesuffix(".weight")
            if module != name and module not in self.modules and PROJECTION.search(module):
                if self.form.covered.covers(module):
                    raise Refused(
                        f"{self.where}: tensor {name} is {self.inner.dtype(name)}, but config.json's "
                        f"quantization_config has {module} quantised (tensor {module}{self.form.suffixes[0]})"
                    )

    def _module(self, name: str) -> str:
        return name.removesuffix(".weight")

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        for suffix in self.form.suffixes:
            if name.endswith(suffix) and not (suffix == ".weight" and dtype in PLAIN):
                self._raw.add(name.removesuffix(suffix))
        if name.endswith(".weight") and dtype in PLAIN and self._module(name) in self.modules:
            self._whole.add(name)
        else:
            self.inner.expect(name, shape, dtype)

    def names(self) -> list[str]:
        """Stored names, but for the parts of what is dequantised and what only describes a packed tensor."""
        whole = {self._module(name) for name in self._whole}
        hidden = {module + suffix for module in whole for suffix in self.form.suffixes}
        hidden |= {module + suffix for module in self._raw for suffix in self.form.described}
        return sorted({name for name in self.inner.names() if name not in hidden} | self._whole)

    def has(self, name: str) -> bool:
        renamed = ".weight" not in self.form.suffixes and name.endswith(".weight")
        return name in self._whole or self.inner.has(name) or (renamed and self._module(name) in self.modules)

    def stored(self, name: str) -> str:
        return self.inner.stored(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._whole:
            return self.form.shape(self.inner, self._module(name))
        telling = self.form.suffixes[0]
        if name.endswith(telling) and name.removesuffix(telling) in self.modules:
            self.form.shape(self.inner, name.removesuffix(telling))  # for what it refuses
        return self.inner.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """fp32 where the matrix is dequantised: what its values are before they are rounded to their place."""
        return torch.float32 if name in self._whole else self.inner.dtype(name)

    def read(self, name: str, device: torch.device | str = "cpu", index: Index | None = None) -> torch.Tensor:
        """A tensor, or the part of it that `index` cuts; dequantised: whole rows are read."""
        if name not in self._whole:
            return self.inner.read(name, device, index)
        rows, columns = index or (slice(None), slice(None))
        out, _ = self.shape(name)
        return self.form.matrix(self.inner, self._module(name), range(out)[rows], device)[:, columns]

    @property
    def threads(self) -> int:
        return self.inner.threads

    def read_into(self, place: torch.Tensor, name: str, index: Index | None = None) -> None:
        if name in self._whole:
            place.copy_(self.read(name, place.device, index))
        else:
            self.inner.read_into(place, name, index)
