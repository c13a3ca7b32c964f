"""`python -m bench.sweep`: which shape is fastest on real prompts, beside plain decoding in the same process.

Plain decoding and all shapes take turns prompt by prompt, so that drift favours none; the cost table behind the
predictions is measured beside them as `--shape auto` measures it. Exit codes: 0; 2 for what is refused, a baseline of
other settings too.
"""

import argparse
import itertools
import sys

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from engine import Engine, measure
from engine.auto import GRID
from engine.compare import Taken, turns
from engine.options import DEMO, Parser, capture_option, least, number
from engine.shape import PLAIN, Shape
from weights.config import Refused

from . import command, reading, results, stages
from .oracle import Oracle, rates_of
from .results import Figure
from .texts import several
from .verdict import SYNTHETIC, against, best, by_class, figures, recommendation, table_lines


def parser() -> Parser:
    """Options."""
    p = Parser("python -m bench.sweep", __doc__)
    add = p.add_argument
    add("--target", metavar="DIR|HUB_ID", help="default: the demo pair")
    add("--draft", metavar="DIR|HUB_ID|random:NAME", help="default: the demo draft with the demo target")
    add("--random", metavar="NAME|FILE", help="random weights of this architecture in place of --target")
    add("--layers", type=least(1), metavar="N", help="with --random: so many layers only")
    capture_option(add)
    add("--grid", nargs="+", metavar="S-K-D", help=f"shapes; default {' '.join(map(str, GRID))}")
    add(
        "--steps",
        nargs="+",
        type=least(1),
        metavar="S",
        help="with --topk and --draft-tokens: all shapes of the product",
    )
    add("--topk", nargs="+", type=least(1), metavar="K", help="candidates a draft pass")
    add("--draft-tokens", nargs="+", type=least(2), metavar="D", help="nodes verified, the root counted")
    add("--prompts", metavar="FILE", help="*.jsonl: prompt | token_ids | messages; default: the demo's, or random ids")
    add("--count", type=least(1), default=5, metavar="N", help="the first N prompts; default %(default)s")
    add("--context", type=least(2), default=512, metavar="N", help="most tokens of a prompt; default %(default)s")
    add("--new-tokens", type=least(4), default=48, metavar="N", help="for each prompt; default %(default)s")
    add(
        "--rounds", type=least(1), default=3, metavar="N", help="turns over all shapes and prompts; default %(default)s"
    )
    add(
        "--accept-length",
        type=number,
        metavar="X",
        help="made-up acceptance: every shape keeps X tokens a cycle, the bonus token counted",
    )
    add(
        "--accept-rates",
        nargs="+",
        type=number,
        metavar="R",
        help="made-up acceptance: share of cycles that keep draft token 1, 2, …",
    )
    add("--baseline", metavar="FILE", help="compare with a kept sweep; refused where its settings differ")
    command.device_options(add)
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    o = command.options(parser(), argv)
    if o.target and o.random:
        raise Refused("--random: it takes the place of --target; supported: one of them")
    if not o.random and not o.target:
        o.target, o.draft = str(DEMO / "target"), o.draft or str(DEMO / "draft")
    if o.draft in (None, "none"):
        raise Refused("--draft: a sweep needs one; supported: DIR, HUB_ID, random:NAME")
    if o.accept_length is not None and o.accept_rates is not None:
        raise Refused("--accept-rates: --accept-length says it already; supported: one of them")
    rates = o.accept_rates or []
    if any(not 0 <= r <= 1 for r in rates) or any(b > a for a, b in itertools.pairwise(rates)):
        raise Refused(f"--accept-rates {' '.join(f'{r:g}' for r in rates)}: supported: shares from 1 to 0, not rising")
    o.shapes, o.left_out = grid(o)
    results.writable(o.json)
    return o


def grid(o) -> tuple[list[Shape], list[str]]:
    """The shapes asked for, and why others cannot be. Raises Refused where none can."""
    axes = (o.steps, o.topk, o.draft_tokens)
    if any(axes) and (o.grid or not all(axes)):
        raise Refused("--steps, --topk, --draft-tokens: supported: all three, without --grid")
    words = ["-".join(map(str, s)) for s in itertools.product(*axes)] if all(axes) else o.grid or list(map(str, GRID))
    shapes, left_out = [], []
    for word in words:
        try:
            shape = Shape.parse(word)
            if shape == PLAIN:
                raise Refused(f"shape {PLAIN}: plain decoding is always measured")
            if o.accept_length is not None:
                rates_of(o.accept_length, shape.path - 1)
        except Refused as error:
            left_out.append(str(error))
            continue
        if shape not in shapes:
            shapes.append(shape)
    if not shapes:
        raise Refused(f"--grid: no valid shape among {len(words)}; the first: {left_out[0]}")
    return shapes, left_out


def rounds(o, engine: Engine, prompts: list[list[int]], oracle: Oracle | None, bar, keep) -> tuple:
    """Decode every prompt with every shape, `o.rounds` times; each round and prompt begins with another shape.
    keep(taken, table, timed) is called after every round but the last.

    Returns:
        {Shape: Taken} of runs without stamps, stage times of one stamped prompt a round, {Shape: [Result]} of the first
        round, and the CostTable behind the predictions, of which every round begins with a turn.
    """
    shapes, timed = [PLAIN, *o.shapes], stages.Timed()
    stages.warm(engine, prompts[0], shapes)
    taken, how = {shape: Taken() for shape in shapes}, stages.sampling(o.new_tokens)
    first = {shape: [] for shape in o.shapes + [PLAIN]}
    plain = [engine.generate(prompt, how, shape=PLAIN).token_ids for prompt in prompts]
    costs = measure.Costs(engine, shapes, 1, prompts[0], mixed=False)
    for turn, at, shape in turns(shapes, len(prompts), o.rounds):
        if len(costs.whole[PLAIN]) == turn:
            if turn:
                keep(taken, costs.table(), timed)
            costs.turn()
        aim(o, oracle, shape, [*prompts[at], *plain[at]])
        result = engine.generate(prompts[at], how, shape=shape)
        taken[shape].add(turn, [result], result.decode_ms, [plain[at]])
        if turn == 0:
            first[shape].append(result)
        bar.update(1)
        if at == turn % len(prompts):
            stages.stamped(engine, prompts[at], o.new_tokens, [shape], bar, timed)
    return taken, timed, first, costs.table()


def aim(o, oracle: Oracle | None, shape: Shape, text: list[int]) -> None:
    """Make an oracle right as often as asked."""
    if oracle is not None and shape != PLAIN:
        oracle.seat(text)
        oracle.aim(o.accept_rates or rates_of(o.accept_length, shape.path - 1))


def synthetic(o) -> bool:
    """Whether acceptance is made up."""
    return o.accept_length is not None or o.accept_rates is not None


def run(o, command: str) -> list[str]:
    """Measure, keep, and say what came out."""
    stored = None if o.baseline is None else reading.read(o.baseline)
    names = ("random", "layers", "device", "dtype", "capture_layers", "graphs")
    given = {name: getattr(o, name) for name in names}
    engine = Engine.load(o.target, o.draft, max_batch=1, prefix_cache=False, **given)
    parts = engine.parts
    if parts.device.type == "cpu":
        torch.set_num_threads(1)
    prompts = several(o, engine, o.count, o.context)
    longest = max(map(len, prompts))
    if longest + o.new_tokens > parts.max_context:
        most = f"the context holds {parts.max_context}"
        raise Refused(f"--new-tokens {o.new_tokens}: behind {longest} prompt tokens; {most}")
    routing = "random ids" if o.prompts is None and parts.text is None else "text"
    if o.accept_length is not None:
        routing += f"; {SYNTHETIC}, {o.accept_length:g} tokens a cycle"
    elif o.accept_rates is not None:
        routing += f"; {SYNTHETIC}, by position {' '.join(f'{r:g}' for r in o.accept_rates)}"
    load = stages.workload(o, engine, routing, prompts, o.new_tokens)
    settings = {"environment": stages.environment(engine), "workload": vars(load)}
    if stored is not None:
        reading.comparable(settings, stored, o.baseline)
    oracle = None
    if synthetic(o):
        length = parts.max_context
        engine.drafter = oracle = Oracle(engine.drafter, [], parts.target.head.vocabulary, length, parts.device)
    usable(o, engine)
    label = f"{SYNTHETIC}; " if synthetic(o) else ""

    def keep(taken, table, timed, first=None):
        """{name: Figure} and the recommendation, in the file too; a run that is ended keeps its whole rounds."""
        found = {f.name: f for f in figures(taken, table, timed, label)}
        if first is not None and parts.text is not None and not synthetic(o):
            found |= {f.name: f for f in by_class({s: first[s] for s in o.shapes}, parts.text.decode)}
        advice = recommendation(found)
        if o.json:
            times = Figure.of("recommended", "times plain", best(found), note=advice)
            head = [Figure.of("load", "ms", parts.load_ms), times]
            results.write(o.json, results.document(command, settings["environment"], load, [*head, *found.values()]))
        return found, advice

    total = (1 + len(o.shapes)) * o.rounds * (1 + len(prompts))
    with tqdm(total=total, desc="sweep", unit="", disable=None, leave=False) as bar:
        taken, timed, first, table = rounds(o, engine, prompts, oracle, bar, keep)
    found, advice = keep(taken, table, timed, first)
    lines = [f"left out: {why}" for why in o.left_out] + [
        f"{len(prompts)} prompts; {routing}",
        *table_lines(o.shapes, found),
    ]
    return lines + ([] if stored is None else against(stored, found, o.baseline)) + [advice]


def usable(o, engine: Engine) -> None:
    """Capture every shape; leave out those that this pair cannot run. Raises Refused where none is left."""
    for shape in list(o.shapes):
        try:
            engine.prepare(shape)
        except Refused as error:
            o.shapes.remove(shape)
            o.left_out.append(str(error))
    if not o.shapes:
        raise Refused(f"--grid: no valid shape for this pair; the last: {o.left_out[-1]}")
    engine.prepare(PLAIN)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.sweep", parse, run, argv)
