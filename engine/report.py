"""What a run reports: the definitions of the statistics, the JSON that holds them and the lines that a person reads.
Everything is counted after the cuts; what was not measured is null, never 0 or nan."""

import importlib.metadata
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median

import torch

from .cycle import Cycle
from .tp import environment as nccl


@dataclass(frozen=True)
class Acceptance:
    """Counts over cycles that emitted something; those of two half runs add up to those of the whole run.

    hits[i], tries[i]: cycles that drafted at least i + 1 tokens deep, and those of them that emitted draft token i + 1.
    """

    cycles: int = 0
    emitted: int = 0
    accepted: int = 0  # draft tokens among the emitted ones; the others are the target's own (bonus) tokens
    drafted: int = 0  # sum of the steps: draft tokens that a path could have held
    hits: tuple[int, ...] = ()
    tries: tuple[int, ...] = ()

    @classmethod
    def of(cls, cycles: Iterable[tuple[int, int, int]]) -> "Acceptance":
        """From (tokens emitted, draft tokens among them, steps) of each cycle."""
        total = cls()
        for emitted, accepted, steps in cycles:
            hits = tuple(int(accepted > depth) for depth in range(steps))
            total += cls(1, emitted, accepted, steps, hits, (1,) * steps)
        return total

    def __add__(self, other: "Acceptance") -> "Acceptance":
        def longest(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            size = max(len(a), len(b))
            pairs = zip(a + (0,) * (size - len(a)), b + (0,) * (size - len(b)), strict=True)
            return tuple(x + y for x, y in pairs)

        return Acceptance(
            self.cycles + other.cycles,
            self.emitted + other.emitted,
            self.accepted + other.accepted,
            self.drafted + other.drafted,
            longest(self.hits, other.hits),
            longest(self.tries, other.tries),
        )

    @property
    def length(self) -> float | None:
        """Mean tokens emitted a cycle, the bonus token included."""
        return self.emitted / self.cycles if self.cycles else None

    @property
    def length_drafts(self) -> float | None:
        """The same without the bonus token; null for plain decoding."""
        return self.length - 1 if self.drafted else None

    @property
    def rate(self) -> float | None:
        """Draft tokens emitted / draft tokens that could have been; null for plain decoding."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def by_position(self) -> list[float]:
        """The rate at each depth, over the cycles that drafted that far."""
        return [hit / tries for hit, tries in zip(self.hits, self.tries, strict=True)]

    def report(self) -> dict:
        """Its entries of the statistics."""
        return {
            "accept_length": self.length,
            "accept_length_drafts": self.length_drafts,
            "accept_rate": self.rate,
            "accept_rate_by_position": self.by_position,
        }


def statistics(result) -> dict:
    """The statistics of one finished request (engine.request.Result)."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": len(result.token_ids),
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "shape": asdict(result.shape),
        "cycles": len(result.cycles),
        "emitted_per_cycle": [emitted for emitted, _, _ in result.cycles],
        **Acceptance.of(result.cycles).report(),
        "logprobs": result.logprobs,
        "first_token_ms": result.first_token_ms,
        "reused_tokens": result.reused_tokens,
    }


@dataclass(frozen=True)
class Run:
    """Requests decoded with one shape: results, the seconds (of one clock) of their first and last tokens, and how many
    cycles were launched for them."""

    results: list
    spans: list[tuple[float, float]]
    launches: int
    stages: dict | None = None  # {stage: median ms} where they were timed

    @property
    def decode_seconds(self) -> float:
        """Wall seconds in which at least one request was between its first and its last token."""
        total, end = 0.0, float("-inf")
        for first, last in sorted(self.spans):
            total += max(0.0, last - max(first, end))
            end = max(end, last)
        return total

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after each request's first / decode_seconds."""
        tokens = sum(max(0, len(result.token_ids) - 1) for result in self.results)
        return tokens / self.decode_seconds if tokens and self.decode_seconds > 0 else None

    @property
    def acceptance(self) -> Acceptance:
        """Counts over all requests."""
        return sum((Acceptance.of(result.cycles) for result in self.results), Acceptance())

    def milliseconds(self, load: float, capture: float) -> dict:
        """Medians over requests (prefill, first_token), totals (load, capture, decode), a mean (cycle: decode over the
        cycles launched), or medians over cycles where the stages were timed (cycle, draft, verify, accept, commit)."""
        first = [result.first_token_ms for result in self.results if result.first_token_ms is not None]
        prefill = [result.prefill_ms for result in self.results if result.prefill_ms is not None]
        stages = self.stages or {}
        decode = 1e3 * self.decode_seconds if self.tokens_per_second else None
        return {
            "load": load,
            "capture": capture or None,
            "prefill": median(prefill) if prefill else None,
            "first_token": median(first) if first else None,
            "decode": decode,
            "cycle": stages.get("cycle", decode / self.launches if decode and self.launches else None),
            **{stage: stages.get(stage) for stage in Cycle.stages},
        }


def changes(results: list) -> list[dict]:
    """Where requests changed their shape: [{cycle, shape}], `cycle` counted from 0 over the request's own cycles; of
    several requests each entry names its `request`."""
    found = []
    for index, result in enumerate(results):
        before = None
        for cycle, shape in enumerate(result.shapes):
            if shape != before:
                which = {"request": index} if len(results) > 1 else {}
                found.append(which | {"cycle": cycle, "shape": str(shape)})
            before = shape
    return found


def document(run: Run, parts, graphs: list[dict], capture_ms: float, compare: dict | None = None, shapes=()) -> dict:
    """The statistics of a run, ready for JSON.

    Args:
        parts: engine.loading.Parts; graphs, capture_ms: of engine.graph.Graphs; compare: of engine.compare; shapes:
        `changes`, where the shape chose itself.
    """
    capture, reports = parts.capture, parts.reports
    return {
        "requests": [statistics(result) for result in run.results],
        "ms": run.milliseconds(parts.load_ms, capture_ms),
        "tokens_per_second": run.tokens_per_second,
        **run.acceptance.report(),
        "graphs": graphs,
        "compare": compare,
        "shapes": list(shapes),
        "capture_layers": capture and {"boundaries": list(capture.boundaries), "source": capture.source},
        "weights": {
            "borrowed": [name for report in reports for name, _ in report.borrowed],
            "missing": [name for report in reports for name in report.missing],
            "unexpected": [name for report in reports for name in report.unexpected],
            "guessed": [guess for report in reports for guess in report.guessed],
        },
        "environment": environment(parts),
    }


def environment(parts) -> dict:
    """Where a loaded pair (engine.loading.Parts) runs, and on what."""
    return {
        "gpu": torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else None,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "tp": parts.tp.size,
        "dtype": str(parts.dtype).removeprefix("torch."),
        "kernels": parts.kernels,
        **parallel(parts),
        **nccl(),
    }


def parallel(parts) -> dict:
    """Of several ranks: what carries their sums, how the draft is shared, and what each holds."""
    links = parts.tp.links
    if links is None:
        return {}
    held = {"weights_bytes": [w for w, _ in parts.rank_bytes], "cache_bytes": [c for _, c in parts.rank_bytes]}
    return {"reduction": links.name, **links.facts, "draft_tp": parts.draft_tp, **held}


def loaded(parts) -> list[str]:
    """What a person should know of a load: tensors by name, capture layers. Memory was announced before."""
    lines = []
    for report in parts.reports:
        lines += report.lines()
    if parts.tp.size > 1:
        each = ", ".join(f"{weights / 1e9:.3f}" for weights, _ in parts.rank_bytes)
        lines.append(parts.tp.held(each))
    if parts.tp.size > 1 and parts.drafter is not None:
        lines.append(f"draft {parts.draft_tp}")
    if parts.capture is not None:
        boundaries = ", ".join(map(str, parts.capture.boundaries))
        doubt = "GUESSED, give --capture-layers to be sure: " if parts.capture.source == "guessed" else ""
        lines.append(f"capture layers: boundaries {boundaries} ({doubt}{parts.capture.why})")
    return lines + [f"head: {line}" for line in parts.measured]


def decoded(run: Run, compare: dict | None, templated: int) -> list[str]:
    """What a person should know of a run. `templated`: requests that went through the chat template."""
    counts, ran = run.acceptance, Counter(shape for result in run.results for shape in result.shapes)
    total, new = sum(r.prompt_tokens for r in run.results), sum(len(r.token_ids) for r in run.results)
    several = f"{len(run.results)} prompts, " if len(run.results) > 1 else ""
    template = f"chat template applied to {templated}" if templated else "raw, no chat template"
    reasons = sorted({f"{r.finish_reason}{'' if r.stop is None else f' at {r.stop!r}'}" for r in run.results})
    lines = [f"{several}{total} prompt tokens ({template}), {new} new; ended by {', '.join(reasons[:5])}"]
    first = run.milliseconds(0, 0)["first_token"]
    if first is not None and run.tokens_per_second:
        lines.append(f"first token {first:.0f} ms, then {run.tokens_per_second:.1f} tokens/s")
    if counts.rate is not None:
        depths = " ".join(f"{rate:.2f}" for rate in counts.by_position)
        lines.append(
            f"accept length {counts.length:.2f} ({counts.length_drafts:.2f} without the bonus token) "
            f"over {counts.cycles} cycles of {_names(ran)}; accept rate {counts.rate:.2f}, by position {depths}"
        )
    if run.stages is not None and run.stages["cycle"] is not None:
        parts = ", ".join(f"{stage} {run.stages[stage]:.3f}" for stage in (*Cycle.stages, "gap") if run.stages[stage])
        lines.append(f"a cycle takes {run.stages['cycle']:.3f} ms (median): {parts}")
    if compare is not None and compare["speedup"]:
        same = {True: "the same ids", False: "DIFFERENT ids", None: "other draws"}[compare["identical"]]
        spread = f"{min(compare['speedup_by_round']):.2f} to {max(compare['speedup_by_round']):.2f} by round"
        lines.append(
            f"plain {compare['plain_tokens_per_second']:.1f} tokens/s, with speculation "
            f"{compare['speculative_tokens_per_second']:.1f}: {compare['speedup']:.2f}x, {same} ({spread})"
        )
    return lines


def _names(ran: Counter) -> str:
    """Shapes by how many cycles they ran."""
    if len(ran) == 1:
        return f"shape {next(iter(ran))}"
    several = ran.most_common(4)
    more = f" and {len(ran) - 4} more" if len(ran) > 4 else ""
    return f"shapes {', '.join(f'{shape} ({count})' for shape, count in several)}{more}"
