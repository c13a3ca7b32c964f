"""`python -m bench.lockstep`: whether ranks agree, on chains and trees, at temperature 0 and 1.

In fp32 the ids are those of one device; all ranks have the same in every dtype; and within the ranks every shape gives
the ids and logits of plain decoding (CUDA, bf16: to the bit). Exit codes: 0; 1 where something differs; 2 refused.
"""

import argparse
import sys

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch

from engine import Engine, Sampling, Shape, spawn
from engine.device import device_of
from engine.options import DEMO, Parser, capture_option, least
from engine.shape import PLAIN
from weights.config import Refused

from . import command
from .texts import texts

SHAPES = ("0-1-1", "3-1-4", "4-4-16")


def parser() -> Parser:
    """Options."""
    p = Parser("python -m bench.lockstep", __doc__)
    add = p.add_argument
    add("--target", metavar="DIR|HUB_ID", help="default: the demo pair")
    add("--draft", metavar="DIR|HUB_ID|random:NAME", help="default: the demo draft with the demo target")
    add("--random", metavar="NAME|FILE", help="random weights of this architecture in place of --target")
    add("--layers", type=least(1), metavar="N", help="with --random: so many layers only")
    capture_option(add)
    add("--shapes", nargs="+", default=list(SHAPES), metavar="S-K-D", help="default: plain, a chain, a tree")
    add("--prompts", metavar="FILE", help="the prompt is how its texts begin; default: the demo's, or random ids")
    add("--context", type=least(2), default=100, metavar="N", help="prompt tokens at most; default %(default)s")
    add("--tokens", type=least(4), default=64, metavar="N", help="new tokens; default %(default)s")
    command.parallel_options(add, sliced=False)
    add("--device", metavar="cpu|cuda", help="default: CUDA where there is a GPU")
    p.set_defaults(tp=2)
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    o = command.options(parser(), argv)
    if o.tp < 2:
        raise Refused(f"--tp {o.tp}: one rank agrees with itself; supported: from 2")
    o.shapes = list(dict.fromkeys([PLAIN, *map(Shape.parse, o.shapes)]))
    if o.target and o.random:
        raise Refused("--random: it takes the place of --target; supported: one of them")
    if not o.random and not o.target:
        o.target, o.draft = str(DEMO / "target"), o.draft or str(DEMO / "draft")
    return o


def decoded(o, runs: list[tuple[int, str]]) -> list[dict]:
    """On a rank: `decoded_once` of each (ranks of the engine, dtype)."""
    return [decoded_once(o, *each) for each in runs]


def decoded_once(o, size: int, dtype: str) -> dict:
    """On a rank: {(shape, temperature): (ids, logits of every emitted position at temperature 0 [n, V])}."""
    ranks = command.parallel(o) | {"tp": size} if size > 1 else {}
    given = {name: getattr(o, name) for name in ("random", "layers", "device", "capture_layers")}
    engine = Engine.load(o.target, o.draft, prefix_cache=False, max_batch=1, dtype=dtype, **given, **ranks)
    if engine.parts.device.type == "cpu":
        torch.set_num_threads(1)
    prompt, found = texts(o, engine, o.context), {}
    for shape in o.shapes:
        for temperature in (0.0, 1.0):
            how = Sampling(o.tokens, temperature, seed=1, ignore_eos=True)
            events = list(engine.stream(prompt, how, shape=shape, details=not temperature))
            rows = [e.tree.logits[e.accepted] for e in events if e.tree is not None]
            ids = [token for event in events for token in event.tokens]
            found[str(shape), temperature] = ids, torch.cat(rows).cpu() if rows else None
    return found


def differences(dtype: str, ranks: list[dict], alone: dict | None, exact: bool):
    """Sentences about what is not as it should be in what `ranks` decoded. alone: what one device did; exact: logits
    too, to the bit."""
    first, plain = ranks[0], ranks[0][str(PLAIN), 0.0]
    for key, (ids, logits) in first.items():
        what = f"{dtype}, shape {key[0]}, temperature {key[1]:g}"
        for rank, other in enumerate(ranks[1:], 1):
            if other[key][0] != ids or (logits is not None and not torch.equal(other[key][1], logits)):
                yield f"{what}: rank {rank} differs from rank 0"
        if key[1] == 0 and ids != plain[0]:
            yield f"{what}: other ids than plain decoding"
        if key[1] == 0 and exact and not torch.equal(logits, plain[1]):
            yield f"{what}: other logits than plain decoding"
    for key, (ids, _) in first.items() if alone is not None else ():
        if alone[key][0] != ids:
            yield f"{dtype}, shape {key[0]}, temperature {key[1]:g}: other ids than on one device"


class Different(command.Failed):
    """Ranks, shapes or devices disagree."""


def run(o, typed: str) -> list[str]:
    """Compare; Different where anything differs."""
    gpu, lines, wrong = device_of(o.device).type == "cuda", [], []
    dtypes = ("float32", "bfloat16") if gpu else ("float32",)
    ranks = spawn(decoded, o.tp, o, [*((o.tp, dtype) for dtype in dtypes), (1, "float32")])
    alone = {"float32": ranks[0][-1]}
    for number, dtype in enumerate(dtypes):
        own = [rank[number] for rank in ranks]
        found = list(differences(dtype, own, alone.get(dtype), exact=gpu and dtype == "bfloat16"))
        cases = f"{dtype}: {len(o.shapes) * 2} runs on {o.tp} ranks, {o.tokens} tokens each"
        lines.append(f"{cases}: {'; '.join(found) or 'all as they should be'}")
        wrong += found
    if wrong:
        raise Different(" | ".join(lines))
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.lockstep", parse, run, argv, ranks=False)
