"""The README's commands are ones that there are: each line of its blocks is parsed by the command it names."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
START = re.compile(r"(?:[A-Z_]+=\S+ )*python -m (engine|bench)\.(\w+) ?(.*)")


def commands():
    """(module, words) of every line in a block that runs one of ours; what ends in "…" is left open."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [START.match(line) for line in lines if not line.endswith("…")]
    return [(f"{m[1]}.{m[2]}", shlex.split(m[3], comments=True)) for m in found if m]


@pytest.mark.parametrize("name, words", commands(), ids=lambda x: x if isinstance(x, str) else " ".join(x)[:60])
def test_commands(name, words):
    """Mutants: an option that was renamed; a choice that went."""
    module = importlib.import_module("engine.options" if name == "engine.generate" else name)
    assert module.parse(words)


def test_there_are_commands():
    names = {name for name, _ in commands()}
    assert {"bench.collectives", "bench.startup", "bench.sweep", "engine.dump", "engine.generate"} <= names
