"""What a sweep's measurements come to: the cost table behind its predictions, its figures, and the shape to use."""

import statistics

from engine.cost import CostTable
from engine.shape import PLAIN, Shape

from . import reading, stages
from .classes import kept
from .results import Figure

SYNTHETIC = "SYNTHETIC acceptance"


def figures(taken: dict, table: CostTable, timed: stages.Timed, label: str) -> list[Figure]:
    """Speed, acceptance, predicted and measured cycles of every shape; plain decoding first.

    taken: {Shape: engine.compare.Taken}; label: begins the note of all that depends on acceptance.
    """
    made = Figure.of
    plain, found = taken[PLAIN], []
    found.append(made("plain", "ms", plain.cycle, note="a token, host included"))
    for shape, one in taken.items():
        found.append(
            made(f"tokens_per_second.{shape}", "tokens/s", one.speed, note=label + f"{sum(one.tokens)} tokens")
        )
        found.append(made(f"cycle.{shape}", "ms", one.cycle, note="measured, host and gaps counted"))
        ways = {"predicted_cycle": (table.cycle, "by a cost table measured beside it")}
        if len(taken) > 2 and shape != PLAIN:
            ways["cycle_of_parts"] = table.of_parts, "verify, draft passes, and what other shapes take besides"
        for name, (way, words) in ways.items():
            off = 100 * (way(shape) / statistics.median(one.cycle) - 1)
            note = f"{words}; {off:+.1f} % off the measured cycle"
            found.append(made(f"{name}.{shape}", "ms", way(shape), note=note))
        note = label + "against plain decoding, round by round"
        if shape == PLAIN:
            continue
        ratios = [a / b for a, b in zip(one.speed, plain.speed, strict=True)]
        found.append(made(f"speedup.{shape}", "times plain", ratios, note=note))
        counts = one.acceptance
        note = f"{label}{counts.cycles} cycles, bonus counted"
        found.append(made(f"accept_length.{shape}", "tokens a cycle", counts.length, note=note))
        for depth, rate in enumerate(counts.by_position, 1):
            found.append(made(f"accept_rate.{shape}.{depth}", "share of cycles", rate, note=label + "by position"))
        found.append(made(f"break_even.{shape}", "tokens a cycle", table.break_even(shape), note="by the cost table"))
        found.append(made(f"identical.{shape}", "all runs", one.same, note="the ids of plain decoding"))
        for stage in ("draft", "verify", "accept", "commit", "gap"):
            values = timed.series[shape][stage] or [0.0]
            found.append(made(f"{stage}.{shape}", "ms", values, note="stamped, in every round"))
    return found


def by_class(results: dict, decode) -> list[Figure]:
    """What each shape kept of each class of token; results: {Shape: [engine.request.Result]}, decode: ids -> text."""
    figures = []
    for shape, several in results.items():
        for name, (hits, tries) in kept(several, decode).items():
            note = f"of {tries} guesses where such a token was due"
            named = f"class_rate.{shape}.{name.replace(' ', '_')}"
            figures.append(Figure.of(named, "share of guesses", hits / tries, note=note))
    return figures


def best(found: dict[str, Figure]) -> float:
    """The greatest speed-up over plain decoding, 1 where no shape is faster."""
    return max(1.0, *(f.value for name, f in found.items() if name.startswith("speedup.")))


def recommendation(found: dict[str, Figure]) -> str:
    """The shape to use, how far it is ahead and how sure that is; `found`: figures by name."""
    gains = {name.removeprefix("speedup."): f for name, f in found.items() if name.startswith("speedup.")}
    order = sorted(gains, key=lambda shape: gains[shape].value, reverse=True)

    def words(shape: str) -> str:
        f = gains[shape]
        return f"{shape} at {f.value:.2f} times plain ({min(f.repeats):.2f} to {max(f.repeats):.2f} by round)"

    best = order[0]
    second = f"; next {words(order[1])}" if len(order) > 1 else ""
    if max(gains[best].repeats) <= 1:
        text = f"plain decoding: no shape is faster; the nearest is {words(best)}"
    elif min(gains[best].repeats) <= 1:
        text = f"plain decoding: no shape is ahead in every round; the nearest is {words(best)}"
    else:
        text = f"{words(best)}{second}"
        if second and min(gains[best].repeats) <= max(gains[order[1]].repeats):
            text += ": their spreads overlap, either will do"
    label = f"{SYNTHETIC}: " if any(SYNTHETIC in (f.note or "") for f in gains.values()) else ""
    return f"{label}recommended: {text}"


def table_lines(shapes: list[Shape], found: dict[str, Figure]) -> list[str]:
    """The sweep as a table for the terminal."""
    columns = ("tokens/s", "x plain", "accept", "breaks even", "cycle ms", "predicted")
    lines = [f"{'shape':>8} " + " ".join(f"{column:>11}" for column in columns) + "  by position"]

    def value(name: str, shape: Shape) -> float:
        return found[f"{name}.{shape}"].value if f"{name}.{shape}" in found else 1.0

    for shape in (PLAIN, *shapes):
        off = 100 * (value("predicted_cycle", shape) / value("cycle", shape) - 1)
        rates = [f.value for n, f in found.items() if n.startswith(f"accept_rate.{shape}.")]
        numbers = [value(n, shape) for n in ("tokens_per_second", "speedup", "accept_length", "break_even", "cycle")]
        words = " ".join(f"{x:11.2f}" for x in numbers)
        lines.append(f"{shape!s:>8} {words} {off:+10.1f}%  {' '.join(f'{r:.2f}' for r in rates)}")
    return lines


def against(stored: dict, found: dict[str, Figure], path: str) -> list[str]:
    """Tokens/s now and in a stored run of the same settings."""
    lines = []
    for name, figure in found.items():
        before = reading.value(stored, name) if name.startswith("tokens_per_second.") else None
        if before:
            shape = name.removeprefix("tokens_per_second.")
            lines.append(f"{shape:>8} {figure.value / before:.3f} of {before:.1f} tokens/s in {path}")
    return lines
