"""MXFP4, the experts of gpt-oss: groups of 32 along the input, each with a power of two.

A matrix W [out, in] is stored as `_blocks` uint8 [out, in / 32, 16] and `_scales` uint8 [out, in / 32]: a byte holds
two codes of e2m1 (sign, two bits of exponent, one of mantissa), the even element in its low half, w = code * 2^(scale -
127). Four bytes, read as an int32, are eight codes; once read, their bits are laid out anew, as kernels.experts_mxfp4
has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weights.cut import Cut
from weights.fields import Fields, Refused
from weights.formats.dense import BiasedExperts, Dense, ExpertNames, Experts
from weights.formats.modules import Modules, converted_match, strings
from weights.source import Source

GROUP, HALF = 32, 16  # elements and bytes of a group
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MASK = -0x7E3F7E40  # of a pair of codes: bits 6-8 of each half are magnitudes, its bit 15 is a sign
AT_ONCE = 16  # experts whose words are laid out together: temporaries of 16 are 130 MB of gpt-oss


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [..., groups, 16], [..., groups] -> [..., 32 * groups] fp32."""
    values = torch.tensor(CODES + tuple(-c for c in CODES), device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    return torch.ldexp(values[codes.long()], scales.int()[..., None] - 127).flatten(-2)


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> blocks, scales: the greatest magnitude of a group becomes 4 to 6 (or the nearest below 8)."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    power = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-120).log2().floor() - 2
    steps = torch.tensor(CODES, device=weight.device)
    middles = (steps[1:] + steps[:-1]) / 2
    codes = torch.bucketize(torch.ldexp(groups, -power.int()).abs().contiguous(), middles) + 8 * (groups < 0)
    low, high = codes.to(torch.uint8).unflatten(-1, (HALF, 2)).unbind(-1)
    return low | high << 4, (power.squeeze(-1) + 127).to(torch.uint8)


def lay_out(blocks: torch.Tensor) -> None:
    """Bytes as stored, uint8 [..., 16] -> words as kernels take them, in place."""
    for words in blocks.view(torch.int32).split(AT_ONCE):
        first, second, third, fourth = (_pair(words >> 8 * number) for number in range(4))
        words.copy_(first).bitwise_or_(second >> 6 & 0x3FFFFFF).bitwise_or_(third << 20 | third >> 12 & 0xFFFFF)
        # the fourth is read as words << 2 ^ words >> 6: what others' bits leave of it, by its own bits
        fourth ^= (words << 2 ^ words >> 6) & MASK
        words |= fourth >> 2 & 0x20302030 | fourth << 6 & 0x40004000
        for bit in (29, 21, 13):
            words ^= (words & 1 << bit) >> 8


def _pair(codes: torch.Tensor) -> torch.Tensor:
    """Two codes, the lowest eight bits -> where a pair lies (MASK)."""
    return (codes & 7) << 6 | (codes & 8) << 12 | (codes & 0x70) << 18 | (codes & 0x80) << 24


@dataclass(frozen=True)
class Mxfp4Experts(Experts):
    """Parameters of a layer's experts, packed; this rank's share I of the intermediate size. Rows of gate_up are stored
    as gate 0, up 0, gate 1, up 1 …, and stay so."""

    gate_up: torch.Tensor  # [E, 2I, D / 8] int32
    gate_up_scale: torch.Tensor  # [E, 2I, D / 32] uint8
    gate_up_bias: torch.Tensor  # [E, 2I]
    down: torch.Tensor  # [E, D, I / 8] int32
    down_scale: torch.Tensor  # [E, D, I / 32] uint8
    down_bias: torch.Tensor | None  # [E, D]; a sum over ranks holds it once

    def apply(self, ops, x, norm_weight, eps, router, activation, residual):
        """As Experts.apply."""
        normed, ids, weights = router(ops, x, norm_weight, eps)
        wide = self.gate_up, self.gate_up_scale, self.gate_up_bias
        tall = self.down, self.down_scale, self.down_bias
        return ops.experts_mxfp4(normed, ids, weights, *wide, *tall, activation, residual)


class Mxfp4:
    """Experts packed, dequantised inside their kernel; everything else of these files is plain."""

    def __init__(self, covered: Modules):
        self.covered = covered

    @classmethod
    def read(cls, fields: Fields) -> Mxfp4:
        """From a quantization_config of method mxfp4."""
        kept = strings(fields, "modules_to_not_convert")
        return cls(Modules(("Linear",), kept, converted_match))

    def view(self, checkpoint):
        """`checkpoint` as models see it: as it is."""
        return checkpoint

    def declare(
        self, source: Source, names: Callable[[int], ExpertNames], experts: int, hidden: int, intermediate: int
    ):
        """Refused: experts that are stored one by one have no such form."""
        raise Refused(f"{source.where}: quant_method 'mxfp4' is supported for gpt-oss, whose experts lie together")

    def declare_woven(
        self, source: Source, experts: int, hidden: int, intermediate: int, *, dealt: bool = False
    ) -> Mxfp4Experts | BiasedExperts:
        """As Dense.declare_woven, which is what serves a layer that the config leaves unquantised. Refused: sizes that
        are not whole groups, a tensor parallel size that would split a group."""
        if not self.covered.covers(source.prefix.removesuffix(".")):
            return Dense().declare_woven(source, experts, hidden, intermediate, dealt=dealt)
        for what, size in (("hidden size", hidden), ("expert width", intermediate)):
            if size % GROUP:
                raise Refused(f"{source.where}: the {what} {size} is not made of whole groups of {GROUP}")
        e, d, i, parts = experts, hidden, intermediate, intermediate // GROUP
        rows, columns = (Cut(0), Cut(0)) if dealt else (Cut(1, parts), Cut(2, parts))
        wide, tall = (e, 2 * i, d // GROUP), (e, d, i // GROUP)
        down_bias = source.take("down_proj_bias", (e, d), cut=0 if dealt else None)
        return Mxfp4Experts(
            gate_up=_words(source, "gate_up_proj_blocks", wide, rows),
            gate_up_scale=source.take("gate_up_proj_scales", wide, cut=rows, dtype=torch.uint8),
            gate_up_bias=source.take("gate_up_proj_bias", (e, 2 * i), cut=rows),
            down=_words(source, "down_proj_blocks", tall, columns),
            down_scale=source.take("down_proj_scales", tall, cut=columns, dtype=torch.uint8),
            down_bias=down_bias if dealt or source.rank == 0 else None,
        )


def _words(source: Source, name: str, groups: tuple[int, int, int], cut: Cut) -> torch.Tensor:
    """Stored uint8 [E, out, groups, 16] as int32 [E, out, in / 8]."""
    blocks = source.take(name, (*groups, HALF), cut=cut, dtype=torch.uint8, change=lay_out)
    return blocks.flatten(-2).view(torch.int32)
