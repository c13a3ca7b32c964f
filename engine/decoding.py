"""What `python -m engine.generate` does: the text on stdout as it comes, a short report on stderr, statistics in a
file. Its options are those of engine.options."""

import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from weights.config import Refused

from . import launch, options, prompts, report
from .auto import AUTO
from .compare import Taken, comparison, turns
from .engine import Engine
from .interrupt import Interruptions
from .profile import Profile
from .request import Sampling
from .rules import Sampled, rule_of
from .session import NonFinite
from .shape import PLAIN
from .tp import launched

ROUNDS = 3  # of a comparison
WARM_UP = 8  # tokens decoded each way before a comparison is timed
SMALL = 256 << 20  # bytes of weights below which CPU threads wait for each other longer than they work


def command(argv: list[str], stop: Interruptions) -> int:
    """The command line, as ranks where --tp or torchrun says so; returns the exit code."""
    try:
        o = options.parse(argv)
        if launched() is not None:
            return launch.guarded(lambda: run(o, stop))
        return launch.command("engine.generate", argv, o.tp) if o.tp > 1 else run(o, stop)
    except (Refused, NonFinite) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1


def run(o, stop: Interruptions) -> int:
    """Load, decode and report as `o`, the parsed options, says; returns 0."""
    given = [prompts.Prompt(o.prompt, "")] if o.prompt_file is None else prompts.read(o.prompt_file)
    given = prompts.chat(given) if o.chat else given
    samplings = [sampling(o, prompt.seed) for prompt in given]
    target, draft = options.pair(o)
    shape = options.shape(o, draft)

    engine = load(o, target, draft, None if shape == AUTO else shape, stop)
    say(report.loaded(engine.parts))
    if engine.parts.device.type == "cpu" and sum(part.nbytes for part in engine.parts.reports) < SMALL:
        torch.set_num_threads(1)
    requests = [(encode(engine, prompt), how) for prompt, how in zip(given, samplings, strict=True)]
    out = Typewriter() if o.batch == 1 else InOrder()
    profile = Profile() if o.profile else None
    if shape == AUTO:
        engine.auto.table(engine.batch(len(requests)))
        say([f"shape auto: one of {', '.join(map(str, engine.auto.candidates()))} a cycle; costs {engine.auto.said()}"])
    if o.compare:
        for warm in (PLAIN, shape):
            decode(engine, [(requests[0][0], sampling(o, None, WARM_UP))], warm, Quiet(), stop)
    before, compare = launches(engine), None
    done = decode(engine, requests, shape, out, stop, profile)
    if o.compare:
        drawn = isinstance(rule_of(samplings), Sampled)
        compare = comparison(*interleaved(engine, requests, shape, o.batch, stop), drawn=drawn)
    say(report.decoded(done, compare, sum(prompt.templated for prompt in given)))
    if o.stats is not None and engine.parts.tp.rank == 0:
        graphs = [entry | since(entry, before) for entry in engine.graphs.report()]
        shapes = report.changes(done.results) if shape == AUTO else ()
        document = report.document(done, engine.parts, graphs, engine.graphs.capture_ms, compare, shapes)
        text = json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            Path(o.stats).write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"error: --stats {o.stats}: {error.strerror}; the text above is whole", file=sys.stderr)
            return 1
    return 0


def sampling(o, seed: int | None = None, most: int | None = None) -> Sampling:
    """How one request is decoded; `seed` is its own, `most` caps its tokens further."""
    asked = {"temperature": o.temperature, "top_k": o.top_k, "top_p": o.top_p, "min_p": o.min_p}
    asked["seed"] = o.seed if seed is None else seed
    return Sampling(
        max_new_tokens=o.max_new_tokens if most is None else min(most, o.max_new_tokens),
        stop=o.stop,
        stop_ids=o.stop_id,
        ignore_eos=o.ignore_eos,
        logprobs=o.logprobs,
        **{name: value for name, value in asked.items() if value is not None},
    )


def load(o, target: str | None, draft: str, shape, stop: Interruptions) -> Engine:
    """The engine, a bar on a terminal while weights are read and while cycles are captured."""
    with tqdm(desc="weights", unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            stop.look()
            bar.total = total
            bar.update(done - bar.n)

        return Engine.load(
            target,
            draft,
            shape,
            graphs=o.graphs,
            progress=progress,
            announce=lambda line: say([line]),
            capturing=lambda programs: tqdm(programs, desc="graphs", unit="", disable=None, leave=False),
            random=o.random,
            layers=o.layers,
            device=o.device,
            dtype=o.dtype,
            max_context=o.max_context,
            max_batch=o.batch,
            pages=o.pages,
            page_size=o.page_size,
            prefill_chunk=o.prefill_chunk,
            prefix_cache=not (o.no_prefix_cache or o.compare),  # both ways of a comparison start from nothing
            capture_layers=o.capture_layers,
            check=not o.no_check,
            tp=o.tp,
            tp_slice=o.tp_slice,
            expert_parallel=o.expert_parallel,
            draft_tp=o.draft_tp,
        )


def encode(engine: Engine, prompt: prompts.Prompt) -> list[int]:
    """Token ids of a prompt; what is wrong with it is said with where it stands."""
    try:
        if isinstance(prompt.content, str) and not prompt.content.strip():
            raise Refused("prompt: it is empty; supported: at least one token")
        return engine.encode(prompt.content)
    except Refused as error:
        raise Refused(f"{prompt.where}{error}") from None


def decode(engine: Engine, requests: list[tuple[list[int], Sampling]], shape, out, stop=None, profile=None):
    """Decode all requests, each event shown to `out` -> report.Run; stop: Interruptions that may end it between events;
    profile: an engine.profile.Profile that takes stage times."""
    results, spans = {}, {}
    events = engine.stream_all(*map(list, zip(*requests, strict=True)), shape=shape, profile=profile)
    before = sum(sum(counts) for counts in launches(engine).values())
    try:
        for event in events if stop is None else stop.between(events):
            out.show(event)
            request = event.request
            if request.finished:
                results[request.index] = request.result(PLAIN if shape == AUTO else shape)
                spans[request.index] = (request.first, request.last)
    except (KeyboardInterrupt, NonFinite):
        out.stop()
        raise
    after = sum(sum(counts) for counts in launches(engine).values())
    order = sorted(results)
    stages = None if profile is None else profile.medians()
    return report.Run([results[i] for i in order], [spans[i] for i in order], after - before, stages)


def interleaved(engine: Engine, requests: list[tuple[list[int], Sampling]], shape, batch: int, stop) -> list[Taken]:
    """The requests decoded plainly and with `shape` in turn, one by one where they run one by one, each in ROUNDS."""
    units = [[request] for request in requests] if batch == 1 else [requests]
    taken, expected = {way: Taken() for way in (PLAIN, shape)}, {}
    work = list(turns(taken, len(units), ROUNDS))
    for turn, unit, way in tqdm(work, desc="compare", unit="", disable=None, leave=False):
        done = decode(engine, units[unit], way, Quiet(), stop)
        ids = [result.token_ids for result in done.results]
        taken[way].add(turn, done.results, 1e3 * done.decode_seconds, expected.setdefault(unit, ids))
    return list(taken.values())


def launches(engine: Engine) -> dict[tuple[int, str], tuple[int, int]]:
    """(replays, eager runs) of each (batch, shape) so far."""
    return {(e["batch"], e["shape"]): (e["replays"], e["eager"]) for e in engine.graphs.report()}


def since(entry: dict, before: dict) -> dict:
    """The counts of an entry less those of `before`."""
    replays, eager = before.get((entry["batch"], entry["shape"]), (0, 0))
    return {"replays": entry["replays"] - replays, "eager": entry["eager"] - eager}


class Quiet:
    """Shows nothing."""

    def show(self, event) -> None:
        """Take one event of engine.session."""

    def stop(self) -> None:
        """Nothing more will come: show what there is."""


class Typewriter(Quiet):
    """Writes the one request in progress as it comes; ids where there is no tokenizer."""

    def __init__(self):
        self.inside = False  # a line

    def show(self, event) -> None:
        """Write what the event released, and a line's end after the last."""
        piece = "".join(f"{token} " for token in event.tokens) if event.text is None else event.text
        print(piece, end="\n" if event.request.finished else "", flush=True)
        self.inside = not event.request.finished

    def stop(self) -> None:
        """End the line."""
        if self.inside:
            print(flush=True)


class InOrder(Quiet):
    """Writes the texts of requests that run at once one after the other, in the order of the prompts."""

    def __init__(self):
        self.pieces, self.next, self.ended = {}, 0, set()

    def show(self, event) -> None:
        """Keep what the event released; write every text that is whole and whose turn it is."""
        index = event.request.index
        piece = " ".join(map(str, event.tokens)) + " " if event.text is None else event.text
        self.pieces[index] = self.pieces.get(index, "") + piece
        if event.request.finished:
            self.ended.add(index)
        while self.next in self.ended:
            print(self.pieces.pop(self.next), flush=True)
            self.next += 1

    def stop(self) -> None:
        """Write what has come of the others."""
        for index in sorted(self.pieces):
            print(self.pieces.pop(index), flush=True)


def say(lines: list[str]) -> None:
    """Lines for the person at the terminal."""
    print("\n".join(lines), file=sys.stderr)
