"""Draft heads write the same tensors under several names; a `Renamed` view gives them one, so that drafters know only
that."""

from __future__ import annotations

import re

import torch

from weights.checkpoint import Index
from weights.fields import Refused


class Renamed:
    """A checkpoint seen under other names. `table`: canonical name -> stored name; a name not in it stays as it is."""

    def __init__(self, checkpoint, table: dict[str, str]):
        self.checkpoint = checkpoint
        self.table = table
        self.where: str = checkpoint.where
        self.config: dict = checkpoint.config
        self.generation: dict = checkpoint.generation

    def stored(self, name: str) -> str:
        return self.checkpoint.stored(self.table.get(name, name))

    def names(self) -> list[str]:
        back = {stored: name for name, stored in self.table.items()}
        return sorted(back.get(name, name) for name in self.checkpoint.names())

    def has(self, name: str) -> bool:
        return self.checkpoint.has(self.table.get(name, name))

    def expect(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.checkpoint.expect(self.table.get(name, name), shape, dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shape(self.table.get(name, name))

    def dtype(self, name: str) -> torch.dtype:
        return self.checkpoint.dtype(self.table.get(name, name))

    def nbytes(self, name: str) -> int:
        return self.checkpoint.nbytes(self.table.get(name, name))

    def read(self, name: str, device: torch.device | str = "cpu", index: Index | None = None) -> torch.Tensor:
        return self.checkpoint.read(self.table.get(name, name), device, index)

    @property
    def threads(self) -> int:
        return self.checkpoint.threads

    def read_into(self, place: torch.Tensor, name: str, index: Index | None = None) -> None:
        self.checkpoint.read_into(place, self.table.get(name, name), index)


RENAMED = (  # pattern -> canonical, in turn
    (r"^model\.", ""),  # NeMo, vLLM
    (r"^midlayer\.(\d+)\.", r"layers.\1."),  # ModelOpt, several layers
    (r"^midlayer\.", "layers.0."),  # SafeAILab, SpecForge, ModelOpt
    (r"^aux_norm_low\.", "fc_norm.0."),  # before these norms had numbers
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)


def head_names(checkpoint) -> dict[str, str]:
    """canonical -> stored: `layers.0.self_attn.q_proj.weight`, `fc.weight`, `fc_norm.0.weight`, `lm_head.weight`, …
    Refused: two stored names for one tensor."""
    table: dict[str, str] = {}
    for stored in checkpoint.names():
        name = stored
        for pattern, canonical in RENAMED:
            name = re.sub(pattern, canonical, name)
        if name in table:
            raise Refused(f"{checkpoint.where}: tensors {table[name]} and {stored} are two names of {name}")
        table[name] = stored
    return table


def check_table(checkpoint, vocab: int) -> None:
    """Reads `d2t` (target id = draft id + offset) where there is one. Refused: an entry outside `vocab` ids."""
    if not checkpoint.has("d2t"):
        return
    offsets = checkpoint.read("d2t").long()
    ids = offsets + torch.arange(offsets.numel())
    wrong = ((ids < 0) | (ids >= vocab)).nonzero().flatten().tolist()
    if wrong:
        entry = f"entry {wrong[0]} is {int(offsets[wrong[0]])}, which stands for id {int(ids[wrong[0]])}"
        raise Refused(f"{checkpoint.where}: tensor d2t: {entry}, the target has ids 0 to {vocab - 1}")


def tolerated(name: str) -> bool:
    """Unexpected tensors that a head is still served with (training leftovers); they are reported. Norms, biases and
    anything in a layer would have changed its arithmetic: refused."""
    return not re.search(r"norm|bias|^layers\.|^fc|^embed|head|mask|proj|d2t", name)
