"""`python -m bench.cost TABLE.json --accept-length 2.1`: which shapes pay, by a table of measured milliseconds or a run
that `python -m bench.verify_vs_draft --json` wrote. The arithmetic is engine.cost."""

import argparse
import math
import sys
from collections.abc import Mapping

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

from engine.cost import CostTable, table_of
from engine.options import Parser
from engine.shape import PLAIN, Shape
from weights.config import Refused


def table_of_run(run: dict, where: str) -> CostTable:
    """From a run of bench.verify_vs_draft: verify by rows, the rest of each shape. A cycle is what the host's
    clock says of it without stamps, in older runs what stamps and gaps between stamped cycles come to."""
    value = {figure["name"]: figure for figure in run["figures"]}
    rows = {int(n.split(".")[1]): f for n, f in value.items() if n.startswith("verify.") and n.split(".")[1].isdigit()}
    shapes = [Shape.parse(n.removeprefix("cycle.")) for n in value if n.startswith("cycle.")]
    if "plain" not in value or not rows or not shapes:
        raise Refused(
            f"{where}: it lacks 'plain', 'verify.N' or 'cycle.S-K-D'; supported: a run of bench.verify_vs_draft"
        )

    def whole(shape: Shape, stamped: str) -> float:
        """The shape's cycle, host and gaps counted; stamped: the figure of its stamps."""
        end = "" if shape == PLAIN else f".{shape}"
        if f"wall{end}" in value:
            return value[f"wall{end}"]["value"]
        return value[stamped]["value"] + value.get(f"gap{end}", {"value": 0.0})["value"]

    verify = {n: figure["value"] for n, figure in rows.items()}
    table = CostTable(whole(PLAIN, "plain"), verify)
    rest = {s: whole(s, f"cycle.{s}") - table.verify_ms(s.draft_tokens) for s in shapes}
    counted = {n: figure["experts"] for n, figure in rows.items() if figure["experts"] is not None}
    return CostTable(table.plain, verify, rest, experts=counted or None, shapes=tuple(shapes))


def read(path: str) -> CostTable:
    """A table or a run. Raises Refused naming the file and what is wrong in it."""
    from .reading import parsed, run_of

    raw = parsed(path)
    return table_of_run(run_of(raw, path), path) if "figures" in raw else table_of(raw, path)


def lengths_of(words: list[str], table: CostTable) -> dict[Shape, float]:
    """Accept lengths as given, "2.1" for all shapes or "3-1-4=2.1" for one. Raises Refused."""
    found = {}
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not value >= 1:
            raise Refused(
                f"--accept-length {word}: supported: numbers from 1 (the bonus token counts), or S-K-D=NUMBER"
            )
        for shape in [Shape.parse(name)] if name else table.shapes:
            found[shape] = value
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.cost", __doc__.split("\n\n")[0])
    p.add_argument("table", metavar="TABLE.json", help="a cost table, or a run of bench.verify_vs_draft")
    p.add_argument(
        "--accept-length", nargs="+", default=[], metavar="X|S-K-D=X", help="tokens a cycle, the bonus token counted"
    )
    return p.parse_args(argv)


def lines(table: CostTable, lengths: Mapping[Shape, float]) -> list[str]:
    """What the command prints."""
    out = [table.fit.line(), f"plain token {table.plain:.4g} ms"]
    for shape in lengths or table.shapes:
        words = (
            f"{shape!s:8} cycle {table.cycle(shape):.4g} ms, breaks even at accept length {table.break_even(shape):.2f}"
        )
        if shape in lengths:
            most = f" (of {lengths[shape]:g} it can emit {shape.path})" if lengths[shape] > shape.path else ""
            words += f", {table.tokens_per_second(shape, lengths[shape]):.1f} tokens/s at {lengths[shape]:g}{most}"
        out.append(words)
    return [*out, table.decision(lengths)] if lengths else out


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        o = parse(sys.argv[1:] if argv is None else argv)
        table = read(o.table)
        print("\n".join(lines(table, lengths_of(o.accept_length, table))))
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
