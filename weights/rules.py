"""How random weights look: one rule a kind of tensor, found by name. Values keep activations near unit size, so that a
random model neither overflows nor goes flat.

Rows stay as different as their tokens: embeddings have unit size, and what each layer adds to them is small. Where
layers add as much as they find, the part that all rows share grows with depth, and rows choose the same experts: then a
verify pass of a random model reads fewer experts than rows of real text do (11 of 128 were measured for four rows,
where independent choices read 29).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from weights.fields import Fields

Rule = Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal(0, fan_in^-0.5); fan_in is the last dimension of [out, in]. FP8: Normal(0, 1), its scales do the rest."""
    if dtype == torch.float8_e4m3fn:
        return torch.randn(shape, device=generator.device, generator=generator).to(dtype)
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator).mul_(shape[-1] ** -0.5)


def small(factor: float) -> Rule:
    """`normal` times a factor: matrices whose product is added to the residual stream."""

    def rule(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        made = normal(shape, dtype, generator)
        return made if dtype == torch.float8_e4m3fn else made.mul_(factor)

    return rule


def unit(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal(0, 1)."""
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)


def near_one(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return near_zero(shape, dtype, generator).add_(1)


def near_zero(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator).mul_(0.02)


def words(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every bit pattern of an integer alike: packed codes."""
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype, device=generator.device, generator=generator)


def scales(columns: int, spread: float) -> Rule:
    """Scales of codes that spread by `spread`, one for `columns` of a row: 0.5 to 1.5 times what gives matrices the
    size of `normal`. Stored as integers they are exponents + 127."""

    def rule(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        usual = (shape[-1] * columns) ** -0.5 / spread
        if not dtype.is_floating_point:
            return torch.full(shape, 127 + round(math.log2(usual)), dtype=dtype, device=generator.device)
        return ((torch.rand(shape, device=generator.device, generator=generator) + 0.5) * usual).to(dtype)

    return rule


ADDED = r"(o_proj|down_proj)"  # modules whose products are added to the residual stream


def packed(config: dict, factor: float) -> list[tuple[re.Pattern, Rule]]:
    """Rules for the tensors of weights.formats: INT4, FP8 blocks, MXFP4; factor: of what is added to the residual."""
    quantised = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    groups = [group.get("weights", {}).get("group_size", 32) for group in quantised.get("config_groups", {}).values()]
    return [
        (re.compile(r"\.weight_packed$|_blocks$"), words),
        *(
            (re.compile(f"{name}{ending}"), scales(columns, spread / own))
            for name, own in ((ADDED, factor), ("", 1.0))
            for ending, columns, spread in (
                (r"\.weight_scale$", groups[0] if groups else 32, 4.6),  # of 16 codes one apart
                (r"\.weight_scale_inv$", 128, 1.0),
                (r"_scales$", 32, 2.9),  # of the codes of e2m1
            )
        ),
    ]


def rules(config: dict) -> list[tuple[re.Pattern, Rule]]:
    """Name pattern -> rule, the first that matches counts. A config with a draft vocabulary gets id tables that spread
    it evenly over the target's vocabulary."""
    text = config.get("text_config", config)
    factor = (2 * text.get("num_hidden_layers", 1)) ** -0.5
    table = packed(config, factor)
    if not text.get("tie_word_embeddings", False):  # a head of unit size would be sure of everything
        table.append((re.compile(r"embed_tokens\.weight$"), unit))
    table.append((re.compile(rf"{ADDED}(\.weight)?$"), small(factor)))
    fields = Fields(config, "random weights")
    if fields.has("draft_vocab_size"):
        draft, vocab = fields.int("draft_vocab_size"), fields.int("vocab_size")

        def d2t(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
            """Offsets: target id = draft id + offset. Distinct and in range because draft <= vocab."""
            ids = torch.arange(draft, device=generator.device, dtype=torch.int64)
            return (ids * vocab // draft - ids).to(dtype)

        def t2d(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
            ids = torch.arange(draft, device=generator.device, dtype=torch.int64) * vocab // draft
            return torch.zeros(vocab, device=generator.device, dtype=dtype).index_fill_(0, ids, 1)

        table += [(re.compile(r"(^|\.)d2t$"), d2t), (re.compile(r"(^|\.)t2d$"), t2d)]
    return table + [(re.compile("norm"), near_one), (re.compile("bias$"), near_zero), (re.compile(""), normal)]
