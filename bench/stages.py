"""Times of a cycle's stages, inside the cycle and alone, and the experts its verify reads.

Shapes are taken in turn, round by round, so that what else the machine does falls on all of them alike.
"""

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field

import torch

from engine import Engine, Sampling
from engine.cycle import Cycle
from engine.layers.view import view
from engine.profile import Profile
from engine.report import Acceptance, parallel
from engine.shape import PLAIN, Shape

from . import results
from .results import Figure, Workload
from .traffic import Bytes, Routed

SKIPPED = 2  # first cycles of a run: the clock, the caches and the host are not in step yet


def sampling(tokens: int) -> Sampling:
    """Greedy, to the end of the count."""
    return Sampling(max_new_tokens=tokens, ignore_eos=True)


def environment(engine: Engine) -> dict:
    """results.environment, and how cycles ran."""
    parts = engine.parts
    found = results.environment(parts.device, parts.dtype, parts.tp.size)
    return found | parallel(parts) | {"graphs": engine.graphs.reason or "captured", "kernels": parts.kernels}


def workload(o, engine: Engine, routing: str, prompts: list[list[int]], new_tokens: int, batch: int = 1) -> Workload:
    """What was run; paths in the repository are written as such."""

    def name(path: str | None) -> str | None:
        return None if path is None else path.removeprefix(f"{results.ROOT}/")

    parts = engine.parts
    return Workload(
        target=o.random or name(o.target),
        draft=name(o.draft),
        layers=parts.target.config.layers,
        tp=parts.tp.size if engine.options.tp_slice is None else 1,
        tp_slice=engine.options.tp_slice,
        context=max(map(len, prompts)) + new_tokens,
        batch=batch,
        dtype=str(parts.dtype).removeprefix("torch."),
        routing=routing,
        prompts_hash=results.prompts_hash(prompts),
    )


def each(prompt: list) -> list[list[int]]:
    """Prompts of a run: one, a list of ids, or a list of those, which then run at once."""
    return prompt if isinstance(prompt[0], list) else [prompt]


@dataclass
class Timed:
    """series: {Shape: {stage: [ms a cycle]}}, `cycle` and `gap` too; wall: {Shape: [ms a cycle]} without stamps;
    cycles: {Shape: Acceptance}; prefill: ms."""

    series: dict[Shape, dict[str, list[float]]] = field(default_factory=dict)
    wall: dict[Shape, list[float]] = field(default_factory=dict)
    cycles: dict[Shape, Acceptance] = field(default_factory=dict)
    prefill: list[float] = field(default_factory=list)


def warm(engine: Engine, prompt: list, shapes: list[Shape]) -> None:
    """Capture and run every shape once, with stamps and without; prompt: as `each` takes it, here and below."""
    for shape in shapes:
        for profile in (None, Profile()):
            engine.generate(each(prompt), sampling(2 * shape.path + 1), shape=shape, profile=profile)


def stamped(engine: Engine, prompt, tokens: int, shapes: list[Shape], bar, found: Timed) -> None:
    """Stage times of a run of each warm shape, by the stamps that its own cycles write, into `found`."""
    for shape in shapes:
        profile = Profile()
        done = engine.generate(each(prompt), sampling(tokens), shape=shape, profile=profile)
        own = found.series.setdefault(shape, {})
        for name, values in profile.series().items():
            late = values[SKIPPED:] if len(values) > 2 * SKIPPED else values
            own.setdefault(name, []).extend(round(x, 5) for x in late)
        for result in done:
            found.cycles[shape] = found.cycles.get(shape, Acceptance()) + Acceptance.of(result.cycles)
            found.prefill.append(result.prefill_ms)
        bar.update(1)


def unstamped(engine: Engine, prompt, tokens: int, shapes: list[Shape], found: Timed) -> None:
    """The host's clock over a run of each shape as users have it, into found.wall."""
    for shape in shapes:
        result = engine.generate(each(prompt), sampling(tokens), shape=shape)[-1]  # it began when all had
        if result.cycles:
            found.wall.setdefault(shape, []).append(result.decode_ms / len(result.cycles))


def routed(
    engine: Engine, target, prompt: list[int], tokens: int, shapes: list[Shape], bar
) -> dict[Shape, list[float]]:
    """{Shape: different experts that one verify pass read, of each layer}, counted by a twin of the engine that shares
    its weights; {} for a target without experts.

    target: the engine's own, without a delay around it.
    """
    if not getattr(target.config, "experts", None):
        bar.update(len(shapes))
        return {}
    parts = engine.parts
    count, ops = Routed.table(parts.ops, target.config, parts.device)
    twin = dataclasses.replace(parts, target=view(target, ops), ops=ops)  # prompt_ops stay: prompts are not counted
    if parts.prompt_ops is parts.ops:
        twin.prompt_ops = dataclasses.replace(parts.ops)  # equal, and another object: prompts run the plain table
    twin = Engine(twin, engine.options, engine.shape, "off" if engine.graphs.reason else "auto")
    found = {}
    for shape in shapes:
        twin.prepare(shape, len(each(prompt)), rows=span(prompt, tokens, shape))
        count.reset()
        twin.generate(each(prompt), sampling(tokens), shape=shape)
        found[shape] = count.means()
        bar.update(1)
    return found


def span(prompt: list, tokens: int, shape: Shape) -> tuple[int, int]:
    """(fewest, most) rows of one request in such a run, those of drafted nodes counted."""
    lengths = [len(ids) + shape.rows_past_prefix for ids in each(prompt)]
    return min(lengths), max(lengths) + tokens


def alone(engine: Engine, prompt: list[int], tokens: int, shapes: list[Shape], repeats: int, bar) -> dict:
    """{Shape: {stage: [ms]}} of each stage as a program (on CUDA: a graph) of its own, over the state that a request in
    progress has after a cycle, put back before every run."""
    found, prompts = {}, each(prompt)
    for shape in shapes:
        drafter = None if shape == PLAIN else engine.drafter
        long = [sampling(max(tokens, 3 * shape.path))] * len(prompts)
        with contextlib.closing(engine.stream_all(prompts, long, shape=shape)) as events:
            for _ in zip(range(len(prompts) + 1), events, strict=False):  # their first tokens, a first cycle
                pass
            batch = engine.batch(len(prompts))
            columns = engine.programs.width(span(prompt, 2 * shape.path, shape)[1])
            cycle = engine.programs.cycle(batch, shape, drafter, detail=False, stamped=False, columns=columns)
            _wait(engine.parts.device)
            kept, times = cycle.state.snapshot(), {stage: [] for stage in Cycle.stages}
            for stage in Cycle.stages if shape != PLAIN else ("verify",):
                engine.graphs.prepare(cycle, batch, shape, (stage,))
                for _ in range(repeats):
                    cycle.state.restore(kept)
                    times[stage].append(_ms(engine, cycle, batch, shape, stage))
                cycle.state.restore(kept)
        found[shape] = times
        bar.update(1)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ms(engine: Engine, cycle: Cycle, batch: int, shape: Shape, stage: str) -> float:
    """One run of one stage: events around a graph's launch, or the host's clock."""
    if engine.parts.device.type != "cuda":
        began = time.perf_counter()
        engine.graphs.run(cycle, batch, shape, (stage,))
        return (time.perf_counter() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    engine.graphs.run(cycle, batch, shape, (stage,))
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@dataclass(frozen=True)
class Traffic:
    """What a verify pass must read: `counts` of `routed`, `positions` committed before it in each of `batch` requests,
    `speed` in bytes/s."""

    size: Bytes
    counts: dict[Shape, list[float]]
    positions: int
    speed: float
    batch: int = 1

    def of(self, shape: Shape) -> tuple[float, float | None, str]:
        """(bytes of its verify, mean different experts a layer or None, both in words)."""
        each = self.counts.get(shape)
        mean = sum(each) / len(each) if each else None
        total = self.size.verify(self.batch * shape.draft_tokens, mean or 0.0, self.batch * self.positions)
        words = f"{total / 1e6:.4g} MB"
        if each:
            words += f"; {mean:.2f} different experts a layer, {min(each):.2f} to {max(each):.2f}"
        return total, mean, words

    def floor_ms(self, nbytes: float) -> float:
        """Milliseconds that so many bytes take at the bandwidth measured."""
        return nbytes / self.speed * 1e3


def figures(timed: Timed, alone: dict, traffic: Traffic, chains: list[Shape], drafts: bool) -> list[Figure]:
    """A Figure for everything: `plain`, `verify.N` of chains, and of every shape its stages, cycle and gap. alone: of
    all shapes or, as long as they have not run, of none."""
    found, made = [], Figure.of
    for shape, series in timed.series.items():
        nbytes, experts, words = traffic.of(shape)
        floor, inside = traffic.floor_ms(nbytes), f"inside the cycle {shape}; {words}"
        if shape == PLAIN:
            found.append(made("plain", "ms", series["cycle"], floor=floor, experts=experts, note=words))
        if shape in chains:
            rows = f"{shape.draft_tokens}"
            found.append(made(f"verify.{rows}", "ms", series["verify"], floor=floor, experts=experts, note=inside))
            found.append(made(f"verify_bytes.{rows}", "MB", nbytes / 1e6))
        if shape in alone and alone[shape]["verify"]:
            note = "a program of its own"
            found.append(made(f"alone.verify.{shape}", "ms", alone[shape]["verify"], floor=floor, note=note))
        found.append(
            made(
                "gap" if shape == PLAIN else f"gap.{shape}",
                "ms",
                series["gap"] or [0.0],
                note="between cycles of a stamped run",
            )
        )
        if shape in timed.wall:
            idle = results.quantile(timed.wall[shape], 0.5) - results.quantile(series["cycle"], 0.5)
            note = f"a cycle of a run without stamps, by the host's clock: {1e3 * idle:.1f} us above the stamped cycle"
            found.append(made("wall" if shape == PLAIN else f"wall.{shape}", "ms", timed.wall[shape], note=note))
        if shape == PLAIN:
            continue
        found.append(made(f"verify.{shape}", "ms", series["verify"], floor=floor, experts=experts, note=words))
        passes = traffic.floor_ms(shape.steps * traffic.size.draft) if drafts else None
        for stage in ("draft", "accept", "commit", "cycle"):
            bound = passes if stage == "draft" else None
            found.append(made(f"{stage}.{shape}", "ms", series[stage], floor=bound))
            if stage != "cycle" and shape in alone:
                note = "a program of its own"
                found.append(made(f"alone.{stage}.{shape}", "ms", alone[shape][stage], floor=bound, note=note))
        counts = timed.cycles[shape]
        if counts.length is not None:
            note = f"{counts.cycles} cycles on this routing"
            found.append(made(f"accept_length.{shape}", "tokens a cycle", counts.length, note=note))
    return found
