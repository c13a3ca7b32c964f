"""How random weights look: one rule a kind of tensor, found by name. Values keep activations near unit size, so that a
random model neither overflows nor goes flat."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from weights.fields import Fields

Rule = Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal(0, fan_in^-0.5); fan_in is the last dimension of [out, in]."""
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator).mul_(shape[-1] ** -0.5)


def near_one(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return near_zero(shape, dtype, generator).add_(1)


def near_zero(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator).mul_(0.02)


def rules(config: dict) -> list[tuple[re.Pattern, Rule]]:
    """Name pattern -> rule, the first that matches counts. A config with a draft vocabulary gets id tables that spread
    it evenly over the target's vocabulary."""
    table: list[tuple[re.Pattern, Rule]] = []
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
