"""Typed readings of config.json that refuse what they do not know: a key that changes the arithmetic is either
understood or named in a `Refused`, never skipped. Facts about the keys of published checkpoints come from their
authors' loaders."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

REQUIRED = object()  # default of a key that must be there
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Refused(ValueError):
    """A request, checkpoint or option that the engine will not serve. One line: what, where, which value, what is
    supported."""


def shown(value: object) -> str:
    """A value for an error message: one line, at most 100 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else text[:97] + "..."


@dataclass(frozen=True)
class Fields:
    """Typed reads of one JSON object; `where` names the file in errors and `path` the object inside it. null counts as
    absent."""

    raw: dict
    where: str
    path: str = ""

    def refuse(self, key: str, expected: str) -> Refused:
        return Refused(f"{self.where}: key '{self.path}{key}' is {shown(self.raw.get(key))}, expected {expected}")

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def _value(self, key: str, default: object, expected: str) -> object:
        if self.has(key):
            return self.raw[key]
        if default is REQUIRED:
            raise Refused(f"{self.where}: key '{self.path}{key}' is missing, expected {expected}")
        return default

    def int(self, key: str, default: object = REQUIRED, *, least: int = 1) -> int:
        """An integer of at least `least`. A default may be None."""
        expected = f"an integer of at least {least}"
        value = self._value(key, default, expected)
        if self.has(key) and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise self.refuse(key, expected)
        return value

    def float(self, key: str, default: object = REQUIRED) -> float:
        """A finite number above zero."""
        value = self._value(key, default, "a number above 0")
        if not self.has(key):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refuse(key, "a number above 0")
        return float(value)

    def bool(self, key: str, default: object = REQUIRED) -> bool:
        value = self._value(key, default, "true or false")
        if self.has(key) and not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def str(self, key: str, default: object = REQUIRED) -> str:
        value = self._value(key, default, "a string")
        if self.has(key) and not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def ints(self, key: str, default: object = REQUIRED) -> tuple[int, ...]:
        """A list of integers, or one integer."""
        value = self._value(key, default, "a list of integers")
        if not self.has(key):
            return value
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.refuse(key, "a list of integers")
        return tuple(values)

    def choice(self, key: str, allowed: Sequence, default: object = REQUIRED) -> object:
        """One of `allowed`; anything else is refused with the list."""
        expected = (
            "one of " + ", ".join(map(shown, allowed))
            if len(allowed) != 1
            else f"{shown(allowed[0])} (nothing else is supported)"
        )
        value = self._value(key, default, expected)
        if self.has(key) and not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            raise self.refuse(key, expected)
        return value

    def unless(self, meaning: str, **inert: object) -> None:
        """Refuses each key whose value is neither absent nor its inert one: it would change the arithmetic and is not
        supported."""
        for key, value in inert.items():
            if self.has(key) and self.raw[key] != value:
                raise self.refuse(key, f"{shown(value)} or no such key ({meaning} is not supported)")

    def sub(self, key: str) -> Fields:
        """The object under `key`, empty when absent."""
        value = self._value(key, {}, "an object")
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return Fields(value, self.where, f"{self.path}{key}.")

    def first(self, *keys: str) -> str:
        """Which of several names of one thing is used here (the first name when none is). Two that disagree are
        refused."""
        used = [k for k in keys if self.has(k)]
        for other in used[1:]:
            if self.raw[other] != self.raw[used[0]]:
                raise self.refuse(other, f"{shown(self.raw[used[0]])} as in key '{self.path}{used[0]}'")
        return used[0] if used else keys[0]

    def dtype(self) -> torch.dtype:
        """The dtype of the stored weights (key `torch_dtype` or `dtype`); bfloat16 when the file does not say."""
        name = self.choice(self.first("torch_dtype", "dtype"), tuple(DTYPES), "bfloat16")
        return DTYPES[name]


def architecture(fields: Fields, supported: Sequence[str]) -> str:
    """The one entry of `architectures`, refused unless in `supported`."""
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in supported:
        raise fields.refuse("architectures", f"one of [{', '.join(map(shown, supported))}]")
    return names[0]


def read_json(path: Path) -> dict:
    """One JSON object from a file. Refused: not readable, not JSON, not an object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: not readable as JSON ({shown(str(error))})") from None
    if not isinstance(raw, dict):
        raise Refused(f"{path}: holds {shown(raw)}, expected a JSON object")
    return raw


def named(name_or_path: str) -> dict:
    """Configs for random weights: {"target": config} or {"draft": config}, by name from weights/configs or from a JSON
    file. A file that is a plain config.json serves as whichever is asked for; the reader of that kind then judges
    it."""
    folder = Path(__file__).parent / "configs"
    known = {p.stem: p for p in folder.glob("*.json")}
    path = known.get(name_or_path) or Path(name_or_path)
    if not path.is_file():
        raise Refused(f"'{name_or_path}': neither a config file nor a known name ({', '.join(sorted(known))})")
    raw = read_json(path)
    return raw if {"target", "draft"} & raw.keys() else {"target": raw, "draft": raw}
