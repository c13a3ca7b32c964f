"""`python -m bench.auto`: what a shape that chooses itself reaches by the wall, beside every fixed shape and plain
decoding in the same process, turn by turn: on real prompts, on a draft that is always wrong, on one that changes.

Exit codes: 0; 1 where `--check` finds a figure short; 2 for what is refused.
"""

import argparse
import shlex
import sys
import time
from dataclasses import dataclass

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from engine import Engine
from engine.auto import AUTO
from engine.compare import Taken, turns
from engine.options import DEMO, Parser, capture_option, least
from engine.report import changes
from engine.shape import MAX_NODES, PLAIN
from weights.config import Refused

from . import command, results, stages, sweep
from .oracle import Oracle
from .results import Figure
from .texts import several

EARLY = 64  # tokens in which a wrong draft may be found out
GOOD = [0.95**depth for depth in range(1, MAX_NODES + 1)]  # of a draft that is mostly right
REACH = {"auto_of_best": 0.95, "wrong_draft": 0.97}  # at least; the second is a share of plain decoding's speed


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.auto", __doc__)
    add = p.add_argument
    add("--target", metavar="DIR|HUB_ID", help="default: the demo pair")
    add("--draft", metavar="DIR|HUB_ID|random:NAME", help="default: the demo draft with the demo target")
    add("--random", metavar="NAME|FILE", help="random weights of this architecture in place of --target")
    add("--layers", type=least(1), metavar="N", help="with --random: so many layers only")
    capture_option(add)
    add(
        "--grid",
        nargs="+",
        metavar="S-K-D",
        help="shapes it may take and is compared with; default: those of bench.sweep",
    )
    add("--prompts", metavar="FILE", help="default: the demo's, or random ids")
    add("--count", type=least(1), default=8, metavar="N", help="the first N prompts; default %(default)s")
    add("--context", type=least(2), default=512, metavar="N", help="most tokens of a prompt; default %(default)s")
    add("--new-tokens", type=least(4), default=128, metavar="N", help="for each prompt; default %(default)s")
    add(
        "--long",
        type=least(2 * EARLY),
        default=640,
        metavar="N",
        help="new tokens with made-up drafts; default %(default)s",
    )
    add(
        "--rounds", type=least(1), default=3, metavar="N", help="turns over all shapes and prompts; default %(default)s"
    )
    add("--check", action="store_true", help="compare with what it must reach; exit 1 where it falls short")
    command.device_options(add)
    o = command.options(p, argv)
    if o.target and o.random:
        raise Refused("--random: it takes the place of --target; supported: one of them")
    if not o.random and not o.target:
        o.target, o.draft = str(DEMO / "target"), o.draft or str(DEMO / "draft")
    if o.draft in (None, "none"):
        raise Refused("--draft: there is nothing to choose without one; supported: DIR, HUB_ID, random:NAME")
    o.steps = o.topk = o.draft_tokens = o.accept_length = None  # sweep.grid's other ways to name shapes
    o.shapes, o.left_out = sweep.grid(o)
    results.writable(o.json)
    return o


@dataclass
class Made:
    """One run over a made-up draft: ms and tokens after the first EARLY, and the Result's ids and shapes."""

    ms: float
    tokens: int
    ids: list[int]
    shapes: list

    @property
    def speed(self) -> float:
        """Tokens/s after the first EARLY."""
        return 1e3 * self.tokens / self.ms


def run_one(engine: Engine, prompt: list[int], tokens: int, shape) -> Made:
    """Decode and time what comes after the first EARLY tokens."""
    count, began = 0, None
    for event in engine.stream(prompt, stages.sampling(tokens), shape=shape, details=False):
        count += len(event.tokens)
        if began is None and count >= EARLY:
            began = time.perf_counter(), count
    request = event.request
    return Made((request.last - began[0]) * 1e3, count - began[1], request.token_ids, request.shapes)


def prompts_of(o, engine: Engine, bar) -> list[Figure]:
    """Real prompts: every fixed shape, plain decoding and the choice in turn."""
    prompts, how = several(o, engine, o.count, o.context), stages.sampling(o.new_tokens)
    ways = [PLAIN, *o.shapes, AUTO]
    for way in ways:
        engine.prepare(way)
        engine.generate(prompts[0], stages.sampling(24), shape=way)
    plain = [engine.generate(prompt, how, shape=PLAIN).token_ids for prompt in prompts]
    taken, ran = {way: Taken() for way in ways}, []
    for turn, at, way in turns(ways, len(prompts), o.rounds):
        result = engine.generate(prompts[at], how, shape=way)
        taken[way].add(turn, [result], result.decode_ms, [plain[at]])
        ran += result.shapes if way == AUTO else []
        bar.update(1)
    figures = [Figure.of(f"tokens_per_second.{way}", "tokens/s", one.speed) for way, one in taken.items()]
    fixed = {f.name: f for f in figures[:-1]}
    best = max(fixed.values(), key=lambda f: f.value)
    share = [a / b for a, b in zip(taken[AUTO].speed, best.repeats, strict=True)]
    most = max(set(ran), key=ran.count)
    note = f"of the best fixed shape, {best.name.split('.')[1]}; {len(set(ran))} shapes taken, mostly {most}"
    same = all(one.same for one in taken.values())
    return [
        *figures,
        Figure.of("auto_of_best", "share", share, note=note),
        Figure.of("identical", "1 or 0", float(same), note="every way gave the ids of plain decoding"),
    ]


def costs_of(engine: Engine) -> list[Figure]:
    """The table that the choice goes by."""
    table, made = engine.auto.table(1), Figure.of
    plain = made("cost.0-1-1", "ms", table.plain, note="a plain cycle that keeps what the drafter must see later")
    shapes = [made(f"cost.{shape}", "ms", table.cycle(shape), note="a cycle") for shape in table.shapes]
    passes = [made(f"cost.catch_up.{n}", "ms", ms, note="a pass over a backlog") for n, ms in table.catch_up.items()]
    return [plain, *shapes, *passes]


def made_up(o, engine: Engine, bar) -> list[Figure]:
    """Drafts whose acceptance is SYNTHETIC: always wrong, wrong from the middle on, wrong up to there."""
    parts, figures = engine.parts, []
    (prompt,) = several(o, engine, 1, min(o.context, 64))
    tokens = min(o.long, parts.max_context - len(prompt) - MAX_NODES)
    if tokens < 2 * EARLY:
        raise Refused(f"--long {o.long}: the context holds {parts.max_context}; at least {2 * EARLY} tokens are needed")
    plain = engine.generate(prompt, stages.sampling(tokens), shape=PLAIN).token_ids
    length = parts.max_context
    engine.drafter = oracle = Oracle(engine.drafter, GOOD, parts.target.head.vocabulary, length, parts.device)
    oracle.seat([*prompt, *plain])
    engine.prepare(AUTO)
    half = len(prompt) + tokens // 2
    for name, bounds in (("wrong_draft", (0, 0)), ("good_then_bad", (0, half)), ("bad_then_good", (half, None))):
        oracle.aim(GOOD, *bounds)
        taken = {PLAIN: [], AUTO: []}
        for _, _, way in turns(taken, 1, o.rounds):
            engine.auto.experience = None  # nothing is known at first
            taken[way].append(run_one(engine, prompt, tokens, way))
            bar.update(1)
        share = [a.speed / b.speed for a, b in zip(taken[AUTO], taken[PLAIN], strict=True)]
        changed = changes([taken[AUTO][-1]])
        when = [f"{entry['shape']} from cycle {entry['cycle']}" for entry in changed]
        when = ", ".join(when if len(when) <= 12 else [*when[:6], "…", *when[-6:]])
        note = f"SYNTHETIC; of plain decoding's speed after {EARLY} tokens; {len(changed)} changes: {when}"
        figures.append(Figure.of(name, "share", share, note=note))
        same = all(one.ids == plain for runs in taken.values() for one in runs)
        figures.append(Figure.of(f"identical.{name}", "1 or 0", float(same), note="the ids of plain decoding"))
        if name != "wrong_draft":
            drafts = [shape != PLAIN for shape in taken[AUTO][-1].shapes]
            first, last = drafts[EARLY // 2 : EARLY], drafts[-EARLY // 2 :]
            turned = sum(last) / len(last) - sum(first) / max(1, len(first))
            note = "share of drafting cycles, the last less the first"
            figures.append(Figure.of(f"changed.{name}", "share", turned, note=note))
    return figures


def short(figures: list[Figure]) -> list[str]:
    """What falls short of REACH, is not identical or did not change its shape."""
    lines = []
    for figure in figures:
        bound = REACH.get(figure.name, 1.0 if figure.name.startswith("identical") else None)
        value = figure.value
        if figure.name.startswith("changed."):
            bound, value = 0.5, -value if figure.name == "changed.good_then_bad" else value
        if bound is not None and value < bound:
            lines.append(f"SHORT: {figure.name} is {figure.value:.3f}; it must be at least {bound:g}")
    return lines


def run(o, command: str) -> tuple[list[str], list[str]]:
    """Measure and keep -> lines to print, and what falls short."""
    names = ("random", "layers", "device", "dtype", "capture_layers", "graphs")
    given = {name: getattr(o, name) for name in names}
    engine = Engine.load(o.target, o.draft, max_batch=1, prefix_cache=False, **given)
    if engine.parts.device.type == "cpu":
        torch.set_num_threads(1)
    sweep.usable(o, engine)
    engine.auto.shapes = tuple(o.shapes)
    prompts = several(o, engine, o.count, o.context)
    work = o.rounds * ((2 + len(o.shapes)) * len(prompts) + 6)
    with tqdm(total=work, desc="auto", unit="", disable=None, leave=False) as bar:
        figures = prompts_of(o, engine, bar)
        costs = f"costs {engine.auto.said()}"
        figures += costs_of(engine)
        figures += made_up(o, engine, bar)
    if o.json:
        load = stages.workload(o, engine, "text; SYNTHETIC where said", prompts, o.new_tokens)
        results.write(o.json, results.document(command, stages.environment(engine), load, figures))
    lines = [*(f"left out: {why}" for why in o.left_out), costs, *(figure.line() for figure in figures)]
    return lines, short(figures) if o.check else []


def judged(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        lines, missed = run(parse(argv), shlex.join(["python", "-m", "bench.auto", *argv]))
    except (Refused, command.Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    print("\n".join(lines))
    print("".join(f"{line}\n" for line in missed), end="", file=sys.stderr)
    return 1 if missed else 0


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code, 1 where it was interrupted."""
    return interrupt.command(lambda _: judged(sys.argv[1:] if argv is None else argv))
