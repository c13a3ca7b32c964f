"""`python -m bench.collectives`: what a sum over ranks costs, through NCCL as it is and as its variables may make it,
and over peer memory in one shot and two, alone and with residual and norm; inside a graph where there is one.

Every NCCL setting has processes of its own. Prints the best for each width, and what a model's pass pays under each.
"""

import argparse
import statistics
import sys
import time

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
import torch.distributed as dist

from engine import spawn, tp
from engine.device import DTYPES, device_of
from engine.links import Linked, fastened
from engine.options import Parser, least
from kernels import FUSED, REFERENCE
from weights import named
from weights.config import Refused

from . import command, results
from .results import Figure, Workload

ROWS = (1, 2, 4, 8, 16, 32, 64)
SETTINGS = ("", "NCCL_PROTO=LL NCCL_ALGO=Ring", "NCCL_PROTO=LL128 NCCL_ALGO=Ring", "NCCL_PROTO=Simple NCCL_ALGO=Ring")
SETTINGS += ("NCCL_PROTO=LL NCCL_ALGO=Tree",)
CALLS, REPEATS, EPS = 64, 15, 1e-6  # sums a graph, graphs timed


def parser() -> Parser:
    """Options."""
    p = Parser("python -m bench.collectives", __doc__)
    add = p.add_argument
    add("--tp", type=least(2), default=2, metavar="N", help="ranks, a GPU each; default %(default)s")
    add(
        "--random",
        default="qwen3-30b-a3b",
        metavar="NAME|FILE",
        help="the model whose pass is priced; default %(default)s",
    )
    add("--columns", nargs="+", type=least(8), metavar="D", help="widths of rows; default: the model's")
    add("--rows", nargs="+", type=least(1), default=list(ROWS), metavar="N", help="default: 1 to 64")
    add(
        "--settings",
        nargs="+",
        metavar="'NCCL_X=Y …'",
        help="variables, each set in a run of its own; '' is NCCL as found; default: five",
    )
    add("--calls", type=least(1), default=CALLS, metavar="N", help="sums a graph; default %(default)s")
    add("--device", metavar="cpu|cuda", help="default: CUDA where there is a GPU")
    add("--json", metavar="FILE", help="write the run there, as JSON")
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    o = command.options(parser(), argv)
    found = named(o.random)
    if "target" not in found:
        raise Refused(f"--random {o.random}: it describes a draft head; supported: a target's config")
    raw = found["target"].get("text_config") or found["target"]
    o.layers, o.hidden = raw["num_hidden_layers"], raw["hidden_size"]
    o.columns = o.columns or [o.hidden]
    for setting in o.settings or ():
        if any(not word.startswith("NCCL_") or "=" not in word for word in setting.split()):
            raise Refused(f"--settings {setting!r}: supported: NCCL_NAME=VALUE, several in one argument")
    results.writable(o.json)
    return o


def seconds(work, calls: int, device: torch.device) -> list[float]:
    """Seconds of one `work`, a repeat each: `calls` of them in a graph on CUDA, one after the other on the CPU."""
    work()
    if device.type != "cuda":
        return [_clocked(lambda: [work() for _ in range(calls)]) / calls for _ in range(REPEATS)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    spans = []
    for repeat in range(REPEATS + 2):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat > 1:
            spans.append(start.elapsed_time(end) / 1e3 / calls)
    return spans


def _clocked(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def works(group: tp.TP, x, residual, gamma) -> dict:
    """{name: a sum of these rows} of everything that a rank could call."""
    links, norm, own = group.links, (FUSED if x.is_cuda else REFERENCE).norm, x.clone()
    library = links.library if isinstance(links, Linked) else links
    found = {
        "all_reduce": lambda: dist.all_reduce(own),
        "ordered": lambda: library.sum(x, residual),
        "ordered+norm": lambda: norm(library.sum(x, residual), gamma, EPS),
    }
    if isinstance(links, Linked) and links.links.fits(x):
        peers = links.links
        if len(x) <= 64:
            found["one-shot"] = lambda: peers.sum(x, residual, two_shots=False)
            found["one-shot+norm"] = lambda: peers.sum(x, residual, gamma, EPS, two_shots=False)
        if len(x) >= group.size:
            found["two-shot"] = lambda: peers.sum(x, residual, two_shots=True)
            found["two-shot+norm"] = lambda: peers.sum(x, residual, gamma, EPS, two_shots=True)
    return found


def measure(o, setting: str, reduction: str) -> tuple[dict, dict]:
    """On a rank: ({(name, columns, rows): [microseconds]}, what ran them). All ranks take the slowest one's time."""
    tp.settings(dict(word.split("=", 1) for word in setting.split()))
    device = device_of(o.device, o.tp)
    dtype = torch.bfloat16 if device.type == "cuda" else DTYPES["float32"]
    group = tp.join(o.tp, device, (FUSED if device.type == "cuda" else REFERENCE).total)
    group = fastened(group, device, dtype, max(o.columns), reduction)
    found = {}
    for columns in o.columns:
        for rows in o.rows:
            x, residual = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
            gamma = torch.ones(columns, device=device, dtype=dtype)
            for name, work in works(group, x, residual, gamma).items():
                spans = zip(*group.every(seconds(work, o.calls, device)), strict=True)
                found[name, columns, rows] = [1e6 * max(each) for each in spans]
    group.check()
    ran = {"reduction": group.links.name, **group.links.facts, **tp.environment()}
    return found, ran | results.environment(device, dtype, o.tp)


def of_a_pass(parts, rows: list[int]) -> list[Figure]:
    """What the sums of one pass of a loaded target cost, in a graph, of so many rows: two a layer, with a norm and
    without."""
    config, links, found = parts.target.config, parts.tp.links, []
    gain = torch.ones(config.hidden, device=parts.device, dtype=parts.dtype)
    for count in rows:
        x, residual = (torch.randn(count, config.hidden, device=parts.device).to(parts.dtype) for _ in range(2))

        def layer(x=x, residual=residual):
            links.sum(links.sum_and_norm(x, residual, gain, config.eps)[0], residual)

        spans = zip(*parts.tp.every(seconds(layer, config.layers, parts.device)), strict=True)
        note = f"{2 * config.layers} sums of {count} rows of {config.hidden}; {links.name}"
        found.append(Figure.of(f"sums.{count}", "ms", [1e3 * config.layers * max(each) for each in spans], note=note))
    return found


def run(o, typed: str) -> list:
    """Measure under every setting, peer memory beside the first, and compare; what there is, is kept after each."""
    figures, table, ran = [], {}, {}
    gpu = device_of(o.device).type == "cuda"
    if o.settings and not gpu:
        raise Refused(f"--settings {o.settings[0]!r}: the CPU sums by gloo; supported: on CUDA")
    for setting in o.settings or SETTINGS if gpu else [""]:
        times, ran_now = spawn(measure, o.tp, o, setting, "library" if ran else "auto")[0]
        ran = ran or ran_now
        for (name, columns, rows), spans in times.items():
            own = name if "shot" in name else f"{name} [{setting or 'as found'}]"
            table[own, columns, rows] = statistics.median(spans)
            figures.append(Figure.of(f"{own}.{rows}x{columns}", "us", spans))
        if o.json:
            load = Workload(o.random, None, o.layers, o.tp, None, 0, o.rows, ran["dtype"], "no model is run", "")
            results.write(o.json, results.document(typed, ran, load, figures))
    return [*figures, *verdict(o, table), f"sums: {ran['reduction']}"]


def verdict(o, table: dict) -> list[str]:
    """Lines: the best of each width and row count, and the model's pass under each."""
    lines = []
    for columns in o.columns:
        for rows in o.rows:
            costs = {name: us for (name, d, n), us in table.items() if (d, n) == (columns, rows) and "norm" not in name}
            best = min(costs, key=costs.get)
            lines.append(f"{rows} rows of {columns}: {best} is the fastest, {costs[best]:.2f} us")
            if columns == o.hidden:
                each = sorted(costs.items(), key=lambda item: item[1])
                paid = ", ".join(f"{name} {2 * o.layers * us / 1e3:.3f}" for name, us in each)
                lines.append(f"  a pass of {o.random} makes {2 * o.layers} of them, ms: {paid}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.collectives", parse, run, argv, ranks=False)
