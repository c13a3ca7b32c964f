"""INT4 in groups along the input, as compressed-tensors packs it (`pack-quantized`): Kimi-K2-Thinking, K2.5, K2.6.

A matrix W [out, in] is stored as `weight_packed` int32 [out, in / 8], `weight_scale` [out, in / group] and
`weight_shape` [2]: w = q * scale of its group, q in -8 … 7 stored as q + 8, element c in word c // 8, bit 4 * (c % 8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weights.cut import Cut
from weights.fields import Fields, Refused, shown
from weights.formats.dense import Dense, DenseExperts, ExpertNames, Experts
from weights.formats.modules import Modules, compressed_match, strings
from weights.formats.view import Dequantised
from weights.source import Source

GROUPS = (32, 64, 128)  # sizes of a group that the kernels know
WORD = 8  # elements in an int32
BITS = 4


def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int32 [out, words], scale [out, groups] -> [out, 8 * words] fp32."""
    shifts = torch.arange(WORD, device=packed.device, dtype=torch.int32) * BITS
    q = (packed[..., None] >> shifts & 15).flatten(-2) - 8
    return (q.unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]).flatten(-2)


def pack(weight: torch.Tensor, group: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> weight_packed, weight_scale; each group's largest magnitude becomes 7 steps (what Kimi's training
    uses: -8 does not occur)."""
    groups = weight.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=torch.finfo(torch.float32).tiny).to(dtype).float()
    q = (groups / scale).round().clamp(-8, 7).to(torch.int64).flatten(-2) + 8
    shifts = torch.arange(WORD, device=weight.device) * BITS
    words = (q.unflatten(-1, (-1, WORD)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32), scale.squeeze(-1).to(dtype)


@dataclass(frozen=True)
class Int4Experts(Experts):
    """Parameters of a layer's experts, packed; this rank's share I of the intermediate size."""

    gate_up: torch.Tensor  # [E, 2I, D / 8] int32, gate rows first
    gate_up_scale: torch.Tensor  # [E, 2I, D / group]
    down: torch.Tensor  # [E, D, I / 8] int32
    down_scale: torch.Tensor  # [E, D, I / group]

    def apply(self, ops, x, norm_weight, eps, router, activation, residual):
        """As Experts.apply."""
        return self._routed(ops, x, norm_weight, eps, router, activation, residual)

    def apply_beside(self, ops, x, norm_weight, eps, router, activation, residual, shared):
        """As Experts.apply_beside; SiLU in no more launches than without the shared expert."""
        if activation != "silu":
            return super().apply_beside(ops, x, norm_weight, eps, router, activation, residual, shared)
        return self._routed(ops, x, norm_weight, eps, router, activation, residual, shared.gate_up, shared.down)

    def _routed(self, ops, x, norm_weight, eps, router, *rest):
        choice = router.gate, router.rule, router.bias, router.correction
        packed = self.gate_up, self.gate_up_scale, self.down, self.down_scale
        return ops.moe_int4(x, norm_weight, eps, *choice, *packed, *rest)


class Int4Groups:
    """Experts packed, dequantised inside their kernel; other packed matrices dequantised when they are loaded: two
    bytes a weight in bf16 where the file has 0.56. (Kimi's files pack nothing but the routed experts.)"""

    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")
    described = (".weight_shape",)  # read to be compared, never kept

    def __init__(self, covered: Modules, group: int):
        self.covered, self.group = covered, group

    @classmethod
    def read(cls, fields: Fields) -> Int4Groups:
        """From a quantization_config of compressed-tensors. Refused by name: any other scheme."""
        fields.choice("format", ("pack-quantized",))
        fields.choice("quantization_status", ("compressed",), "compressed")
        fields.unless("a quantised cache", kv_cache_scheme=None)
        for key in ("sparsity_config", "transform_config"):
            if fields.raw.get(key):
                raise fields.refuse(key, f"no such key ({key.removesuffix('_config')} is not supported)")
        groups = fields.sub("config_groups")
        if len(groups.raw) != 1:
            raise fields.refuse("config_groups", "one group (weights of several precisions are not supported)")
        scheme = groups.sub(next(iter(groups.raw)))
        scheme.choice("format", ("pack-quantized",), "pack-quantized")
        scheme.unless("quantised activations", input_activations=None, output_activations=None)
        targets = strings(scheme, "targets")
        if not targets:
            raise scheme.refuse("targets", "names or patterns of modules, or 'Linear'")
        weights = scheme.sub("weights")
        weights.choice("num_bits", (BITS,))
        weights.choice("type", ("int",))
        weights.choice("strategy", ("group",))
        weights.choice("symmetric", (True,))
        weights.unless("act-order", actorder=False)
        weights.unless("dynamic quantisation of weights", dynamic=False)
        return cls(Modules(targets, strings(fields, "ignore"), compressed_match), weights.choice("group_size", GROUPS))

    def view(self, checkpoint) -> Dequantised:
        """`checkpoint` as models see it. Refused: see Dequantised."""
        return Dequantised(checkpoint, self)

    def declare(
        self, source: Source, names: Callable[[int], ExpertNames], experts: int, hidden: int, intermediate: int
    ) -> Int4Experts | DenseExperts:
        """As Dense.declare, which is what serves a layer that the config leaves unquantised. Refused: sizes that are
        not whole groups, a tensor parallel size that would split a group."""
        if not self.covered.covers(source.prefix + names(0).gate):
            return Dense().declare(source, names, experts, hidden, intermediate)
        for what, size in (("hidden size", hidden), ("expert width", intermediate)):
            if size % self.group:
                raise Refused(f"{source.where}: the {what} {size} is not made of whole groups of {self.group}")
        each, parts = [names(e) for e in range(experts)], intermediate // self.group

        def stack(suffix, per, dtype):
            wide, tall = (intermediate, hidden // per), (hidden, intermediate // per)
            both = [[(n.gate + suffix, wide), (n.up + suffix, wide)] for n in each]
            return (
                source.stack(both, cut=Cut(0, parts), dtype=dtype),
                source.stack([[(n.down + suffix, tall)] for n in each], cut=Cut(1, parts), dtype=dtype),
            )

        (gate_up, down), kept = stack(".weight_packed", WORD, torch.int32), source.dtype
        if kept == torch.float16:  # scales of bf16 files leave its range
            kept = torch.float32
        gate_up_scale, down_scale = stack(".weight_scale", self.group, kept)
        return Int4Experts(gate_up, gate_up_scale, down, down_scale)

    def declare_woven(self, source: Source, experts: int, hidden: int, intermediate: int, *, dealt: bool = False):
        """Refused: experts that lie together (gpt-oss) come in another form."""
        raise Refused(
            f"{source.where}: INT4 groups are not supported for gpt-oss; supported: quant_method 'mxfp4' or none"
        )

    def shape(self, checkpoint, module: str) -> tuple[int, ...]:
        """Of the matrix, as its words and its `weight_shape` say. Refused: where they disagree."""
        out, words = checkpoint.shape(module + ".weight_packed")
        if checkpoint.has(module + ".weight_shape"):
            told = tuple(checkpoint.read(module + ".weight_shape").tolist())
            if told != (out, words * WORD):
                raise Refused(
                    f"{checkpoint.where}: tensor {module}.weight_shape says {list(told)}, "
                    f"tensor {module}.weight_packed holds {[out, words * WORD]}"
                )
        if not checkpoint.has(module + ".weight_scale"):
            raise Refused(f"{checkpoint.where}: lacks tensor {module}.weight_scale beside {module}.weight_packed")
        grouped = checkpoint.shape(module + ".weight_scale")
        if tuple(grouped) != (out, words * WORD // self.group):
            raise Refused(
                f"{checkpoint.where}: tensor {module}.weight_scale has shape {shown(list(grouped))}, "
                f"expected {[out, words * WORD // self.group]} for groups of {self.group}"
            )
        return out, words * WORD

    def matrix(self, checkpoint, module: str, rows: range, device) -> torch.Tensor:
        """Rows of the matrix, fp32."""
        index = (slice(rows.start, rows.stop), slice(None))
        packed, scale = (checkpoint.read(module + suffix, device, index) for suffix in self.suffixes[:2])
        return unpack(packed, scale)
