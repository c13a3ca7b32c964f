"""FP8 in blocks of 128 x 128: DeepSeek-V3 and R1, Kimi-K2-Instruct, the FP8 builds of Qwen3 and MiniMax.

A matrix W [out, in] is stored as `weight` float8_e4m3fn [out, in] and `weight_scale_inv` fp32 [out / 128, in / 128],
both rounded up: w = weight * scale of its block. Blocks at the edges may be partial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weights.cut import Cut
from weights.fields import Fields, Refused
from weights.formats.dense import Dense, DenseExperts, ExpertNames, Experts
from weights.formats.modules import Modules, converted_match, strings
from weights.formats.view import Dequantised
from weights.source import Source

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn


def blocks(size: int) -> int:
    """Blocks along a dimension, the last one perhaps partial."""
    return -(-size // BLOCK)


def spread(scale: torch.Tensor, out: int, columns: int) -> torch.Tensor:
    """[blocks, blocks] -> [out, columns]: the scale of each element."""
    return scale.repeat_interleave(BLOCK, 0)[:out].repeat_interleave(BLOCK, 1)[:, :columns]


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> weight (e4m3), weight_scale_inv: each block's largest magnitude becomes 448."""
    out, columns = weight.shape
    whole = weight.new_zeros(blocks(out) * BLOCK, blocks(columns) * BLOCK, dtype=torch.float32)
    whole[:out, :columns] = weight.abs()
    scale = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3)) / LARGEST
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.float() / spread(scale, out, columns)).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Fp8Experts(Experts):
    """Parameters of a layer's experts, packed; this rank's share I of the intermediate size."""

    gate_up: torch.Tensor  # [E, 2I, D] float8_e4m3fn, gate rows first
    gate_up_scale: torch.Tensor  # [E, 2 * blocks(I), blocks(D)] fp32
    down: torch.Tensor  # [E, D, I] float8_e4m3fn
    down_scale: torch.Tensor  # [E, blocks(D), blocks(I)] fp32

    def apply(self, ops, x, norm_weight, eps, router, activation, residual):
        """As Experts.apply."""
        normed, ids, weights = router(ops, x, norm_weight, eps)
        packed = self.gate_up, self.gate_up_scale, self.down, self.down_scale
        return ops.experts_fp8(normed, ids, weights, *packed, activation, residual)


class Fp8Blocks:
    """Experts packed, dequantised inside their kernel; other matrices (attention, plain MLPs, shared experts)
    dequantised when they are loaded: two bytes a weight in bf16 where the file has one. Of DeepSeek-V3's 671 GB these
    are 15 GB, which become 30 over all ranks."""

    suffixes = (".weight_scale_inv", ".weight")
    described = ()

    def __init__(self, covered: Modules):
        self.covered = covered

    @classmethod
    def read(cls, fields: Fields) -> Fp8Blocks:
        """From a quantization_config of method fp8. Refused by name: any other scheme."""
        fields.choice("fmt", ("e4m3",), "e4m3")
        fields.choice("activation_scheme", ("dynamic",), "dynamic")
        fields.choice("scale_fmt", ("float", "ue8m0"), "float")  # powers of two, stored as the same fp32
        if fields.ints("weight_block_size", ()) != (BLOCK, BLOCK):
            raise fields.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}] (a scale for other blocks is not supported)")
        kept = strings(fields, fields.first("modules_to_not_convert", "ignored_layers"))
        return cls(Modules(("Linear",), kept, converted_match))

    def view(self, checkpoint) -> Dequantised:
        """`checkpoint` as models see it. Refused: see Dequantised."""
        return Dequantised(checkpoint, self)

    def declare(
        self, source: Source, names: Callable[[int], ExpertNames], experts: int, hidden: int, intermediate: int
    ) -> Fp8Experts | DenseExperts:
        """As Dense.declare, which is what serves a layer that the config leaves unquantised. Refused: a tensor parallel
        size that would split a block."""
        if not self.covered.covers(source.prefix + names(0).gate):
            return Dense().declare(source, names, experts, hidden, intermediate)
        each = [names(e) for e in range(experts)]
        parts = 1 if intermediate % BLOCK else intermediate // BLOCK

        def stack(suffix, size, dtype):
            wide, tall = (size(intermediate), size(hidden)), (size(hidden), size(intermediate))
            both = [[(n.gate + suffix, wide), (n.up + suffix, wide)] for n in each]
            return (
                source.stack(both, cut=Cut(0, parts), dtype=dtype),
                source.stack([[(n.down + suffix, tall)] for n in each], cut=Cut(1, parts), dtype=dtype),
            )

        gate_up, down = stack(".weight", lambda size: size, torch.float8_e4m3fn)
        gate_up_scale, down_scale = stack(".weight_scale_inv", blocks, torch.float32)
        return Fp8Experts(gate_up, gate_up_scale, down, down_scale)

    def declare_woven(self, source: Source, experts: int, hidden: int, intermediate: int, *, dealt: bool = False):
        """Refused: experts that lie together (gpt-oss) come in another form."""
        raise Refused(
            f"{source.where}: FP8 blocks are not supported for gpt-oss; supported: quant_method 'mxfp4' or none"
        )

    def shape(self, checkpoint, module: str) -> tuple[int, ...]:
        """Of the matrix. Refused: without its matrix, or with scales of another shape."""
        name = module + ".weight"
        if not checkpoint.has(name):
            raise Refused(f"{checkpoint.where}: tensor {module}.weight_scale_inv is there without {name}")
        out, columns = checkpoint.shape(name)
        found, due = checkpoint.shape(module + ".weight_scale_inv"), (blocks(out), blocks(columns))
        if tuple(found) != due or checkpoint.dtype(name) != torch.float8_e4m3fn:
            raise Refused(
                f"{checkpoint.where}: tensor {name} {[out, columns]} is {checkpoint.dtype(name)} with scales "
                f"{list(found)}, expected {torch.float8_e4m3fn} with {list(due)}"
            )
        return out, columns

    def matrix(self, checkpoint, module: str, rows: range, device) -> torch.Tensor:
        """Rows of the matrix, fp32."""
        first = rows.start // BLOCK * BLOCK  # of the blocks that hold these rows
        weight = checkpoint.read(module + ".weight", device, (slice(rows.start, rows.stop), slice(None)))
        scale = checkpoint.read(module + ".weight_scale_inv", device).float()[first // BLOCK :]
        return weight.float() * spread(scale, rows.stop - first, weight.shape[1])[rows.start - first :]
