"""`python -m bench.verify_vs_draft`: where a cycle's time goes, by the cycle's own stamps, beside plain decoding.

For chains of 1 to 16 rows and every shape asked for: the stages inside the cycle and alone, the experts really read,
the bytes and their floor at the bandwidth measured in the same run, a fit over rows, and break-even accept lengths.
"""

import argparse
import re
import sys

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from engine import Engine, Shape
from engine.cost import Fit
from engine.options import DEMO, Parser, capture_option, least, number
from engine.shape import MAX_NODES, PLAIN
from weights.config import Refused

from . import bandwidth, collectives, command, results, stages
from .cost import table_of_run
from .oracle import Delayed, Independent, Oracle, Repeated, share_embeddings
from .results import Figure
from .spin import DelayedTarget, Spin
from .texts import texts
from .traffic import Bytes

ROUTING = {
    "text": "text: the drafter's own tokens",
    "independent": "independent: random ids in every row (worst case)",
    "repeated": "repeated: one row as often as there are rows (best case)",
    "overlap": "overlap:{}: random ids whose embeddings have that share in common",
}
CONTEXT = 8192  # the engine's own most, unless it is told
TOKENS = {"cuda": 384, "cpu": 32}


def parser() -> Parser:
    """Options."""
    p = Parser("python -m bench.verify_vs_draft", __doc__)
    add = p.add_argument
    add("--target", metavar="DIR|HUB_ID", help="default: the demo pair")
    add(
        "--draft", metavar="DIR|HUB_ID|random:NAME|none", help="default: the demo draft with the demo target, else none"
    )
    add("--random", metavar="NAME|FILE", help="random weights of this architecture in place of --target")
    add("--layers", type=least(1), metavar="N", help="with --random: so many layers only")
    capture_option(add)
    add(
        "--shapes",
        nargs="*",
        default=["3-1-4"],
        metavar="S-K-D",
        help="shapes (steps, topk, draft tokens); default: 3-1-4",
    )
    add(
        "--rows",
        nargs="*",
        type=least(1),
        default=[*range(1, 17)],
        metavar="N",
        help="chains that verify so many rows; default: 1 to 16",
    )
    add(
        "--routing",
        metavar="text|independent|repeated|overlap:SHARE",
        help="default: text where there are weights, independent with --random; overlap: with --random only",
    )
    add(
        "--prompts", metavar="FILE", help="the prompt is the beginning of its texts; default: the demo's, or random ids"
    )
    add("--context", type=least(2), default=512, metavar="N", help="most prompt tokens; default %(default)s")
    add("--batch", type=least(1), default=1, metavar="N", help="requests at once; default %(default)s")
    add("--tokens", type=least(4), metavar="N", help="new tokens of each run; default 384 on CUDA, 32 on the CPU")
    add("--rounds", type=least(1), default=3, metavar="N", help="turns over all shapes; default %(default)s")
    add("--repeats", type=least(1), default=20, metavar="N", help="of each stage alone; default %(default)s")
    add(
        "--inject-spin",
        type=number,
        metavar="MS",
        help="make a stage slower by so many milliseconds: a test of the clock",
    )
    add("--inject-stage", choices=("verify", "draft"), help="which stage; default verify")
    command.parallel_options(add)
    command.device_options(add)
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    o = command.options(parser(), argv)
    o.shapes = [Shape.parse(text) for text in o.shapes]
    if PLAIN in o.shapes:
        raise Refused(f"--shapes {PLAIN}: plain decoding is always measured; supported: shapes that draft")
    if o.rows and max(o.rows) > MAX_NODES:
        raise Refused(f"--rows {max(o.rows)}: supported: 1 to {MAX_NODES}")
    if o.inject_spin is not None and not 0 < o.inject_spin <= 1000:
        raise Refused(f"--inject-spin {o.inject_spin:g}: supported: milliseconds above 0, up to 1000")
    if o.inject_stage is not None and o.inject_spin is None:
        raise Refused(f"--inject-stage {o.inject_stage}: nothing is injected; supported: with --inject-spin MS")
    o.inject_stage = o.inject_stage or "verify"
    if o.target and o.random:
        raise Refused("--random: it takes the place of --target; supported: one of them")
    if not o.random and not o.target:
        o.target, o.draft = str(DEMO / "target"), o.draft or str(DEMO / "draft")
    o.draft = None if o.draft == "none" else o.draft
    o.routing, o.share = routing(o.routing or ("independent" if o.random else "text"))
    if o.share is not None and not o.random:
        raise Refused(f"--routing overlap:{o.share:g}: it changes the embeddings; supported: with --random")
    if o.batch > 1 and o.draft is None and o.routing == "text":
        raise Refused(
            f"--batch {o.batch}: the text that is replayed is one request's; supported: --routing independent"
        )
    if o.draft is None and o.inject_spin is not None and o.inject_stage == "draft":
        raise Refused("--inject-stage draft: there is no draft; supported: verify")
    results.writable(o.json)
    return o


def routing(word: str) -> tuple[str, float | None]:
    """(key of ROUTING, share in common or None) of what --routing says. Raises Refused."""
    found = re.fullmatch(r"(text|independent|repeated)|(overlap):(0?\.\d*[1-9]\d*)", word)
    if found is None:
        raise Refused(
            f"--routing {word}: supported: text, independent, repeated, overlap:SHARE, of 0 to 1 and neither of them"
        )
    return found[1] or found[2], None if found[3] is None else float(found[3])


def load(o) -> Engine:
    """The pair; prompts are always computed anew."""
    longest = o.context + (o.tokens or max(TOKENS.values()))
    return Engine.load(
        o.target,
        o.draft,
        graphs=o.graphs,
        random=o.random,
        layers=o.layers,
        device=o.device,
        dtype=o.dtype,
        max_batch=o.batch,
        max_context=longest if longest > CONTEXT else None,
        capture_layers=o.capture_layers,
        prefix_cache=False,
        **command.parallel(o),
    )


def chain(rows: int) -> Shape:
    """The chain that verifies so many rows."""
    return PLAIN if rows == 1 else Shape(rows - 1, 1, rows)


def route(o, engine: Engine, prompt: list[int], tokens: int) -> None:
    """Put the drafter in place that fills the rows as --routing says, and the delay where one is injected."""
    parts, real = engine.parts, engine.parts.drafter
    length, vocabulary = parts.max_context, parts.target.head.vocabulary
    if o.inject_spin is not None:
        spin = Spin(o.inject_spin, parts.device)
        if o.inject_stage == "verify":
            parts.target = DelayedTarget(parts.target, spin)
        else:
            real = engine.drafter = Delayed(real, spin)
    if o.share is not None:
        share_embeddings(parts.target.embedding.weight, o.share)
    if o.routing in ("independent", "overlap"):
        engine.drafter = Independent(real, vocabulary, length, parts.device)
    elif o.routing == "repeated":
        engine.drafter = Repeated(real)
    elif real is None:  # the target's own text, as a drafter that is always right would offer it
        plain = engine.generate(prompt, stages.sampling(tokens), shape=PLAIN)
        engine.drafter = oracle = Oracle(None, [1.0] * MAX_NODES, vocabulary, length, parts.device)
        oracle.seat([*prompt, *plain.token_ids])


def new_tokens(o, engine: Engine, prompts: list[list[int]]) -> int:
    """Tokens decoded behind each prompt in each run."""
    parts = engine.parts
    return min(o.tokens or TOKENS[parts.device.type], parts.max_context - len(prompts[0]))


def measured(o, engine: Engine, prompts: list[list[int]], read: list[float], keep) -> list[Figure]:
    """Every figure of the run; keep(figures) is called with those of the cycles after every round of them."""
    parts = engine.parts
    tokens, length = new_tokens(o, engine, prompts), len(prompts[0])
    if tokens < 4:
        raise Refused(
            f"--context {o.context}: {length} prompt tokens leave no room; the context holds {parts.max_context}"
        )
    target, drafter = parts.target, parts.drafter
    route(o, engine, prompts[0], tokens)
    shapes = list(dict.fromkeys([PLAIN, *map(chain, o.rows), *o.shapes]))
    work = len(shapes) * (o.rounds + 2)
    with tqdm(total=work, desc="shapes", unit="", disable=None, leave=False) as bar:
        stages.warm(engine, prompts, shapes)
        counts = stages.routed(engine, target, prompts, tokens, shapes, bar)
        speed, size, chains = results.quantile(read, 0.5), Bytes.of(target, drafter, parts.dtype), [*map(chain, o.rows)]
        traffic, timed = stages.Traffic(size, counts, length + tokens // 2, speed, o.batch), stages.Timed()
        for number in range(o.rounds):  # every other one backwards; a run that is ended keeps its whole rounds
            stages.stamped(engine, prompts, tokens, shapes if number % 2 == 0 else shapes[::-1], bar, timed)
            keep(stages.figures(timed, {}, traffic, chains, drafter is not None))
        stages.unstamped(engine, prompts, tokens, shapes, timed)
        rows = sorted({s.draft_tokens for s in shapes}) if o.tp > 1 else []  # a slice leaves its sums out
        sums = collectives.of_a_pass(parts, rows)
        keep([*stages.figures(timed, {}, traffic, chains, drafter is not None), *sums])
        alone = stages.alone(engine, prompts, tokens, shapes, o.repeats, bar)
    made = Figure.of
    figures = [
        made("load", "ms", parts.load_ms),
        made("read_bandwidth", "TB/s", [x / 1e12 for x in read]),
        made(f"prefill.{length}", "ms", timed.prefill),
    ]
    if engine.graphs.capture_ms:
        figures.append(made("capture", "ms", engine.graphs.capture_ms, note="all programs of this run"))
    figures += [*stages.figures(timed, alone, traffic, chains, drafter is not None), *sums]
    if o.routing != "text":  # what is kept of rows that nobody drafted says nothing
        figures = [figure for figure in figures if not figure.name.startswith("accept_length.")]
    figures += fitted(figures, drafter is not None)
    table = table_of_run({"figures": [vars(f) for f in figures]}, "this run") if o.shapes else None
    for shape in o.shapes:
        note = "accept length, bonus counted, from which it beats plain decoding; host and gaps counted"
        figures.append(made(f"break_even.{shape}", "tokens a cycle", table.break_even(shape), note=note))
    return figures


def fitted(figures: list[Figure], drafts: bool) -> list[Figure]:
    """v(n) = a + b n + c U(n) over the rows measured, and the draft's passes: extend + (steps - 1) step."""
    rows = {int(f.name[7:]): f for f in figures if f.name.startswith("verify.") and f.name[7:].isdigit()}
    found = []
    if len(rows) > 1:
        fit = Fit.of({n: f.value for n, f in rows.items()}, {n: f.experts for n, f in rows.items() if f.experts})
        words = {"a": "of any pass", "b": "of a row", "c": "of a different expert a layer"}
        for name, value in (("a", fit.a), ("b", fit.b), ("c", fit.c)):
            if value is not None:
                found.append(Figure.of(f"verify_fit.{name}", "ms", value, note=words[name]))
        found += [
            Figure.of(f"verify_fit.residual.{n}", "ms", x, note="measured less fitted")
            for n, x in fit.residuals.items()
        ]
    values = {f.name: f.value for f in figures}
    drafts = {n: values[f"draft.{chain(n)}"] for n in rows if n > 1 and f"draft.{chain(n)}" in values} if drafts else {}
    if len(drafts) > 1:
        fit = Fit.of({n - 2: ms for n, ms in drafts.items()})
        note = f"fitted over chains, {fit.error:.2g} ms rms"
        found += [Figure.of("draft_extend", "ms", fit.a, note=note), Figure.of("draft_step", "ms", fit.b, note=note)]
    return found


def run(o, command: str) -> list[Figure]:
    """Measure and keep."""
    engine = load(o)
    parts = engine.parts
    if parts.device.type == "cpu":
        torch.set_num_threads(1)
    prompt = texts(o, engine, o.context)
    prompts = [prompt[at:] + prompt[:at] for at in range(o.batch)]
    rows = ROUTING[o.routing].format(o.share)
    if o.routing == "text" and o.draft is None:
        rows = "text: the target's own, replayed as if drafted"
    elif o.routing == "text" and o.random:
        rows = "text of random weights, which falls into loops: rows route alike"
    if o.inject_spin is not None:
        rows += f"; {o.inject_spin:g} ms INJECTED into {o.inject_stage}"

    def keep(figures):
        if o.json:
            load_ = stages.workload(o, engine, rows, prompts, new_tokens(o, engine, prompts), o.batch)
            results.write(o.json, results.document(command, stages.environment(engine), load_, figures))

    figures = measured(o, engine, prompts, bandwidth.read_bandwidth(parts.device), keep)
    keep(figures)
    print(f"routing {rows}")
    return figures


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.verify_vs_draft", parse, run, argv)
