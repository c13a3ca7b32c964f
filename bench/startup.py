"""`python -m bench.startup`: how fast ranks start. A checkpoint of an architecture's shapes is written to a folder
(on a RAM disk, say), read by every rank, and the default shapes are captured for every page table. It starts twice: the
second start finds warm compile caches."""

import argparse
import json
import shutil
import sys
from pathlib import Path

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from engine import Engine, spawn
from engine.engine import DEFAULT_SHAPE
from engine.loading import Options
from engine.opening import open_target
from engine.options import Parser, capture_option, least
from engine.plan import Plan
from engine.shape import PLAIN, Shape
from engine.tp import TP
from kernels import REFERENCE
from weights.config import Refused

from . import command, results
from .results import Figure, Workload

SHARD = 4 << 30  # bytes, about
SHAPES = (PLAIN, Shape(1, 1, 2), DEFAULT_SHAPE, Shape(4, 4, 16))  # captured


def parser() -> Parser:
    """Options."""
    p = Parser("python -m bench.startup", __doc__)
    add = p.add_argument
    add("--random", default="qwen3-30b-a3b", metavar="NAME|FILE", help="the architecture; default %(default)s")
    add(
        "--draft",
        default="random:qwen3-30b-a3b-eagle3",
        metavar="random:NAME|none",
        help="its head, random weights; default %(default)s",
    )
    add("--layers", type=least(1), metavar="N", help="so many layers only")
    capture_option(add)
    add("--folder", default="/dev/shm", metavar="DIR", help="a checkpoint is written below it; default %(default)s")
    add("--starts", type=least(1), default=2, metavar="N", help="the last one's figures count; default %(default)s")
    command.parallel_options(add, sliced=False)
    command.device_options(add)
    p.set_defaults(tp=2)
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    o = command.options(parser(), argv)
    if not Path(o.folder).is_dir():
        raise Refused(f"--folder {o.folder}: no such directory")
    o.draft = None if o.draft == "none" else o.draft
    results.writable(o.json)
    return o


def write(o, folder: Path) -> int:
    """A checkpoint of the architecture's shapes, bf16, its numbers small and of no meaning; returns its bytes."""
    opened = open_target(Options(random=o.random, layers=o.layers))
    plan = Plan(opened, None, None, 2, REFERENCE, TP(), torch.bfloat16)
    plan.build("meta")  # the checkpoint learns its names
    checkpoint, drawn, shard, total, place = opened.checkpoint, {}, {}, 0, {}
    need, free = sum(map(checkpoint.nbytes, checkpoint.names())), shutil.disk_usage(folder).free
    if need > free:
        fit = f"{need / 1e9:.1f} GB of weights, {free / 1e9:.1f} are free there"
        raise Refused(f"--folder {o.folder}: {fit}; supported: fewer --layers, or another folder")

    def flush():
        if shard:
            name = f"model-{len(set(place.values())) + 1:05d}-of-99999.safetensors"
            save_file(shard, folder / name)
            place.update(dict.fromkeys(shard, name))
            shard.clear()

    for name in tqdm(checkpoint.names(), desc="written", unit="", disable=None, leave=False):
        shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        if (shape, dtype) not in drawn:
            drawn[shape, dtype] = (torch.rand(shape) * 0.02).to(dtype)
        shard[name] = drawn[shape, dtype].clone()
        total += shard[name].nbytes
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            flush()
    flush()
    (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def loaded(o, folder: str) -> dict:
    """On a rank: what its load took."""
    given = {name: getattr(o, name) for name in ("device", "graphs", "capture_layers")}
    how = {"dtype": o.dtype or "bfloat16", "max_batch": 1, "max_context": 1024}
    engine = Engine.load(folder, o.draft, **given, **how, **command.parallel(o))
    shapes = SHAPES if engine.drafter is not None else (PLAIN,)
    for shape in shapes:
        engine.prepare(shape)
    parts = engine.parts
    found = results.environment(parts.device, parts.dtype, parts.tp.size)
    nbytes = parts.reports[0].nbytes  # the target's: the draft's are drawn, not read
    tables = ", ".join(str(columns * parts.cache.page_size) for columns in engine.programs.widths)
    programs = f"{', '.join(map(str, shapes))} for page tables of {tables} positions each"
    spent = {"load": parts.load_ms, "capture": engine.graphs.capture_ms}
    return spent | {"bytes": nbytes, "programs": programs, "environment": found}


def run(o, typed: str) -> list[Figure]:
    """Write, load, capture; the checkpoint is removed again."""
    folder = Path(o.folder) / f"startup-{Path(o.random).stem}"
    if folder.exists():
        raise Refused(f"{folder}: it is there already; supported: another --folder, or remove it")
    folder.mkdir()
    try:
        total = write(o, folder)
        starts = [spawn(loaded, o.tp, o, str(folder)) for _ in range(o.starts)]
    finally:
        shutil.rmtree(folder)
    ranks = starts[-1]
    held = ", ".join(f"{rank['bytes'] / 1e9:.2f}" for rank in ranks)
    share = f"of {total / 1e9:.2f} GB; {held} GB a rank"
    rates = [rank["bytes"] / rank["load"] / 1e6 for rank in ranks]
    slowest = [{what: max(rank[what] for rank in start) for what in ("load", "capture")} for start in starts]
    figures = [
        Figure.of("load", "ms", slowest[-1]["load"], note=f"the slowest rank, {share}"),
        Figure.of("read", "GB/s", min(rates), note="the slowest rank: its bytes / all of its load"),
        Figure.of("capture", "ms", slowest[-1]["capture"], note=f"{ranks[0]['programs']}, start {o.starts}"),
    ]
    if o.starts > 1:
        note = "the first start, which also compiles what is in no cache"
        figures += [Figure.of(f"first.{what}", "ms", slowest[0][what], note=note) for what in ("load", "capture")]
    if o.json:
        config = json.dumps([o.random, o.layers])
        load = Workload(
            o.random, o.draft, o.layers or 0, o.tp, None, 1024, 1, o.dtype or "bfloat16", "nothing is decoded", config
        )
        results.write(o.json, results.document(typed, ranks[0]["environment"], load, figures))
    return figures


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.startup", parse, run, argv, ranks=False)
