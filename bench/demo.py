"""`python -m bench.demo`: the bundled pair on its held-out prompts, temperature 0: accept lengths, whether the ids are
those of plain decoding, speed, repetition, and the head's agreement with its target. Exit codes: 0; 1 where `--check`
finds a figure short; 2 for what is refused."""

import argparse
import shlex
import statistics
import subprocess
import sys
import time

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from engine.decoding import Quiet, decode
from engine.device import device_of
from engine.engine import Engine
from engine.forced import PAGE, Teacher
from engine.lessons import PROBES, load_target
from engine.loading import Options
from engine.opening import open_draft, open_target
from engine.options import DEMO, Parser, least
from engine.prompts import read
from engine.report import Acceptance, Run
from engine.request import Sampling
from engine.shape import PLAIN, Shape
from engine.streams import Windows, read_stream
from engine.train_head import Head, hits
from weights import Checkpoint
from weights.capture import boundaries
from weights.config import Refused, eos_ids

from .command import Failed
from .results import ROOT, Figure, Workload, document, environment, prompts_hash, writable, write

SHAPES = "3-1-4 2-1-3 1-1-2 4-4-16 5-8-64"
PROMPT = "def quicksort(items):"  # of the README's first command
TTT, WINDOW, TIMED, WARM_UP = 4, 512, 4, 8  # unrolled steps, tokens of a held-out window, prompts timed, tokens before
REACH = {
    "accept_length.3-1-4": (2.4, "at least"),
    "accept_length.2-1-3": (2.0, "at least"),
    "distinct_4gram_share": (0.5, "at least"),
    "first_token_seconds": (15.0, "at most"),
    "tokens_per_second.3-1-4": (40.0, "at least"),
    **{f"identical.{shape}": (1.0, "at least") for shape in ("0-1-1", *SHAPES.split())},
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.demo", __doc__.split("\n\n")[0])
    add = p.add_argument
    add("--json", metavar="FILE", help="write the run there")
    add("--shapes", nargs="+", default=SHAPES.split(), metavar="S-K-D", help=f"default {SHAPES}")
    add("--prompts", type=least(1), default=40, metavar="N", help="the first N held-out prompts; default all 40")
    add("--new-tokens", type=least(2), default=128, metavar="N", help="for each prompt; default %(default)s")
    add("--batch", type=least(1), default=8, metavar="N", help="prompts at once, speed apart; default %(default)s")
    add("--repeats", type=least(1), default=3, metavar="N", help="of what is timed; default %(default)s")
    add("--heldout", metavar="FILE", help="heldout.bin.xz of corpus.py: the head's agreement on that text too")
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--check", action="store_true", help="compare with what the pair must reach; exit 1 where it falls short")
    o, unknown = p.parse_known_args(argv)
    if unknown:
        raise Refused(f"{unknown[0]}: there is no such option; --help lists all")
    o.shapes = [Shape.parse(text) for text in o.shapes]
    if PLAIN in o.shapes:
        raise Refused(f"--shapes {PLAIN}: plain decoding is always measured; supported: shapes that draft")
    if o.check and ((o.prompts, o.new_tokens) != (40, 128) or [str(s) for s in o.shapes] != SHAPES.split()):
        raise Refused("--check: supported with all prompts, 128 new tokens and the default shapes")
    device_of(o.device)
    writable(o.json)
    return o


class Finished(Quiet):
    """Moves a bar on with every request that ends."""

    def __init__(self, bar):
        self.bar = bar

    def show(self, event) -> None:
        """Take one event of engine.session."""
        self.bar.update(bool(event.request.finished))


def first_token(o, bar) -> Figure:
    """Seconds from the start of the command to the first byte of its text."""
    words = [sys.executable, "-m", "engine.generate", PROMPT, *(["--device", o.device] if o.device else [])]
    seconds = []
    for _ in range(min(3, o.repeats)):
        began = time.perf_counter()
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as command:
            first = command.stdout.read(1)
            seconds.append(time.perf_counter() - began)
            command.stdout.read()
        if command.returncode or not first:
            raise RuntimeError(f"{shlex.join(words[1:])}: exit code {command.returncode}")
        bar.update(1)
    note = f"`python -m engine.generate {PROMPT!r}`, its start to the first byte of its text"
    return Figure.of("first_token_seconds", "s", seconds, note=note)


def distinct(ids: list[int], size: int = 4) -> float:
    """Distinct n-grams / n-grams; 1 for an output too short to hold any."""
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def ids_of(run: Run) -> list[list[int]]:
    """Token ids of every output."""
    return [result.token_ids for result in run.results]


def acceptance(shape: Shape, run: Run) -> list[Figure]:
    """Accept length over all cycles, and the share of cycles that kept each draft position."""
    counts = run.acceptance
    own = statistics.mean(Acceptance.of(result.cycles).length for result in run.results if result.cycles)
    note = f"tokens emitted / cycles, over all {counts.cycles} cycles; mean of the requests' own {own:.3f}"
    figures = [Figure.of(f"accept_length.{shape}", "tokens a cycle", counts.length, note=note)]
    for depth, rate in enumerate(counts.by_position, 1):
        figures.append(Figure.of(f"accept_rate.{shape}.{depth}", "share of cycles", rate))
    return figures


def decoding(o, requests, bar) -> tuple[list[Figure], Engine]:
    """Accept lengths, identity and speed, and the engine that ran one request at a time."""
    out, pair = Finished(bar), (str(DEMO / "target"), str(DEMO / "draft"))
    options = {"device": o.device, "prefix_cache": False}  # every prefill is whole
    single, wide = (Engine.load(*pair, max_batch=batch, **options) for batch in (1, o.batch))
    if single.parts.device.type == "cpu":
        torch.set_num_threads(1)  # as the command line does for a pair of this size
    shapes, warm = [PLAIN, *o.shapes], Sampling(max_new_tokens=min(WARM_UP, o.new_tokens))
    for shape in shapes:
        single.prepare(shape)
        wide.prepare(shape, len(requests))
        decode(single, [(requests[0][0], warm)], shape, Quiet())
    runs = {shape: decode(wide, requests, shape, out) for shape in shapes}
    timed = {shape: [] for shape in shapes}
    for _ in range(o.repeats):
        for shape in shapes:  # in turn: what else the machine does falls on all of them alike
            timed[shape].append(decode(single, requests[:TIMED], shape, out))
    figures = [figure for shape in o.shapes for figure in acceptance(shape, runs[shape])]
    figures += [identity(shape, runs, timed[shape], o.batch) for shape in shapes]
    figures += [speed(shape, timed[shape]) for shape in shapes]
    figures += [repetition(runs[PLAIN]), prefill(runs[o.shapes[0]])]
    figures.append(Figure.of("load", "ms", [single.parts.load_ms, wide.parts.load_ms]))
    if single.parts.device.type == "cuda":
        figures.append(Figure.of("capture", "ms", single.graphs.capture_ms, note=f"batch 1, {len(shapes)} shapes"))
    return figures, single


def identity(shape: Shape, runs: dict[Shape, Run], timed: list[Run], batch: int) -> Figure:
    """Whether every run of a shape gave the ids of plain decoding."""
    plain = ids_of(runs[PLAIN])
    few = len(timed[0].results)
    same = ids_of(runs[shape]) == plain and all(ids_of(run) == plain[:few] for run in timed)
    note = f"{len(plain)} prompts at batch {batch}, {few} of them at batch 1: ids of plain decoding at batch {batch}"
    return Figure.of(f"identical.{shape}", "1 or 0", float(same), note=note)


def speed(shape: Shape, timed: list[Run]) -> Figure:
    """Tokens a second at batch 1, one value a repeat."""
    run = timed[0]
    note = f"batch 1, {len(run.results)} prompts, shapes in turn; their accept length {run.acceptance.length:.2f}"
    return Figure.of(f"tokens_per_second.{shape}", "tokens/s", [run.tokens_per_second for run in timed], note=note)


def repetition(run: Run) -> Figure:
    """Distinct 4-grams / 4-grams of an output."""
    shares = [distinct(ids) for ids in ids_of(run)]
    note = f"mean over {len(shares)} outputs; the lowest {min(shares):.2f}"
    return Figure.of("distinct_4gram_share", "share", statistics.mean(shares), note=note)


def prefill(run: Run) -> Figure:
    """Milliseconds a prompt, one value each."""
    rows = [result.prompt_tokens for result in run.results]
    note = f"prompts of {min(rows)} to {max(rows)} tokens, median {statistics.median(rows):g}; target and drafter"
    return Figure.of("prefill", "ms", [result.prefill_ms for result in run.results], note=note)


def agreement(name: str, texts: list[torch.Tensor], head, teacher, bar, note: str) -> list[Figure]:
    """Share of positions at which the head's best token is the target's, per unrolled step, the text given."""
    right, rows = torch.zeros(TTT), 0
    for text in texts:
        if len(text) > TTT:
            found = hits(head, teacher.lesson(text[None].to(head.d2t.device), head.draft_ids), TTT)[0]
            right, rows = right + found.sum(0).cpu(), rows + len(found)
        bar.update(1)
    note = f"{note}; {rows} positions, fp32"
    return [Figure.of(f"{name}.{j + 1}", "share", float(right[j]) / max(rows, 1), note=note) for j in range(TTT)]


def heldout(o) -> list[torch.Tensor]:
    """The windows that engine.train evaluates a head on. Raises Refused where the file cannot be read."""
    opened = open_target(Options(target=str(DEMO / "target")))
    stream = read_stream(o.heldout, opened.folder, opened.config.vocab)
    if len(stream) < 2 * WINDOW:
        raise Refused(f"--heldout {o.heldout}: {len(stream)} tokens; supported: at least {2 * WINDOW}")
    end_ids = eos_ids(opened.checkpoint.config, opened.checkpoint.generation, opened.checkpoint.where)
    return list(Windows(stream, end_ids, WINDOW, 0).corpus(PROBES, WINDOW, 0))


def teaching(requests, windows, device: torch.device, bar) -> list[Figure]:
    """The head in its training form beside its target, both in fp32."""
    options = Options(target=str(DEMO / "target"), draft=str(DEMO / "draft"))
    opened, config = open_target(options), open_draft(options).config
    length = max(WINDOW, *(len(ids) for ids, _ in requests))
    target = load_target(opened, boundaries(config, opened.config.layers), length + PAGE, device)
    checkpoint = Checkpoint.open(DEMO / "draft")
    tensors = {name: checkpoint.read(name, "cpu") for name in checkpoint.names()}
    head = Head(config, tensors["d2t"] + torch.arange(config.draft_vocab), target, length)
    head.load_state_dict(tensors)
    head.to(device)
    teacher = Teacher(target, 1, length, device)
    prompts = [torch.tensor(ids) for ids, _ in requests]
    figures = agreement("head_top1", prompts, head, teacher, bar, "teacher-forced on the prompts' own text")
    if windows:
        note = f"teacher-forced on {len(windows)} windows of {WINDOW} tokens of the held-out files"
        figures += agreement("head_top1_heldout", windows, head, teacher, bar, note)
    return figures


def run(o, argv: list[str]) -> list[Figure]:
    """All of it, written to --json."""
    windows = heldout(o) if o.heldout else []
    prompts = read(str(DEMO / "prompts.jsonl"))[: o.prompts]
    rounds, shapes = min(3, o.repeats), 1 + len(o.shapes)
    work = rounds + (1 + shapes) * len(prompts) + o.repeats * shapes * min(TIMED, len(prompts)) + len(windows)
    with tqdm(total=work, desc="demo", unit="", disable=None, leave=False) as bar:
        figures = [first_token(o, bar)]
        tokenizer = Engine.load(str(DEMO / "target"), device="cpu", max_batch=1)
        sampling = Sampling(max_new_tokens=o.new_tokens)
        requests = [(tokenizer.encode(prompt.content), sampling) for prompt in prompts]
        found, engine = decoding(o, requests, bar)
        figures += found + teaching(requests, windows, engine.parts.device, bar)
    parts = engine.parts
    load = Workload(
        target="weights/demo/target",
        draft="weights/demo/draft",
        layers=engine.target.config.layers,
        tp=1,
        tp_slice=None,
        context=parts.max_context,
        batch=[1, o.batch],
        dtype=str(parts.dtype).removeprefix("torch."),
        routing="text",
        prompts_hash=prompts_hash([ids for ids, _ in requests]),
    )
    if o.json is not None:
        command = shlex.join(["python", "-m", "bench.demo", *argv])
        write(o.json, document(command, environment(parts.device, parts.dtype), load, figures))
    return figures


def short(values: dict[str, float]) -> list[str]:
    """What the pair must reach and `values`, by figure name, does not; a figure that is not there is short too."""
    lines = []
    for name, (bound, word) in REACH.items():
        value = values.get(name)
        if value is None or (value < bound if word == "at least" else value > bound):
            lines.append(f"{name} is {value}; it must be {word} {bound:g}")
    return lines


def judged(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        o = parse(argv)
        figures = run(o, argv)
    except (Refused, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    print("\n".join(figure.line() for figure in figures))
    missed = short({figure.name: figure.value for figure in figures}) if o.check else []
    print("".join(f"SHORT: {line}\n" for line in missed), end="", file=sys.stderr)
    return 1 if missed else 0


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code, 1 where it was interrupted."""
    return interrupt.command(lambda _: judged(sys.argv[1:] if argv is None else argv))
