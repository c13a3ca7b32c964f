"""`python -m bench.experts`: packed experts of a named model alone, whole or one rank's share: time, packed bytes,
share of bandwidth.

No engine is loaded: the experts of some layers are filled with random codes and passed in turn, so that the L2 is cold;
every row chooses by itself. On a GPU each table of operations that has a kernel of its own, on the CPU the reference.
"""

import argparse
import sys
from dataclasses import dataclass

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from engine import memory
from engine.device import device_of, dtype_of
from engine.layers.moe import projections
from engine.loading import Options
from engine.opening import open_target
from engine.options import Parser, least
from kernels import FUSED, REFERENCE, native
from weights import Source
from weights.config import Refused
from weights.formats import Dense, DenseExperts, format_of

from . import bandwidth, command, results
from .ops import timed
from .recorder import Call
from .results import Figure, Workload

MODEL, LAYERS, ROWS = "kimi-k2.5", 8, (1, 4, 8)
OPERATIONS = {"Int4Experts": "experts_int4", "Fp8Experts": "experts_fp8", "Mxfp4Experts": "experts_mxfp4"}


@dataclass
class Experts:
    """Layers of experts on a device; `nbytes` of one, as packed; `operation`: the field of Ops that runs them."""

    layers: list
    config: object  # of weights.config
    width: int  # this share's
    nbytes: int
    operation: str


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.experts", __doc__)
    add = p.add_argument
    add("--random", metavar="NAME|FILE", default=MODEL, help="whose experts; default %(default)s")
    add("--layers", type=least(1), default=LAYERS, metavar="N", help="to take turns over; default %(default)s")
    add("--tp-slice", type=least(1), default=1, metavar="N", help="what one rank of N holds; default: the whole")
    add("--rows", type=least(1), nargs="+", default=list(ROWS), metavar="N", help="rows a pass; default 1 4 8")
    add("--repeats", type=least(1), default=20, metavar="N", help="turns over all layers; default %(default)s")
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--dtype", metavar="float32|float16|bfloat16", help="default: bfloat16 on CUDA, float32 on the CPU")
    add("--json", metavar="FILE", help="write the run there, as JSON")
    o = command.options(p, argv)
    results.writable(o.json)
    return o


def declared(source: Source, form, config, layers: int) -> list:
    """The experts of the last `layers` layers of the model, or of as many as have some."""
    found, sizes = [], (config.experts, config.hidden, config.expert_intermediate)
    for number in range(config.layers - layers, config.layers):
        at = source.prefixed(f"model.layers.{number}.mlp.")
        if config.architecture == "GptOssForCausalLM":
            found.append(form.declare_woven(at.prefixed("experts."), *sizes))
        else:
            found.append(form.declare(at, projections, *sizes))
    return found


def load(o, device: torch.device, dtype: torch.dtype) -> Experts:
    """Random codes on the device. Raises Refused: plain experts, too little memory, a share that splits a group."""
    opened = open_target(Options(random=o.random))
    config, where = opened.config, f"--random {o.random}"
    if not hasattr(config, "experts") or o.layers > config.layers:
        raise Refused(f"{where}: {config.layers} layers; supported: models with experts in --layers {o.layers} of them")
    form = format_of(opened.checkpoint.config, where)
    for place in ("meta", device):
        source = Source(opened.checkpoint, place, dtype, 0, o.tp_slice)
        layers = declared(source, form, config, o.layers)
        if isinstance(form, Dense) or isinstance(layers[0], DenseExperts):
            raise Refused(f"{where}: its experts are plain; supported: packed ones (bench.ops measures the others)")
        free = memory.free_bytes(device)
        if place == "meta" and free is not None and source.nbytes > free:
            raise Refused(f"--layers {o.layers}: {source.nbytes / 1e9:.1f} GB of experts, {free / 1e9:.1f} GB are free")
    with tqdm(total=source.nbytes, desc="experts", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        source.fill(lambda done, _: bar.update(done - bar.n))
    packed = [t for t in vars(layers[0]).values() if t is not None]
    nbytes = sum(t.nbytes // config.experts for t in packed)
    operation = OPERATIONS[type(layers[0]).__name__]
    return Experts(layers, config, config.expert_intermediate // o.tp_slice, nbytes, operation)


def calls(experts: Experts, rows: int, device: torch.device, dtype: torch.dtype) -> list[Call]:
    """One pass a layer of `rows` rows, each with choices of its own."""
    draw, c = torch.Generator().manual_seed(rows), experts.config
    found = []
    for layer in experts.layers:
        x = torch.randn(rows, c.hidden, generator=draw).to(device, dtype)
        ids = torch.rand(rows, c.experts, generator=draw).topk(c.experts_per_token, 1).indices.to(device)
        weights = torch.rand(rows, c.experts_per_token, generator=draw).to(device)
        nbytes = int(ids.unique().numel()) * experts.nbytes + 2 * x.nbytes
        found.append(Call((layer, x, ids, weights), [], nbytes))
    return found


def tables(operation: str, device: torch.device, dtype: torch.dtype) -> dict:
    """Tables of operations with a kernel of their own, by name."""
    if device.type != "cuda":
        return {"reference": REFERENCE}
    found = {"fused": FUSED}
    if dtype == torch.bfloat16:
        try:
            own = native.table(FUSED, device)
        except native.Unavailable:
            return found
        if getattr(own, operation) is not getattr(FUSED, operation):
            found["native"] = own
    return found


def run(o, typed: str) -> list[Figure]:
    """Measure and keep."""
    device = device_of(o.device)
    dtype = dtype_of(o.dtype, device)
    read = bandwidth.read_bandwidth(device)
    figures = [Figure.of("read_bandwidth", "TB/s", [x / 1e12 for x in read])]
    experts = load(o, device, dtype)
    c = experts.config
    for rows in o.rows:
        passes = calls(experts, rows, device, dtype)
        nbytes = sum(call.nbytes for call in passes) / len(passes)
        note = f"{len(passes)} layers in turn, {nbytes / 1e6:.4g} MB packed each"
        for name, ops in tables(experts.operation, device, dtype).items():

            def once(layer, x, ids, weights, ops=ops):
                return layer.apply(ops, x, None, 0.0, lambda *_: (x, ids, weights), c.activation, x)

            ms = timed(once, passes, o.repeats, device)
            floor = nbytes / results.quantile(read, 0.5) * 1e3
            where = f"{c.hidden}x{experts.width}-{c.experts}"
            different = (nbytes - 2 * rows * c.hidden * dtype.itemsize) / experts.nbytes
            label = f"{experts.operation}.{where}.{rows}.{name}"
            figures.append(Figure.of(label, "ms", ms, floor=floor, experts=different, note=note))
    if o.json:
        slice_ = o.tp_slice if o.tp_slice > 1 else None
        kind = str(dtype).removeprefix("torch.")
        load_ = Workload(o.random, None, o.layers, 1, slice_, 1, o.rows, kind, "independent", results.prompts_hash([]))
        results.write(o.json, results.document(typed, results.environment(device, dtype), load_, figures))
    return figures


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.experts", parse, run, argv)
