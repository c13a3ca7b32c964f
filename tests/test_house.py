"""The house keeps its own rules: every file of the packages is parsed and checked, and each check is shown a file that
breaks it, so that none can rot into a check that passes whatever it reads."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "weights", "engine", "bench")
TOP = {"pyproject.toml", "README.md", "LICENSE", ".gitignore", ".ci", "csrc", "tests", *PACKAGES}

# A module may import its own room and any room on a lower floor. The longest name that fits counts; "engine" alone is
# engine/__init__.py, which only hands out names.
ROOMS = {
    "kernels": (0, "kernels"),
    "weights": (0, "weights"),
    **{f"engine.{m}": (1, "types") for m in ("shape", "tp", "slice", "batch", "cache", "buffers", "rules")},
    **{f"engine.{m}": (1, "types") for m in ("memory", "text", "kimi", "watch", "links", "device")},
    "engine.layers": (2, "layers"),
    "engine.targets": (3, "targets"),
    "engine.drafters": (3, "drafters"),
    "engine.cycle": (4, "cycle"),
    "engine.graph": (4, "cycle"),
    "engine.pieces": (4, "cycle"),
    **{f"engine.{m}": (5, "engine") for m in ("opening", "loading", "profile", "report", "logprobs", "request")},
    **{f"engine.{m}": (5, "engine") for m in ("score", "session", "engine", "forced", "wiring")},
    **{f"engine.{m}": (5, "engine") for m in ("plan", "sharing", "ranks", "asking")},
    **{f"engine.{m}": (5, "engine") for m in ("cost", "chooser", "measure", "auto", "programs")},
    "engine": (5, "engine"),
    **{f"engine.{m}": (6, "commands") for m in ("options", "prompts", "generate", "compare", "diagnose", "dump")},
    **{f"engine.{m}": (6, "commands") for m in ("train", "train_head", "lessons", "streams", "interrupt", "decoding")},
    "engine.launch": (6, "commands"),
    "weights.demo": (7, "demo"),
    "bench": (7, "bench"),
}
COMMANDS = ("commands", "demo", "bench")
# What a room may import from outside the standard library; rooms not named here may import anything.
OUTSIDE = {
    "kernels": {"torch", "triton", "flashinfer"},
    "weights": {"torch", "safetensors", "huggingface_hub"},
    "types": {"torch", "transformers", "tiktoken"},
    **dict.fromkeys(("layers", "targets", "drafters", "cycle"), {"torch"}),
}
ENGINE_FLOORS = range(5)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room(name: str) -> tuple[int, str] | None:
    """(floor, room) of a module or of a name inside one; None for what is not ours."""
    while name:
        if name in ROOMS:
            return ROOMS[name]
        name = name.rpartition(".")[0]
    return None


def imports(path: str, tree: ast.Module):
    """(node, absolute dotted name) of everything the file imports, relative imports resolved."""
    parts = module_name(path).split(".") + ([""] if path.endswith("__init__.py") else [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: -node.level]) if node.level else ""
            module = ".".join(p for p in (base, node.module) if p)
            for alias in node.names:
                yield node, f"{module}.{alias.name}"


def check_floors(path, tree, text):
    """An import points down or stays in its room; a lower floor knows torch and little else."""
    own, name = room(module_name(path)), module_name(path)
    if own == ROOMS["engine"] and name not in ROOMS:
        yield f"{path}: stands on no floor; give {name} a room in ROOMS"
        return
    for node, target in imports(path, tree):
        top, other = target.split(".")[0], room(target)
        if other is None and top not in sys.stdlib_module_names and top not in OUTSIDE.get(own[1], {top}):
            yield f"{path}:{node.lineno}: {own[1]} may not import {top}"
        if other is not None and other[1] != own[1] and other[0] >= own[0]:
            yield f"{path}:{node.lineno}: floor {own[0]} ({own[1]}) imports {target} on floor {other[0]} ({other[1]})"
        if own[1] == "cycle" and other is not None and other[1] in ("targets", "drafters"):
            yield f"{path}:{node.lineno}: the cycle knows the two protocols, not {target}"


def check_flashinfer(path, tree, text):
    """flashinfer is named in kernels/prefill.py only, inside the function that uses it."""
    if path == "kernels/prefill.py":
        nodes = [(n, t) for n, t in imports(path, tree) if n in tree.body]
    else:
        words = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        nodes = [*imports(path, tree), *((n, n.value) for n in words if re.fullmatch(r"[\w.]+", n.value))]
    for node, name in nodes:
        if name.split(".")[0] == "flashinfer":
            yield f"{path}:{node.lineno}: flashinfer"


def calls(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call)]


def check_no_host(path, tree, text):
    """No call on floors 0-4 of engine and kernels waits for the device."""
    floor, name = room(module_name(path))
    if name == "weights" or floor not in ENGINE_FLOORS:
        return
    for n in calls(tree):
        if isinstance(n.func, ast.Attribute) and n.func.attr in ("item", "tolist", "cpu") and not n.args:
            yield f"{path}:{n.lineno}: .{n.func.attr}() waits for the device"


def check_no_print(path, tree, text):
    """Only command lines print."""
    if room(module_name(path))[1] in COMMANDS:
        return
    for n in ast.walk(tree):
        if (
            isinstance(n, ast.Name)
            and n.id == "print"
            or isinstance(n, ast.Attribute)
            and n.attr in ("stdout", "stderr")
            and isinstance(n.value, ast.Name)
            and n.value.id == "sys"  # a finished process has them too
        ):
            yield f"{path}:{n.lineno}: prints"


def check_environment(path, tree, text):
    """engine/tp.py alone reads the environment."""
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv", "putenv") and path != "engine/tp.py":
            yield f"{path}:{n.lineno}: reads the environment"


MUTATORS = {"append", "extend", "insert", "pop", "clear", "update", "setdefault", "add", "remove", "discard", "popitem"}


def check_globals(path, tree, text):
    """A module holds functions, classes and CONSTANTS; no function changes a constant."""
    constants = set()
    for n in tree.body:
        targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AnnAssign) else []
        targets = [part for target in targets for part in getattr(target, "elts", [target])]
        for target in targets:
            name = target.id if isinstance(target, ast.Name) else ""
            if re.fullmatch(r"_?[A-Z][A-Za-z0-9_]*|__\w+__", name):
                constants.add(name)
            else:
                yield f"{path}:{n.lineno}: module-level variable"
    for n in ast.walk(tree):
        if isinstance(n, ast.Global):
            yield f"{path}:{n.lineno}: global"
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in MUTATORS:
            changed = n.func.value
        elif isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store | ast.Del):
            changed = n.value
        else:
            continue
        if isinstance(changed, ast.Name) and changed.id in constants:
            yield f"{path}:{n.lineno}: changes the constant {changed.id}"


def check_finished(path, tree, text):
    """Nothing is left half done, and no name comes from a star."""
    for at, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError|^\s*from \S+ import \*", line):
            yield f"{path}:{at}: {line.strip()}"


def check_opening(path, tree, text):
    """A file opens with what it is."""
    if tree.body and not ast.get_docstring(tree):
        yield f"{path}: no docstring"


CHECKS = {
    check_floors: [
        ("kernels/norm.py", "from weights.source import Source"),
        ("weights/source.py", "import kernels"),
        ("kernels/norm.py", "import numpy"),
        ("weights/source.py", "import transformers"),
        ("engine/shape.py", "from .layers import norm"),
        ("engine/layers/norm.py", "from ..targets.qwen3_moe import Target"),
        ("engine/layers/norm.py", "def f():\n    from engine import cycle"),
        ("engine/targets/qwen3_moe.py", "from ..drafters.eagle3 import Eagle3"),
        ("engine/drafters/eagle3.py", "from engine.targets import TARGETS"),
        ("engine/drafters/__init__.py", "from .. import targets"),
        ("engine/cycle.py", "from .engine import Engine"),
        ("engine/cycle.py", "from .targets.qwen3_moe import Qwen3Moe"),
        ("engine/graph.py", "from engine import Engine"),
        ("engine/engine.py", "from . import generate"),
        ("engine/generate.py", "import bench.verify"),
        ("engine/somewhere.py", "import torch"),
    ],
    check_flashinfer: [
        ("kernels/prefill.py", "import flashinfer"),
        ("kernels/prefill.py", "from flashinfer import mla"),
        ("kernels/attention.py", "def f():\n    import flashinfer.mla"),
        ("kernels/attention.py", "def f():\n    importlib.import_module('flashinfer.mla')"),
    ],
    check_no_host: [
        ("kernels/norm.py", "def f(x):\n    return x.item()"),
        ("engine/cycle.py", "def f(x):\n    return x.sum().tolist()"),
        ("engine/layers/moe.py", "def f(x):\n    return x.cpu()"),
        ("engine/graph.py", "x = y.item()"),
    ],
    check_no_print: [
        ("engine/engine.py", "def f():\n    print(1)"),
        ("kernels/norm.py", "import sys\nsys.stderr.write('x')"),
    ],
    check_environment: [
        ("engine/engine.py", "import os\nos.environ['X']"),
        ("bench/verify.py", "import os\nos.getenv('X')"),
    ],
    check_globals: [
        ("engine/engine.py", "cache = {}"),
        ("engine/engine.py", "cache: dict = dict()"),
        ("engine/engine.py", "a, b = [], []"),
        ("engine/engine.py", "def f():\n    global x\n    x = 1"),
        ("engine/engine.py", "ROWS = {}\ndef f():\n    ROWS['a'] = 1"),
        ("engine/engine.py", "ROWS = []\ndef f():\n    ROWS.append(1)"),
    ],
    check_finished: [
        ("engine/engine.py", "x = 1  # TODO later"),
        ("engine/engine.py", "def f():\n    raise NotImplementedError"),
        ("engine/engine.py", "from .shape import *"),
    ],
    check_opening: [("engine/engine.py", "import torch")],
}
INNOCENT = [
    ("kernels/prefill.py", '"""P."""\nimport torch\n\ndef f():\n    import flashinfer\n    return flashinfer'),
    ("kernels/__init__.py", '"""K."""\nfrom . import norm\nfrom .tree import grow\nROWS = {"a": norm}'),
    (
        "engine/__init__.py",
        '"""E."""\nfrom .engine import Engine\nfrom .shape import Shape\n__all__ = ["Engine", "Shape"]',
    ),
    ("engine/targets/__init__.py", '"""T."""\nfrom .qwen3_moe import Target\nfrom ..layers import norm'),
    ("engine/layers/norm.py", '"""N."""\nEPS, KINDS = 1e-6, ("a", "b")'),
    ("engine/tp.py", '"""TP."""\nimport os\nRANK = os.environ.get("RANK")'),
    (
        "engine/generate.py",
        '"""G."""\nfrom .engine import Engine\nfrom weights.config import Refused\nprint(Engine, Refused)',
    ),
    ("weights/source.py", '"""S."""\nimport json\nimport torch\n\ndef f(x):\n    return x.cpu()'),
    (
        "engine/engine.py",
        '"""E."""\nimport numpy\nfrom .targets.qwen3_moe import T\n\ndef f(x):\n    return x.tolist()',
    ),
]


def sources():
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house(check):
    assert [line for path, text in sources() for line in check(path, ast.parse(text), text)] == []


@pytest.mark.parametrize(
    "check, path, text",
    [(check, *snippet) for check, snippets in CHECKS.items() for snippet in snippets],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_check_finds_its_fault(check, path, text):
    assert list(check(path, ast.parse(text), text))


@pytest.mark.parametrize("path, text", INNOCENT)
def test_no_check_cries_wolf(path, text):
    assert [line for check in CHECKS for line in check(path, ast.parse(text), text)] == []


def test_top_level_is_frozen():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {name.split("/")[0] for name in listed.stdout.splitlines()} - TOP == set()


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {Path(path).parent.as_posix().replace("/", ".") for path, _ in sources()} - {"weights.demo"}
    assert found <= set(project["packages"])


def test_readme_commands_are_the_ones_that_ci_runs():
    """.ci/run takes the two commands from the README by how they begin: both are there once, each on one line."""
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv .venv")]
    assert ["engine.generate" in lines[0], "pytest" in lines[1], len(lines)] == [True, True, 2]
