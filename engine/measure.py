"""What cycles cost on this machine: measured by their own stamps when a shape is to choose itself, and kept in the
user's cache directory for the next start of the same pair on the same machine with the same code."""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from .chooser import Fixed
from .cost import CostTable, json_of, table_of
from .cycle import CATCH_UP
from .profile import Profile
from .report import environment
from .request import Sampling
from .shape import PLAIN

ROUNDS, CYCLES, SKIPPED = 2, 12, 2  # rounds over all shapes, cycles in each, the first of them left out
PASSES = 10  # catch-ups timed
ROWS = 48  # tokens of the prompt
TEXT = (
    "The committee met on Tuesday to discuss the plans for the new bridge. Its chair, who had worked on three others, "
    "said that the river was wider than the maps showed. def load(path): return json.loads(open(path).read())"
)
ROOT = Path(__file__).parents[1]


def table(engine, shapes, batch):
    """The cost table of `shapes` at `batch` requests, and where it came from, in words. Ranks agree on the numbers."""
    own = engine.auto.named and engine.auto.named() is engine.drafter  # nobody can name a drafter of one's own
    file, key = (_file(engine, batch), _key(engine, shapes, batch)) if own else (None, None)
    word = engine.parts.tp.word  # one rank reads and writes for all
    found = word(lambda: file and read(file, key))
    if found is not None:
        return found, f"read from {file}"
    began = time.perf_counter()
    found = measured(engine, shapes, batch)
    words = f"measured in {time.perf_counter() - began:.1f} s"
    return found, f"{words}, {word(lambda: keep(file, key, found))}" if file else words


def measured(engine, shapes, batch):
    """A CostTable of this moment: every shape in turn, twice over."""
    stages, drafting = {}, [shape for shape in shapes if shape != PLAIN]
    for turn in range(ROUNDS):
        for shape in (PLAIN, *drafting) if turn % 2 == 0 else (*reversed(drafting), PLAIN):
            own = stages.setdefault(shape, {})
            for name, values in _cycles(engine, shape, drafting, batch).items():
                own.setdefault(name, []).extend(values[SKIPPED:] or values)
    engine.programs.drop_stamped()
    rows = sorted({shape.draft_tokens for shape in drafting})
    verify = [median(x for s in drafting if s.draft_tokens == n for x in stages[s]["verify"]) for n in rows]
    whole = [median(stages[s]["cycle"]) + median(stages[s]["gap"] or [0.0]) for s in (PLAIN, *drafting)]
    passes = [_catch_up(engine, batch, width) for width in CATCH_UP]
    numbers = iter(_most(engine, [*verify, *whole, *passes]))
    verify, plain = {n: next(numbers) for n in rows}, next(numbers)
    rest = {s: max(0.0, next(numbers) - verify[s.draft_tokens]) for s in drafting}
    return CostTable(plain, verify, rest, shapes=tuple(drafting), catch_up={w: next(numbers) for w in CATCH_UP})


def _most(engine, numbers):
    """The greatest of all ranks, number by number: a cycle ends when its slowest rank does."""
    return [max(each) for each in zip(*engine.parts.tp.every(numbers), strict=True)]


def _cycles(engine, shape, drafting, batch):
    """{stage: [ms]} of some cycles of one shape, as they run when others may follow them."""
    room = engine.pool.size * engine.options.page_size // batch
    most = max(2, min(CYCLES * shape.path + 1, room - ROWS - 2 * engine.options.reserve))
    sampling, profile = Sampling(max_new_tokens=most, ignore_eos=True), Profile()
    events = engine.run([_prompt(engine)] * batch, [sampling] * batch, Fixed(shape, drafting), profile=profile)
    with contextlib.closing(events):
        for _ in events:
            if len(profile.rows) >= CYCLES:
                break
    return profile.series()


def _prompt(engine):
    """Token ids of a text, random ones without a tokenizer; short enough to leave room."""
    parts = engine.parts
    most = max(1, min(ROWS, parts.max_context // 3))
    if parts.text is not None:
        return parts.text.encode(TEXT)[:most]
    draw = random.Random(0)
    return [draw.randrange(parts.target.head.vocabulary) for _ in range(most)]


def _catch_up(engine, batch, width):
    """Median ms of a catch-up's pass; all its rows are padding, which costs what others cost."""
    program, device = engine.programs.catch_up(batch, engine.drafter, width), engine.parts.device
    times = []
    for _ in range(PASSES + SKIPPED):
        _wait(device)
        began = time.perf_counter()
        engine.graphs.run(program, batch, "catch-up", program.stages)
        _wait(device)
        times.append((time.perf_counter() - began) * 1e3)
    return median(times[SKIPPED:])


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def folder():
    """Where tables are kept. Raises RuntimeError where the user has no home."""
    return Path.home() / ".cache" / "eagle3-engine"


def _file(engine, batch):
    """The file of this pair at this batch size on this kind of device, None where there is nowhere to keep it."""
    o, parts = engine.options, engine.parts
    name = [o.target, o.random, o.layers, o.draft, batch, parts.device.type, str(parts.dtype), parts.tp.size]
    try:
        return folder() / f"costs-{hashlib.sha256(json.dumps(name).encode()).hexdigest()[:16]}.json"
    except RuntimeError:
        return None


def _key(engine, shapes, batch):
    """Everything that a table depends on, as JSON has it: what differs makes it stale."""
    parts = engine.parts
    ops = [getattr(parts.ops, f.name) for f in dataclasses.fields(parts.ops)]
    config = [repr(getattr(model, "config", None)) for model in (parts.target, parts.drafter)]
    return environment(parts) | {
        "pair": [engine.options.target, engine.options.random, engine.options.layers, engine.options.draft],
        "config": hashlib.sha256(repr(config).encode()).hexdigest(),
        "code": _code(),
        "ops": hashlib.sha256(repr([getattr(f, "__qualname__", str(type(f))) for f in ops]).encode()).hexdigest(),
        "graphs": engine.graphs.reason,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads() if parts.device.type == "cpu" else None,
        "cores": len(os.sched_getaffinity(0)) if parts.device.type == "cpu" else None,
        "columns": engine.programs.columns,
        "page_size": engine.options.page_size,
        "batch": batch,
        "shapes": list(map(str, shapes)),
    }


def _code():
    """Digest of the engine's and the kernels' own source."""
    digest = hashlib.sha256()
    for part in ("engine", "kernels", "csrc"):
        for path in sorted((ROOT / part).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def read(file, key):
    """The table kept in `file` under this key; None where there is none, it is stale, or it cannot be read."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return table_of(kept["table"], str(file)) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(file, key, found):
    """Write the table, whole or not at all; says where it is, or why it is nowhere."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(part, "w", encoding="utf-8") as out:
            json.dump({"key": key, "table": json_of(found)}, out, indent=1)
        os.replace(name, file)
    except OSError as error:
        return f"not kept: {file.parent}: {error.strerror}"
    return f"kept in {file}"
