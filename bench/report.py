"""`python -m bench.report RESULTS… --out FILE.html`: one page that holds everything, and its plots as PNG files beside
it, for readers who have not seen the code and on a phone too."""

import argparse
import base64
import html
import re
import sys
from pathlib import Path

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

from engine.options import Parser
from weights.config import Refused

from . import reading
from .verdict import SYNTHETIC

TITLES = {
    "verify": (
        "What it costs to check several tokens at once",
        "One verify pass of the target over so many rows. In a mixture-of-experts model every further row may "
        "need experts that no row before it needed, and each of those is read from memory: that is why "
        "checking four tokens costs more than checking one. The dashed line is what the memory alone would "
        "take.",
    ),
    "cycle": (
        "Where a cycle's time goes",
        "A cycle drafts tokens, verifies them, accepts what is right and tidies the cache (commit); the gap "
        "is the wait for the next cycle. The dashed line is one token of plain decoding: a cycle must emit "
        "more tokens than it is long in such units.",
    ),
    "speed": (
        "Tokens per second",
        "Each bar is a shape (auto: whichever seems best, cycle by cycle); bars beyond the dashed line are faster than "
        "plain decoding, measured in the same process, turn by turn.",
    ),
    "predicted": (
        "Predicted and measured cycles",
        "Predicted: what a table of costs says that was measured apart from the run, as the engine measures one to "
        "choose its shape. By its parts: the sum of stage times and of what the cycles of other shapes take besides; "
        "where that is right, speed can be foretold for shapes that nobody has run.",
    ),
    "acceptance": (
        "How many guesses are kept",
        "The share of cycles that kept the first, second, third … drafted token. One more token is the "
        "target's own, and comes with every cycle.",
    ),
    "classes": (
        "What the draft is good at",
        "How often the draft's best guess, or one of its best, is the token that the target would choose, by class of "
        "token, read along a text: a part of a name is harder than a bracket.",
    ),
    "kept": (
        "Which guesses are kept",
        "While the fastest shape decoded: of the tokens of each class that were due where the draft had a guess, the "
        "share that it had guessed.",
    ),
}
MADE_UP = {
    "wrong_draft": "On a draft that is always wrong",
    "good_then_bad": "On a draft that is right in the first half of the text and wrong in the second",
    "bad_then_good": "On a draft that is wrong in the first half of the text and right in the second",
}
WORDS = {
    "target, draft": "the large model whose text it is, and the small one that guesses ahead",
    "shape S-K-D": "S draft passes of K candidates each; D tokens are verified at once (the last known one among them)",
    "accept length": "mean tokens a cycle emits; the target's own token counts, so 1 is the least",
    "breaks even": "the accept length from which a shape is faster than plain decoding",
    "p10, p90": "a tenth of the measurements lie below the one, a tenth above the other",
    "experts": "parts of a layer of which each token uses a few; a pass reads those that any of its rows uses",
}
STYLE = """
:root{color-scheme:light}
body{margin:0 auto;max-width:46rem;padding:1rem;font:1.05rem/1.5 system-ui,"DejaVu Sans",sans-serif}
body{color:#1b1b1b;background:#fff}h1{font-size:1.6rem;line-height:1.2}
h2{font-size:1.3rem;margin-top:2.5rem;border-top:3px solid #0072b2;padding-top:.7rem}
h3{font-size:1.1rem;margin:1.8rem 0 .3rem}
img{display:block;width:100%;max-width:38rem;height:auto;margin:.6rem auto}
.short{background:#eef5fa;border-left:4px solid #0072b2;padding:.6rem 1rem}.short p{margin:.3rem 0}
.warn{background:#fdf0e6;border-left:4px solid #d55e00;padding:.6rem 1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
td,th{padding:.2rem .6rem;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}tr:nth-child(even){background:#f6f6f6}
code{overflow-wrap:anywhere}summary{cursor:pointer;padding:.4rem 0}dt{font-weight:600}dd{margin:0 0 .5rem 1rem}
"""


def short(run: dict) -> list[str]:
    """What the run says, in sentences."""
    from .plots import by_name, rows_of, shapes_of

    found, said = by_name(run), []

    def value(name: str) -> float | None:
        return found[name]["value"] if name in found else None

    plain, token = value("tokens_per_second.0-1-1"), value("plain")
    if plain:
        said.append(f"Plain decoding gives {plain:.1f} tokens per second.")
    elif token:
        said.append(f"A token of plain decoding takes {token:.4g} ms.")
    if "recommended" in found:
        said.append(f"{found['recommended']['note']}.".replace("recommended", "Recommended", 1))
    if "auto_of_best" in found:
        best = found["auto_of_best"]
        said.append(f"A shape that chooses itself reaches {best['value']:.3f} {best['note']}.")
    for name, words in MADE_UP.items():
        if name in found:  # its note: SYNTHETIC; of what; when the shape changed
            label, of, when = found[name]["note"].split("; ")
            said.append(f"{words} ({label}) it reaches {found[name]['value']:.3f} {of}. It makes {when}.")
    rows = rows_of(found)
    if 1 in rows and len(rows) > 1:
        at = 4 if 4 in rows else rows[-1]
        one, several = found["verify.1"], found[f"verify.{at}"]
        text = f"Verifying {at} rows takes {several['value'] / one['value']:.2f} times as long as one"
        if one["experts"] and several["experts"]:
            text += f", and reads {several['experts']:.1f} different experts a layer instead of {one['experts']:.1f}"
        said.append(f"{text}.")
    if "recommended" not in found:
        for shape in shapes_of(found, "break_even"):
            least, length = value(f"break_even.{shape}"), value(f"accept_length.{shape}")
            kept = (
                ""
                if length is None
                else f"; it keeps {length:.2f} here and {'pays' if length > least else 'does not pay'}"
            )
            said.append(f"Shape {shape} pays from an accept length of {least:.2f}{kept}.")
    return said


def _table(rows: list[tuple], head: tuple) -> str:
    """Rows of texts and numbers; None is left empty."""

    def cell(x) -> str:
        if isinstance(x, float | int) and not isinstance(x, bool):
            return f'<td class="n">{x:.4g}</td>'
        return f"<td>{'' if x is None else html.escape(str(x))}</td>"

    top = "".join(f"<th>{html.escape(word)}</th>" for word in head)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def section(name: str, run: dict, folder: Path, stem: str) -> str:
    """One run: its sentences, its plots, and everything it measured."""
    from .plots import PLOTS, save

    load, environment = run["workload"], run["environment"]
    machine = environment.get("gpu") or environment.get("cpu") or "unknown machine"
    out = [f"<h2>{html.escape(name)}</h2>"]
    pair = f"{load['target']} with draft {load['draft']}" if load["draft"] else f"{load['target']}, no draft"
    out.append(
        f"<p>{html.escape(pair)}; {html.escape(str(load['dtype']))} on {html.escape(machine)}, TP {load['tp']}, "
        f"{html.escape(str(run['when'])[:10])}. Routing: {html.escape(load['routing'])}.</p>"
    )
    if SYNTHETIC in load["routing"]:
        out.append(
            '<p class="warn"><b>Synthetic acceptance.</b> No draft earned these accept lengths: they were set, '
            "so that the cost of a cycle can be read as tokens per second.</p>"
        )
    if "INJECTED" in load["routing"]:
        out.append('<p class="warn"><b>A delay was injected</b> to test the clock; nothing here is a speed.</p>')
    unbroken = [re.sub(r"(?<=\d)-(?=\d)", "\u2011", line) for line in short(run)]  # a shape stays on one line
    said = "".join(f"<p>{html.escape(line)}</p>" for line in unbroken)
    if said:
        out.append(f'<div class="short">{said}</div>')
    for plot, (title, text) in TITLES.items():
        path = folder / f"{stem}-{name}-{plot}.png"
        if save(PLOTS[plot], run, path):
            picture = base64.b64encode(path.read_bytes()).decode()
            out.append(f"<h3>{html.escape(title)}</h3><p>{html.escape(text)}</p>")
            out.append(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{picture}">')
    head = ("figure", "median", "unit", "p10", "p90", "floor", "experts", "note")
    keys = ("name", "value", "unit", "p10", "p90", "floor", "experts", "note")
    rows = [tuple(figure[key] for key in keys) for figure in run["figures"]]
    out.append(f"<details><summary>All {len(rows)} figures</summary>{_table(rows, head)}</details>")
    settings = [("command", run["command"]), ("commit", f"{run['commit']}{' and changes' if run['dirty'] else ''}")]
    settings += [*load.items(), *environment.items()]
    rows = [(key, None if value is None else str(value)) for key, value in settings]
    out.append(f"<details><summary>Settings</summary>{_table(rows, ('setting', 'value'))}</details>")
    return "\n".join(out)


def page(runs: dict[str, dict], folder: Path, stem: str) -> str:
    """The whole page; its plots are written to `folder` too."""
    words = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in WORDS.items())
    parts = "\n".join(section(name, run, folder, stem) for name, run in runs.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Speculative decoding, measured</title><style>{STYLE}</style></head><body>
<h1>Speculative decoding, measured</h1>
<p>A draft model guesses some tokens ahead, and the target checks all of them in one pass. The text stays the target's
own; what changes is how fast it comes. Whether that pays depends on how many guesses are right and on what checking
them costs.</p>
<details><summary>Words used here</summary><dl>{words}</dl></details>
{parts}
</body></html>
"""


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.report", __doc__)
    p.add_argument("results", nargs="+", metavar="RESULTS.json", help="kept runs, e.g. of verify_vs_draft and sweep")
    p.add_argument("--out", default="report.html", metavar="FILE.html", help="the page; default %(default)s")
    o = p.parse_args(argv)
    if Path(o.out).is_dir() or not Path(o.out).absolute().parent.is_dir():
        raise Refused(f"--out {o.out}: supported: a file in an existing directory")
    return o


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        o = parse(sys.argv[1:] if argv is None else argv)
        runs = {}
        for path in o.results:
            name = Path(path).stem
            runs[name if name not in runs else f"{name}-{len(runs)}"] = reading.read(path)
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise Refused("bench.report: matplotlib is not installed; supported: pip install -e '.[bench]'") from None
        out = Path(o.out)
        out.write_text(page(runs, out.absolute().parent, out.stem), encoding="utf-8")
    except (Refused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, {len(runs)} runs")
    return 0
