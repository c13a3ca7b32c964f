"""What cycles cost on this machine, host and all, stages by stamps: measured when a shape is to choose itself, and
kept in the cache directory of the user for the next start of the same pair on the same machine with the same code."""

import contextlib
import dataclasses
import hashlib
import json
import math
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

ROUNDS, CYCLES, SKIPPED = 3, 8, 2  # rounds over all shapes, cycles in each at least, the first of them left out
ENOUGH, MOST = 20.0, 56  # ms of plain decoding in a round, where MOST cycles last as long
PASSES = 10  # catch-ups in a row
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
    """A CostTable of this moment."""
    costs = Costs(engine, shapes, batch)
    for _ in range(ROUNDS):
        costs.turn()
    return costs.table()


class Costs:
    """What cycles of some shapes cost, measured turn by turn, so that what else happens beside them shows in both.

    prompt: token ids, None for a short text. mixed: plain cycles are those of a session in which any shape may come
    next, which keep what the drafter has yet to see; else those of plain decoding alone.
    """

    def __init__(self, engine, shapes, batch, prompt=None, mixed=True):
        self.drafting = [shape for shape in shapes if shape != PLAIN]
        self.engine, self.batch, self.prompt = engine, batch, prompt or _prompt(engine)
        self.others, self.whole = self.drafting if mixed else (), {shape: [] for shape in (PLAIN, *self.drafting)}
        began = self._whole(PLAIN, CYCLES)
        self.cycles = engine.parts.tp.word(lambda: max(CYCLES, min(MOST, math.ceil(ENOUGH / began))))

    def turn(self):
        """Whole cycles of every shape; every other turn goes backwards."""
        back = len(self.whole[PLAIN]) % 2
        for shape in reversed(self.whole) if back else self.whole:
            self.whole[shape].append(self._whole(shape, self.cycles))

    def table(self):
        """The CostTable, once stamps have said how a cycle of each shape splits. Ranks agree on it."""
        parts = []
        for shape in self.drafting:
            series = self._stamped(shape)
            parts += [median(series[name][SKIPPED:] or series[name]) for name in ("draft", "verify")]
        self.engine.programs.drop_stamped()
        passes = [_catch_up(self.engine, self.batch, width) for width in CATCH_UP]
        numbers = iter(_most(self.engine, [*map(median, self.whole.values()), *parts, *passes]))
        whole = {shape: next(numbers) for shape in self.whole}
        stages = {shape: {"draft": [next(numbers)], "verify": [next(numbers)]} for shape in self.drafting}
        return CostTable.of_stages(stages, whole, catch_up={width: next(numbers) for width in CATCH_UP})

    def _run(self, shape, profile=None):
        """The events of MOST cycles of one shape, or of as many as there is room for."""
        engine, batch, prompt = self.engine, self.batch, self.prompt
        room = engine.pool.size * engine.options.page_size // batch
        most = max(2, min(MOST * shape.path + 1, room - len(prompt) - 2 * engine.options.reserve))
        sampling = Sampling(max_new_tokens=most, ignore_eos=True)
        return engine.run([prompt] * batch, [sampling] * batch, Fixed(shape, self.others), profile=profile)

    def _whole(self, shape, cycles):
        """ms from one cycle's tokens to the next one's as the host sees them: the device's time, gaps between cycles,
        and whatever of the host's own work is not hidden behind it."""
        times = []
        with contextlib.closing(self._run(shape)) as events:
            for event in events:
                if event.request.index == 0:
                    times.append(time.perf_counter())
                if len(times) > cycles:
                    break
        first = min(SKIPPED, len(times) - 2)
        return (times[-1] - times[first]) * 1e3 / (len(times) - 1 - first)

    def _stamped(self, shape):
        """{stage: [ms]} of some cycles of one shape by their own stamps."""
        profile = Profile()
        with contextlib.closing(self._run(shape, profile)) as events:
            for _ in events:
                if len(profile.rows) >= SKIPPED + CYCLES:
                    break
        return profile.series()


def _most(engine, numbers):
    """The greatest of all ranks, number by number: a cycle ends when its slowest rank does."""
    return [max(each) for each in zip(*engine.parts.tp.every(numbers), strict=True)]


def _prompt(engine):
    """Token ids of a text, random ones without a tokenizer; short enough to leave room."""
    parts = engine.parts
    most = max(1, min(ROWS, parts.max_context // 3))
    if parts.text is not None:
        return parts.text.encode(TEXT)[:most]
    draw = random.Random(0)
    return [draw.randrange(parts.target.head.vocabulary) for _ in range(most)]


def _catch_up(engine, batch, width):
    """ms of a catch-up's pass between others; all its rows are padding, which costs what others cost."""
    programs, device, times = engine.programs, engine.parts.device, []
    program = programs.catch_up(batch, engine.drafter, width, programs.widths[0])
    for _ in range(1 + ROUNDS):
        _wait(device)
        began = time.perf_counter()
        for _ in range(PASSES):
            engine.graphs.run(program, batch, "catch-up", program.stages)
        _wait(device)
        times.append((time.perf_counter() - began) * 1e3 / PASSES)
    return median(times[1:])


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
