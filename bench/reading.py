"""Reads kept runs back, and says when two of them may not be compared. What cannot be read is refused by name."""

import json
from dataclasses import fields
from pathlib import Path

from weights.config import Refused

from .results import FORMAT, Figure, Workload

KEYS = ("command", "commit", "dirty", "when", "environment", "workload", "figures")
VARYING = {"load_average"}  # of the environment: not a setting
SETTINGS = ("target", "draft", "layers", "tp", "tp_slice", "context", "batch", "dtype", "routing", "prompts_hash")


def parsed(path: str) -> dict:
    """The JSON object in a file. Raises Refused."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"{path}: not JSON: {error.msg} at line {error.lineno}") from None
    if not isinstance(raw, dict):
        raise Refused(f"{path}: it holds a {type(raw).__name__}; supported: an object")
    return raw


def run_of(raw: dict, path: str) -> dict:
    """`raw` as a run that this version wrote. Raises Refused naming the key that says otherwise."""
    environment = raw.get("environment")
    version = environment.get("format", FORMAT) if isinstance(environment, dict) else None
    if version != FORMAT:
        raise Refused(f"{path}: results of format {version!r}; supported: {FORMAT}; measure again")
    wanted = [("", raw, KEYS), ("workload.", raw.get("workload"), [f.name for f in fields(Workload)])]
    figures = raw.get("figures") if isinstance(raw.get("figures"), list) else []
    wanted += [(f"figures[{i}].", figure, [f.name for f in fields(Figure)]) for i, figure in enumerate(figures)]
    for prefix, part, keys in wanted:
        found = set(part) if isinstance(part, dict) else set()
        odd = sorted(found ^ set(keys))
        if odd:
            word = "unknown" if odd[0] in found else "missing"
            raise Refused(f"{path}: key '{prefix}{odd[0]}' is {word}: results of another version; measure again")
    if not figures:
        raise Refused(f"{path}: it has no figures")
    return raw


def read(path: str) -> dict:
    """A kept run. Raises Refused."""
    return run_of(parsed(path), path)


def differences(a: dict, b: dict) -> list[str]:
    """What keeps two runs, {environment, workload}, from being compared: "key: a's value, b's value" each."""
    found = []
    for part in ("environment", "workload"):
        keys = (set(a[part]) | set(b[part])) - VARYING if part == "environment" else SETTINGS
        for key in sorted(keys):
            mine, theirs = a[part].get(key, "not set"), b[part].get(key, "not set")
            if mine != theirs:
                found.append(f"{key}: {mine}, {theirs}")
    return found


def comparable(run: dict, stored: dict, path: str) -> None:
    """Raises Refused where a stored run was made under other settings than `run`, saying which differ."""
    found = differences(run, stored)
    if found:
        raise Refused(f"--baseline {path}: not comparable; differing (this run, stored): {'; '.join(found)}")


def value(run: dict, name: str) -> float | None:
    """The value of one figure, None where it was not measured."""
    return next((figure["value"] for figure in run["figures"] if figure["name"] == name), None)
