"""`python -m bench.chain`: microseconds a layer of the pieces of a decoder, as chains over all its layers in turn: the
attention block, the experts or MLP, whole layers.

A piece alone shows what it costs; whole layers show what their sequence costs, which on a GPU need not be the sum: the
end of a kernel overlaps the beginning of the next. Rows are random and choose their experts by themselves.
"""

import argparse
import sys
from dataclasses import dataclass

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch

from engine import Engine
from engine.batch import Batch
from engine.layers.view import view
from engine.options import Parser, least
from engine.watch import tensors
from kernels import FUSED
from kernels.attention import causal_bits
from weights.config import Refused

from . import bandwidth, command, results, stages
from .ops import timed
from .recorder import Call
from .results import Figure
from .traffic import Routed

MODEL, LAYERS, PAGE = "qwen3-30b-a3b", 24, 64


@dataclass
class Chain:
    """A target's layers behind `context` committed rows of noise, and the rows that pass them."""

    engine: Engine
    target: object
    batch: Batch
    x: torch.Tensor

    def __post_init__(self):
        self.numbers = {id(layer): number for number, layer in enumerate(self.target.layers)}

    def sees(self, layer):
        """What the attention of a layer is called with besides its rows."""
        cache = self.engine.cache
        return self.batch, cache.layer("target", self.numbers[id(layer)]), cache.page_size

    def pieces(self):
        """{name: function(layer, rows) -> rows}."""
        return {
            "attention": lambda layer, x: layer.attention(x, x, *self.sees(layer), layer.mlp.norm)[0],
            "mlp": lambda layer, x: layer.mlp(x),
            "layer": lambda layer, x: layer(x, x, *self.sees(layer)),
        }

    def step(self, piece):
        """Function(layer) that passes the rows on; they begin anew at the first layer."""
        rows = [self.x]

        def step(layer):
            rows[0] = piece(layer, self.x if layer is self.target.layers[0] else rows[0])

        return step


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.chain", __doc__.split("\n\n")[0])
    add = p.add_argument
    add("--random", default=MODEL, metavar="NAME|FILE", help="random weights of this architecture; default %(default)s")
    add("--layers", type=least(1), default=LAYERS, metavar="N", help="of them; default %(default)s")
    add(
        "--tp-slice",
        type=least(2),
        metavar="N",
        help="what one rank of N computes, its collectives left out; default: the whole",
    )
    add("--rows", nargs="+", type=least(1), default=[1, 4, 8], metavar="N", help="default: 1 4 8")
    add("--context", type=least(1), default=512, metavar="N", help="committed positions; default %(default)s")
    ours = "page tables of an engine of this context: attention goes by their length; default: as long as the rows need"
    add("--max-context", type=least(2), metavar="N", help=ours)
    add("--repeats", type=least(1), default=20, metavar="N", help="turns over all layers; default %(default)s")
    command.device_options(add)
    o = command.options(p, argv)
    if max(o.rows) > 64:
        raise Refused(f"--rows {max(o.rows)}: supported: 1 to 64")
    if o.max_context is not None and o.max_context < (need := o.context + max(o.rows)):
        raise Refused(f"--max-context {o.max_context}: context and rows need {need}")
    results.writable(o.json)
    return o


def chain(engine: Engine, target, context: int, rows: int, columns: int | None = None) -> Chain:
    """Rows that follow `context` rows of one sequence; columns: of the page table, None: as many as the rows need."""
    device, size = engine.parts.device, engine.cache.page_size
    pages = -(-(context + rows) // size)
    table = torch.zeros(1, columns or pages, dtype=torch.int32, device=device)
    table[0, :pages] = torch.arange(1, pages + 1)
    prefix = torch.tensor([context], device=device)
    at = prefix[:, None] + torch.arange(rows, device=device)
    ids = torch.zeros_like(at)
    x = torch.randn(rows, target.config.hidden, device=device).to(engine.parts.dtype)
    return Chain(engine, target, Batch(ids, at, at, table, prefix, causal_bits(rows, device)[None]), x)


def distinct(engine: Engine, context: int, rows: int) -> dict[str, float]:
    """{piece: different experts a layer that routes}, counted in passes of their own."""
    if not getattr(engine.target.config, "experts", 0):
        return {}
    found, (count, counted) = {}, Routed.table(engine.parts.ops, engine.target.config, engine.parts.device)
    own = chain(engine, view(engine.target, counted), context, rows)
    for name, piece in own.pieces().items():
        count.reset()
        step = own.step(piece)
        for layer in own.target.layers:
            step(layer)
        means = count.means()
        found[name] = sum(means) / len(means) if means else 0.0
    return found


def nbytes(engine: Engine, name: str, experts: float, positions: int) -> float:
    """Bytes a layer that a piece must read, on average over the layers."""
    total, target = 0.0, engine.target
    for layer in target.layers:
        parts = {"attention": [layer.attention], "mlp": [layer.mlp], "layer": [layer]}[name]
        own = {id(t): t for (_, n), t in tensors(parts) if n != "cos_sin" and t.is_floating_point()}
        packed = {id(t): t for _, t in tensors([getattr(layer.mlp, "experts", None)])} if name != "attention" else {}
        total += sum(t.nbytes for key, t in own.items() if key not in packed)
        total += experts * sum(t.nbytes / t.shape[0] for t in packed.values())
    held = 0 if name == "mlp" else target.cache_rows.nbytes(engine.parts.dtype) * positions
    return (total + held) / len(target.layers)


def run(o, typed: str) -> list[Figure]:
    """Measure and keep."""
    engine = Engine.load(
        random=o.random, layers=o.layers, tp_slice=o.tp_slice, device=o.device, dtype=o.dtype, graphs=o.graphs,
        page_size=PAGE, max_batch=1, max_context=o.max_context or o.context + max(o.rows) + 2,
    )  # fmt: skip
    parts, device = engine.parts, engine.parts.device
    for rows in parts.cache.storage.values():
        rows.normal_()
    read = bandwidth.read_bandwidth(device)
    speed, figures = results.quantile(read, 0.5), [Figure.of("read_bandwidth", "TB/s", [x / 1e12 for x in read])]
    columns = engine.programs.columns if o.max_context else None
    tables = {"engine": engine.target}
    if device.type == "cuda" and parts.ops is not FUSED:
        tables["triton"] = view(engine.target, FUSED)
    for rows in o.rows:
        counts = distinct(engine, o.context, rows)
        for name in ("attention", "mlp", "layer"):
            experts = counts.get(name, 0.0)
            floor = nbytes(engine, name, experts, o.context + rows) / speed * 1e6
            note = f"{o.layers} layers in turn" + (f"; {experts:.2f} different experts a layer" if experts else "")
            note += f"; page tables of {columns * PAGE} positions" if columns else ""
            for table, target in tables.items():
                own = chain(engine, target, o.context, rows, columns)
                calls = [Call((layer,), [], 0) for layer in target.layers]
                us = [x * 1e3 for x in timed(own.step(own.pieces()[name]), calls, o.repeats, device)]
                figures.append(Figure.of(f"{name}.{rows}.{table}", "us", us, floor=floor, note=note))
    if o.json:
        o.target = o.draft = None
        made = stages.workload(o, engine, "random rows", [[0] * o.context], max(o.rows))
        results.write(o.json, results.document(typed, stages.environment(engine), made, figures))
    return [f"{o.random}: {parts.kernels}", *figures]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.chain", parse, run, argv)
