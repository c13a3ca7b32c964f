"""Which modules of a checkpoint its `quantization_config` covers, and where that object stands in config.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from weights.fields import Fields, Refused

WRAPPER = "language_model."  # prefix of a text model inside a larger one: lists of modules come with it and without
PROJECTION = re.compile(r"\.(self_attn|mlp|block_sparse_moe)\..*(_proj|_proj_with_mqa|\.w[123])$")  # a Linear, surely


def quantization(config: dict, where: str) -> Fields | None:
    """The object that says how weights are quantised, at the root of config.json or in its text model's part; None for
    plain weights. Refused: two that disagree."""
    fields = Fields(config, where)
    found = []
    for part in (fields, fields.sub("text_config")):
        for key in ("quantization_config", "compression_config"):
            if part.sub(key).raw:
                found.append(part.sub(key))
    for other in found[1:]:
        if other.raw != found[0].raw:
            raise Refused(
                f"{where}: keys '{found[0].path[:-1]}' and '{other.path[:-1]}' disagree; supported: one of them"
            )
    return found[0] if found else None


def compressed_match(entry: str, module: str) -> bool:
    """A target or exception of compressed-tensors: a whole name, or `re:` and a pattern from its beginning."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def converted_match(entry: str, module: str) -> bool:
    """An exception of transformers: a name or pattern from the beginning to a dot or the end, or the last parts of a
    name."""
    return re.match(rf"(?:{entry})(?=\.|$)", module) is not None or f".{module}".endswith(f".{entry}")


@dataclass(frozen=True)
class Modules:
    """The modules that `targets` name ("Linear": all that multiply by a matrix) and `ignore` does not."""

    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    match: Callable[[str, str], bool]

    def covers(self, module: str) -> bool:
        """Whether the weights of `module` (its name in the checkpoint) are quantised."""
        bare = module.removeprefix(WRAPPER)
        names = (bare, WRAPPER + bare)
        aimed = any(t == "Linear" or any(self.match(t, n) for n in names) for t in self.targets)
        return aimed and not any(self.match(entry, n) for entry in self.ignore for n in names)


def strings(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of strings, empty where the key is absent. Refused: anything else, a pattern that is none."""
    values = fields.raw.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.refuse(key, "a list of strings")
    for value in values:
        try:
            re.compile(value.removeprefix("re:"))
        except re.error:
            raise Refused(f"{fields.where}: key '{fields.path}{key}' holds {value!r}, which is no pattern") from None
    return tuple(values)
