"""Which boundaries of the target feed a head. B_k is the residual stream after k layers (B_0 the embedding, B_L before
the final norm); configs name either boundaries or layers whose output is meant, under one key, and this file is the
only place that knows. Heads without fusion read the one named feature `final`, norm(B_L)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weights.config import Eagle3Config
from weights.fields import Refused, shown

FINAL = "final"  # stands among boundaries, after them: the residual stream after the last layer and the final norm
SYNTAX = "boundary:2,24,45 or output:1,23,44"


@dataclass(frozen=True)
class Capture:
    """`boundaries` ascending, in the order in which their features are joined, FINAL last; `source` "config",
    "override", "guessed", or "measured" where a head was asked (engine.wiring)."""

    boundaries: tuple[int | str, ...]
    source: str
    why: str  # one sentence


def boundaries(config: Eagle3Config | None, layers: int, override: str | None = None) -> Capture:
    """Reads the config's layer ids for a target of `layers` layers; `override` ("boundary:…" | "output:…") comes
    before them, and stands alone where there is no head yet (config None). Refused: ids out of range, twice, or not as
    many as the head fuses."""
    if config is not None and config.fusion == "final":
        if override is not None:
            raise Refused(f"option --capture-layers {shown(override)}: this head reads the target's final hidden only")
        return Capture((FINAL,), "config", "the config says 'use_aux_hidden_state': false")
    if override is not None:
        return Capture(_overridden(config, layers, override), "override", f"option --capture-layers {override}")
    shift, source, why = _reading(config, layers)
    ids = usual(layers) if config.aux_ids is None else config.aux_ids
    origin = "the default layers" if config.aux_ids is None else "key 'eagle_aux_hidden_state_layer_ids'"
    return Capture(_checked([i + shift for i in ids], ids, config.aux_count, layers, origin), source, why)


def usual(layers: int) -> tuple[int, ...]:
    """The three boundaries that every trainer and engine means when nothing is said."""
    return 2, layers // 2, layers - 3


def _reading(config: Eagle3Config, layers: int) -> tuple[int, str, str]:
    """The table of conventions: (what to add to an id to get a boundary, source, why)."""
    ids = config.aux_ids
    if ids is None:
        return 0, "guessed", "the config names no layers: the usual low, middle and high boundary are taken"
    low, high = min(ids), max(ids)
    if config.family == "speculators":
        return 0, "config", "the speculators format names boundaries"
    if high == layers:
        return 0, "config", f"the ids name boundaries: {high} is the number of layers, and no layer has that number"
    if low == 1:
        # vLLM itself would take B_1 of its own architectures, which no trainer means
        source = "guessed" if config.family == "vllm" else "config"
        return 1, source, "the ids name layer outputs: they start with 1"
    if tuple(sorted(ids)) == usual(layers):
        return 0, "guessed", "the ids equal the usual boundaries, but may name layer outputs; read as boundaries"
    if config.family == "vllm":
        return 0, "config", "vLLM's own architectures name boundaries"
    return 1, "guessed", "the ids may name layer outputs or boundaries; read as outputs, as their trainers write them"


def readings(config: Eagle3Config, layers: int, capture: Capture) -> list[tuple[str, tuple[int | str, ...]]]:
    """What a head for a target of `layers` layers may have been trained on, by what went wrong if it was: (name,
    boundaries in the order in which the head joins them). The one in force, `capture`, comes first; equal ones are
    one entry with both names."""
    force, found = capture.boundaries, {}
    if FINAL in force:
        named = [("before the final norm", (layers,)), ("one layer lower", (layers - 1,))]
    else:
        named = _readings(config, layers, force)
    for name, order in [("in force", force), *named]:
        known = [i for i in order if i == FINAL or 0 <= i <= layers]
        if len(set(known)) == len(force):
            found[order] = f"{found[order]} = {name}" if order in found else name
    return [(name, order) for order, name in found.items()]


def _readings(config: Eagle3Config, layers: int, force: tuple[int, ...]):
    """(name, boundaries) beside the one in force; some may be out of range."""
    if (ids := config.aux_ids) is not None:
        yield "ids are boundaries", tuple(sorted(ids))
        yield "ids are layer outputs", tuple(sorted(i + 1 for i in ids))
    yield "one layer lower", tuple(i - 1 for i in force)
    yield "one layer higher", tuple(i + 1 for i in force)
    if len(force) == 3:
        yield "default layers", usual(layers)
    yield "embedding in place of the lowest", (0, *force[1:])
    yield "embedding first, the highest left out", (0, *force[:-1])
    yield "order reversed", force[::-1]
    if ids is not None and list(ids) != sorted(ids):
        yield "order as written", tuple(sorted(force)[sorted(ids).index(i)] for i in ids)


def _overridden(config: Eagle3Config | None, layers: int, override: str) -> tuple[int, ...]:
    origin = f"option --capture-layers {shown(override)}"
    match = re.fullmatch(r"(boundary|output):(\d+(?:,\d+)*)", override)
    if not match:
        raise Refused(f"{origin}: expected {SYNTAX}")
    ids = [int(i) for i in match[2].split(",")]
    count = len(ids) if config is None else config.aux_count
    return _checked([i + (match[1] == "output") for i in ids], ids, count, layers, origin)


def _checked(
    values: list[int], ids: list[int] | tuple[int, ...], count: int, layers: int, origin: str
) -> tuple[int, ...]:
    """`values` are the boundaries that `ids` stand for, in the same order."""
    if len(ids) != count:
        raise Refused(
            f"{origin}: names {len(ids)} layers {list(ids)}, the head fuses {count}; give {count} as {SYNTAX}"
        )
    if wrong := [i for i, value in zip(ids, values, strict=True) if not 0 <= value <= layers or i < 0]:
        raise Refused(f"{origin}: {wrong[0]} in {list(ids)} is outside the target's {layers} layers")
    if len(set(values)) != len(values):
        raise Refused(
            f"{origin}: {list(ids)} names a layer twice; give {count} different ones with --capture-layers {SYNTAX}"
        )
    return tuple(sorted(values))
