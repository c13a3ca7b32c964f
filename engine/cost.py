"""The model of a cycle: what a shape costs beside plain decoding, and the accept length from which it pays.

Nothing here measures; all times are milliseconds.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weights.config import Refused

from .shape import PLAIN, Shape

APART = 0.02  # share of U(n) that must lie outside a + b n before its own coefficient can be told from theirs
KEYS = {"plain", "verify", "rest", "extend", "step", "experts", "shapes", "catch_up"}


def distinct(experts: int, top_k: int, rows: int) -> float:
    """Expected different experts of a layer that `rows` independently routed rows read: E (1 - (1 - k/E)^n)."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def expected_length(rates: list[float], steps: int) -> float:
    """Accept length, bonus included, of a chain of `steps` whose share of cycles keeping draft token i is rates[i]."""
    return 1 + sum(rates[:steps])


@dataclass(frozen=True)
class Fit:
    """v(n) = a + b n + c U(n): a is paid by any pass, b by every row, c by every different expert of a layer.

    residuals: measured less fitted, by rows; c None where U was not counted or cannot be told from a + b n.
    """

    a: float
    b: float
    c: float | None
    residuals: dict[int, float]

    @classmethod
    def of(cls, times: Mapping[int, float], experts: Mapping[int, float] | None = None) -> "Fit":
        """Least squares over `times` {rows: ms}; experts {rows: different experts a layer}."""
        rows = sorted(times)
        n, v = np.array(rows, float), np.array([times[r] for r in rows], float)
        columns = [np.ones(len(n))]
        if len(n) > 1:
            columns.append(n)
        if experts is not None and len(n) > 3 and all(r in experts for r in rows):
            u = np.array([experts[r] for r in rows], float)
            apart = u - np.stack(columns, 1) @ np.linalg.lstsq(np.stack(columns, 1), u, rcond=None)[0]
            if np.linalg.norm(apart) > APART * np.linalg.norm(u):
                columns.append(u)
        matrix = np.stack(columns, 1)
        found = np.linalg.lstsq(matrix, v, rcond=None)[0]
        residuals = {r: float(x) for r, x in zip(rows, v - matrix @ found, strict=True)}
        a, b, c = (*map(float, found), *[None] * (3 - len(found)))
        return cls(a, b or 0.0, c, residuals)

    def __call__(self, rows: int, experts: float | None = None) -> float:
        """Fitted ms of `rows`, which read `experts` different experts a layer."""
        return self.a + self.b * rows + (self.c * experts if self.c is not None and experts is not None else 0.0)

    @property
    def error(self) -> float:
        """Root of the mean squared residual."""
        return math.sqrt(sum(x * x for x in self.residuals.values()) / len(self.residuals))

    def line(self) -> str:
        """For a person."""
        expert = "" if self.c is None else f" + {self.c:.4g} U(n)"
        worst = max(self.residuals, key=lambda rows: abs(self.residuals[rows]))
        about = f"; residuals {self.error:.3g} ms rms, {self.residuals[worst]:+.3g} at {worst} rows"
        few = len(self.residuals) <= (2 if self.c is None else 3)
        return (
            f"verify(n) = {self.a:.4g} + {self.b:.4g} n{expert} ms{'; no residuals: as few points' if few else about}"
        )


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a machine and a pair.

    plain: a plain token; verify: {rows: ms}; rest: what a cycle takes besides verify and the drafting given here, one
    number or {Shape: ms}; extend: the first draft pass; step: {topk: ms of each later one}; experts: {rows: different
    experts a layer}, measured; catch_up: {rows: ms} of the drafter's pass over text it has not seen.
    """

    plain: float
    verify: dict[int, float]
    rest: float | dict[Shape, float] = 0.0
    extend: float = 0.0
    step: dict[int, float] = field(default_factory=dict)
    experts: dict[int, float] | None = None
    shapes: tuple[Shape, ...] = ()
    catch_up: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of_stages(cls, stages: Mapping[Shape, Mapping[str, Sequence[float]]], whole: Mapping[Shape, float], **more):
        """From stamped cycles, {Shape: {"draft" and "verify": [ms]}}, and from whole ones without stamps, {Shape: ms},
        plain decoding among them: verify by rows, the first draft pass and later ones by topk; the rest of each shape
        is what its whole cycle takes besides. more: other fields."""
        shapes, by_rows = [shape for shape in whole if shape != PLAIN], {}
        for shape in shapes:
            by_rows.setdefault(shape.draft_tokens, []).extend(stages[shape]["verify"])
        widths = sorted({shape.topk for shape in shapes})
        matrix = [[1.0, *((s.steps - 1.0) * (s.topk == k) for k in widths)] for s in shapes]
        drafts = [statistics.median(stages[s]["draft"]) for s in shapes]
        extend, *steps = np.linalg.lstsq(np.array(matrix), drafts, rcond=None)[0]
        table = cls(
            plain=whole[PLAIN],
            verify={n: statistics.median(values) for n, values in by_rows.items()},
            extend=float(extend),
            step={k: float(x) for k, x in zip(widths, steps, strict=True)},
            shapes=tuple(shapes),
            **more,
        )
        return replace(table, rest={s: whole[s] - table.cycle(s) for s in shapes})

    @property
    def fit(self) -> Fit:
        """v(n) over the rows measured."""
        return Fit.of(self.verify, self.experts)

    def verify_ms(self, rows: int) -> float:
        """Measured where it was, else fitted (U between measured rows is interpolated)."""
        if rows in self.verify:
            return self.verify[rows]
        counts = None
        if self.experts:
            at = sorted(self.experts)
            counts = float(np.interp(rows, at, [self.experts[r] for r in at]))
        return self.fit(rows, counts)

    def draft_ms(self, shape: Shape) -> float:
        """One extend pass and steps - 1 single ones."""
        if shape.steps == 0:
            return 0.0
        widths = sorted(self.step)
        step = float(np.interp(shape.topk, widths, [self.step[k] for k in widths])) if widths else 0.0
        return self.extend + (shape.steps - 1) * step

    def cycle(self, shape: Shape) -> float:
        """Predicted ms of a whole cycle: where it was measured, that."""
        if isinstance(self.rest, dict) and shape in self.rest:
            return self.verify_ms(shape.draft_tokens) + self.draft_ms(shape) + self.rest[shape]
        return self.of_parts(shape)

    def of_parts(self, shape: Shape) -> float:
        """Predicted ms of a whole cycle as if it had not been measured: verify of so many rows, the draft passes, and
        what the cycles of other shapes take besides."""
        if shape == PLAIN:
            return self.plain
        rest = self.rest
        if isinstance(rest, dict):
            rest = statistics.median([ms for s, ms in rest.items() if s != shape] or [0.0])
        return self.verify_ms(shape.draft_tokens) + self.draft_ms(shape) + rest

    def catch_up_ms(self, rows: int) -> float:
        """Of the narrowest pass that takes so many rows; 0 where none was measured."""
        fits = [width for width in self.catch_up if width >= rows] or list(self.catch_up)
        return self.catch_up[min(fits, key=lambda width: abs(width - rows))] if fits else 0.0

    def break_even(self, shape: Shape) -> float:
        """The accept length, bonus included, at which the shape is as fast as plain decoding: v(n) + K d, in tokens."""
        return self.cycle(shape) / self.plain

    def tokens_per_second(self, shape: Shape, accept_length: float) -> float:
        """Predicted; an accept length above what the shape can emit counts as that."""
        return 1e3 * min(accept_length, shape.path) / self.cycle(shape)

    def decision(self, lengths: Mapping[Shape, float]) -> str:
        """Which of the shapes pay at these accept lengths, in one line."""
        pays = [s for s in lengths if min(lengths[s], s.path) > self.break_even(s)]
        several = sorted({round(x, 3) for x in lengths.values()})
        at = f"at an accept length of {several[0]:g}" if len(several) == 1 else "at these accept lengths"
        plain = f"plain decoding gives {1e3 / self.plain:.1f} tokens/s"
        if not pays:
            who = {1: f"shape {next(iter(lengths))} does not pay", 2: "neither shape pays"}
            return f"{at}, {who.get(len(lengths), f'none of {len(lengths)} shapes pays')}: {plain}, the most"
        best = max(pays, key=lambda s: self.tokens_per_second(s, lengths[s]))
        speed = self.tokens_per_second(best, lengths[best])
        gain = f"{best} gives {speed:.1f} tokens/s, {1e-3 * speed * self.plain:.2f} times plain decoding"
        if len(pays) == len(lengths):
            who = {1: f"shape {best} pays", 2: "both shapes pay"}.get(len(lengths), f"all {len(lengths)} shapes pay")
        else:
            who = f"{len(pays)} of {len(lengths)} shapes pay{'s' * (len(pays) == 1)} ({', '.join(map(str, pays))})"
        return f"{at}, {who}: {gain}"


def _times(raw: object, where: str, key: str) -> dict[int, float]:
    """{rows: ms} of a JSON object. Raises Refused."""
    if not isinstance(raw, dict) or not raw:
        raise Refused(f"{where}: key '{key}' is {raw!r}; supported: {{rows: number}}, at least one")
    for rows, value in raw.items():
        if not rows.isdecimal() or int(rows) < 1 or not _number(value):
            raise Refused(f"{where}: key '{key}' has {rows!r}: {value!r}; supported: rows from 1, numbers above 0")
    return {int(rows): float(value) for rows, value in raw.items()}


def _number(value: object, above: float = 0.0, least: float = math.inf) -> bool:
    """Whether it is a finite number greater than `above`, or `least` or more."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return ok and (value > above or value >= least)


def table_of(raw: dict, where: str) -> CostTable:
    """A cost table of JSON: plain, verify {rows: ms}, and optionally rest (ms, or {"5-1-6": ms, …}), extend,
    step {topk: ms}, experts {rows: U}, catch_up {rows: ms}, shapes ["5-1-6", …] (default: the chain of each row count).
    Raises Refused naming the key."""
    unknown = sorted(set(raw) - KEYS)
    if unknown:
        raise Refused(f"{where}: key '{unknown[0]}' is unknown; supported: {', '.join(sorted(KEYS))}")
    if not _number(raw.get("plain")):
        raise Refused(f"{where}: key 'plain' is {raw.get('plain')!r}; supported: milliseconds above 0")
    own = raw["rest"] if isinstance(raw.get("rest"), dict) else {}
    for key, value in (("rest", 0 if own else raw.get("rest", 0)), ("extend", raw.get("extend", 0))):
        if not _number(value, least=0):
            raise Refused(f"{where}: key '{key}' is {value!r}; supported: milliseconds from 0")
    for name, value in own.items():  # what a shape takes less than its parts say is below 0
        if not _number(value, -math.inf):
            raise Refused(f"{where}: key 'rest' has {name!r}: {value!r}; supported: milliseconds")
    verify = _times(raw.get("verify"), where, "verify")
    step = _times(raw["step"], where, "step") if "step" in raw else {}
    experts = _times(raw["experts"], where, "experts") if "experts" in raw else None
    catch_up = _times(raw["catch_up"], where, "catch_up") if "catch_up" in raw else {}
    chains = [f"{n - 1}-1-{n}" for n in sorted(verify) if n > 1]
    listed = raw.get("shapes", chains)
    if not isinstance(listed, list) or not all(isinstance(s, str) for s in listed):
        raise Refused(f"{where}: key 'shapes' is {listed!r}; supported: a list such as [\"5-1-6\"]")
    shapes = tuple(shape for shape in map(Shape.parse, listed) if shape != PLAIN)
    if not shapes:
        raise Refused(f"{where}: no shape drafts; supported: 'verify' with more than one row, or 'shapes'")
    rest = {Shape.parse(name): float(ms) for name, ms in own.items()} if own else float(raw.get("rest", 0))
    return CostTable(float(raw["plain"]), verify, rest, float(raw.get("extend", 0)), step, experts, shapes, catch_up)


def json_of(table: CostTable) -> dict:
    """What `table_of` reads back."""
    raw = {key: value for key, value in vars(table).items() if value not in (None, {}, ())}
    rest = {str(s): ms for s, ms in table.rest.items()} if isinstance(table.rest, dict) else table.rest
    times = {key: {str(n): ms for n, ms in value.items()} for key, value in raw.items() if isinstance(value, dict)}
    return raw | times | {"rest": rest, "shapes": list(map(str, table.shapes))}
