"""`python -m bench.ops`: every operation of kernels.Ops at the sizes of a named model: time, bytes, share of bandwidth.

Arguments are those of real cycles: each field is called again with what a cycle gave it, one layer's weights after the
other's so that the L2 is cold. On a GPU the fused table beside the reference, on the CPU the reference alone.
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from engine import Engine, Sampling, Shape
from engine.options import DEMO, Parser, capture_option, least
from engine.profile import Profile
from engine.shape import PLAIN
from engine.watch import tensors as tensors_below
from kernels import FUSED, REFERENCE, Ops, native
from weights.config import Refused

from . import bandwidth, command, results, stages
from .oracle import random_prompt
from .recorder import Call, Recorder, tensors
from .results import Figure

MODEL, DRAFT, LAYERS = "qwen3-30b-a3b", "random:qwen3-30b-a3b-eagle3", 8
L2 = 50 << 20  # bytes; a group that reads less than this a turn may find its weights there
RANKS = 8  # whose rows `total` adds up here


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.ops", __doc__)
    add = p.add_argument
    add("--random", metavar="NAME|FILE", help=f"the target's sizes; default {MODEL} on CUDA, the demo pair on the CPU")
    add(
        "--draft", metavar="random:NAME|none", help=f"a head of random weights; default {DRAFT} with {MODEL}, else none"
    )
    add("--layers", type=least(1), metavar="N", help=f"of the target, to take turns over; default {LAYERS}")
    capture_option(add)
    add("--small", action="store_true", help="the demo pair's sizes, on a GPU too")
    add(
        "--shapes", nargs="+", default=["0-1-1", "3-1-4", "4-4-16"], metavar="S-K-D", help="default: 0-1-1 3-1-4 4-4-16"
    )
    add("--context", type=least(2), default=512, metavar="N", help="committed positions; default %(default)s")
    add("--repeats", type=least(1), default=20, metavar="N", help="turns over all layers; default %(default)s")
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--dtype", metavar="float32|float16|bfloat16", help="default: bfloat16 on CUDA, float32 on the CPU")
    add("--json", metavar="FILE", help="write the run there, as JSON")
    o = p.parse_args(argv)
    o.shapes = [Shape.parse(text) for text in o.shapes]
    if o.small and (o.random or o.draft or o.layers):
        raise Refused("--small: the demo pair has its own sizes; supported: without --random, --draft and --layers")
    results.writable(o.json)
    return o


def load(o) -> tuple[Engine, Recorder]:
    """The pair on a table that notes calls."""
    cuda = torch.cuda.is_available() if o.device is None else o.device.startswith("cuda")
    o.target = None
    if o.small or (o.random is None and not cuda):
        o.target, o.draft = str(DEMO / "target"), str(DEMO / "draft")
    elif o.random is None:
        o.random, o.draft, o.layers = MODEL, o.draft or DRAFT, o.layers or LAYERS
    elif o.layers is None:
        o.layers = LAYERS
    recorder = Recorder(FUSED if cuda else REFERENCE)
    given = {name: getattr(o, name) for name in ("random", "layers", "device", "dtype", "capture_layers")}
    most = o.context + 128
    engine = Engine.load(
        o.target, o.draft, graphs="off", max_batch=1, max_context=most, prefix_cache=False, ops=recorder.ops, **given
    )
    models = tensors_below([engine.target, engine.drafter, engine.cache])
    recorder.lasting |= {tensor.untyped_storage().data_ptr() for _, tensor in models}
    return engine, recorder


def record(o, engine: Engine, recorder: Recorder, prompt: list[int]) -> None:
    """One cycle of each shape, greedy and drawn, in the calls of `recorder`."""
    ways = (
        Sampling(max_new_tokens=3, ignore_eos=True),
        Sampling(max_new_tokens=3, ignore_eos=True, temperature=0.7, top_k=50),
    )
    for shape in o.shapes if engine.drafter is not None else [PLAIN]:
        for how in ways:
            events = iter(engine.stream_all([prompt], [how], shape=shape, profile=Profile()))
            next(events)  # prefilled
            recorder.on = True
            next(events)
            recorder.on = False
            events.close()
    recorder.on = True
    for rows in sorted({shape.draft_tokens for shape in o.shapes}):
        uncalled(recorder.ops, engine, rows)
    recorder.on = False


def uncalled(ops: Ops, engine: Engine, rows: int) -> None:
    """What no cycle of one rank calls: norms lie inside other operations, and there is nothing to exchange."""
    norm, table = engine.target.head.norm, engine.target.embedding.weight
    x = torch.randn(RANKS, rows, len(norm.weight), dtype=norm.weight.dtype, device=norm.weight.device)
    ops.norm(x[0], norm.weight, norm.eps)
    ops.total(x, x[0])
    ids = torch.arange(rows, device=x.device)
    ops.embed_share(ids, table, 0)
    one = ops.pack_bests(x[0, :, :1].float().contiguous(), ids[:, None], torch.ones(rows, device=x.device), 0)
    ops.merge_bests(one.repeat(RANKS, 1, 1), 1)


def timed(operation, calls: list[Call], repeats: int, device: torch.device) -> list[float]:
    """ms a call of each turn over all calls; on CUDA a turn is a graph, so that the host's pace does not count."""

    def turn():
        for call in calls:
            operation(*call.args)

    def restore():
        for call in calls:
            for tensor, before in call.kept:
                tensor.copy_(before)

    restore()
    turn()
    if device.type == "cuda":
        restore()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turn()
    found = []
    for _ in range(repeats):
        restore()
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / len(calls))
        else:
            began = time.perf_counter()
            turn()
            found.append((time.perf_counter() - began) * 1e3 / len(calls))
    return found


def bf16(call: Call) -> bool:
    """Whether a call's rows are what the native kernels serve."""
    return next(tensors(call.args)).dtype == torch.bfloat16


def measured(o, recorder: Recorder, device: torch.device, speed: float) -> list[Figure]:
    """A figure for every (field, sizes) and table; `native` where that has a kernel of its own."""
    tables = {"reference": REFERENCE}
    if device.type == "cuda":
        tables = {"fused": FUSED, "reference": REFERENCE}
        with contextlib.suppress(native.Unavailable):
            tables["native"] = native.table(FUSED, device)
    found = []
    for (field, sizes), calls in tqdm(sorted(recorder.calls.items()), desc="ops", unit="", disable=None, leave=False):
        nbytes = statistics.mean(call.nbytes for call in calls)
        note = f"{len(calls)} calls in turn, {nbytes / 1e6:.4g} MB each"
        if device.type == "cuda" and nbytes * len(calls) < L2:
            note += "; may lie in the L2"
        for table, ops in tables.items():
            if table == "native" and (getattr(ops, field) is getattr(FUSED, field) or not bf16(calls[0])):
                continue
            ms = timed(getattr(ops, field), calls, o.repeats, device)
            floor = nbytes / speed * 1e3 or None
            found.append(Figure.of(f"{field}.{sizes}.{table}", "ms", ms, floor=floor, note=note))
    return found


def run(o, command: str) -> list[Figure]:
    """Measure and keep."""
    engine, recorder = load(o)
    device = engine.parts.device
    if device.type == "cpu":
        torch.set_num_threads(1)
    prompt = random_prompt(o.context, engine.target.head.vocabulary)
    record(o, engine, recorder, prompt)
    read = bandwidth.read_bandwidth(device)
    figures = [Figure.of("read_bandwidth", "TB/s", [x / 1e12 for x in read])]
    figures += measured(o, recorder, device, results.quantile(read, 0.5))
    absent = {f.name for f in dataclasses.fields(Ops)} - {field for field, _ in recorder.calls}
    tables = "fused and native beside reference" if device.type == "cuda" else "reference alone: no GPU here"
    print(f"sizes of {o.random or 'the demo pair'}; {tables}")
    if absent:
        print(f"not called by these shapes: {', '.join(sorted(absent))}")
    if o.json:
        load_ = stages.workload(o, engine, "random ids", [prompt], 3)
        results.write(o.json, results.document(command, stages.environment(engine), load_, figures))
    return figures


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.ops", parse, run, argv)
