"""The plots of a report: wide enough for a desktop, with letters that a phone still shows. Each returns a figure of
matplotlib, or None where the run lacks what it needs."""

import matplotlib
from matplotlib.figure import Figure as Canvas

STAGES = {"draft": "#E69F00", "verify": "#0072B2", "accept": "#009E73", "commit": "#CC79A7", "gap": "#AAAAAA"}
BLUE, RED, GREY, GREEN = "#0072B2", "#C0392B", "#8A8A8A", "#009E73"
STYLE = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 14,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "savefig.dpi": 200,
}
WIDTH = 5.4  # inches


def by_name(run: dict) -> dict[str, dict]:
    """{name: figure} of a run."""
    return {figure["name"]: figure for figure in run["figures"]}


def rows_of(found: dict[str, dict]) -> list[int]:
    """Row counts whose verify was measured."""
    return sorted(int(n[7:]) for n in found if n.startswith("verify.") and n[7:].isdigit())


def shapes_of(found: dict[str, dict], name: str) -> list[str]:
    """Shapes that have a figure `name`, plain decoding left out, in order of what they verify."""
    shapes = [n.removeprefix(f"{name}.") for n in found if n.startswith(f"{name}.")]
    shapes = [s for s in shapes if s.count("-") == 2 and s != "0-1-1"]
    return sorted(shapes, key=lambda s: [int(x) for x in s.split("-")][::-1])


def _spread(figure: dict) -> tuple[float, float]:
    """Distances of p10 and p90 from the median."""
    if figure["p10"] is None:
        return 0.0, 0.0
    return max(0.0, figure["value"] - figure["p10"]), max(0.0, figure["p90"] - figure["value"])


def _canvas(height: float, panels: int = 1, **shared):
    canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
    return canvas, canvas.subplots(panels, 1, **shared)


def verify(run: dict) -> Canvas | None:
    """Verify time against rows, its fit and its floor; below, the experts read."""
    found = by_name(run)
    rows = rows_of(found)
    if len(rows) < 2:
        return None
    figures = [found[f"verify.{n}"] for n in rows]
    counted = [(n, f["experts"]) for n, f in zip(rows, figures, strict=True) if f["experts"] is not None]
    panels = 2 if counted else 1
    canvas, axes = _canvas(6.2 if counted else 4.2, panels, sharex=True, squeeze=False)
    top = axes[0][0]
    bars = list(zip(*map(_spread, figures), strict=True))
    top.errorbar(
        rows, [f["value"] for f in figures], bars, fmt="o", color=BLUE, capsize=3, label="measured, 10 to 90 %"
    )
    residuals = {n: found.get(f"verify_fit.residual.{n}") for n in rows}
    if all(residuals.values()):
        fitted = [f["value"] - residuals[n]["value"] for n, f in zip(rows, figures, strict=True)]
        top.plot(rows, fitted, color=BLUE, alpha=0.6, label="fit a + b n + c U(n)")
    if all(f["floor"] is not None for f in figures):
        top.plot(rows, [f["floor"] for f in figures], "--", color=RED, label="floor: bytes / bandwidth")
    top.set(ylabel="ms", title="Verify pass", ylim=(0, None))
    top.legend(loc="upper left")
    if counted:
        bottom = axes[1][0]
        bottom.plot(*zip(*counted, strict=True), "s-", color=GREEN)
        bottom.set(ylabel="experts a layer", title="Different experts that were read", ylim=(0, None))
    axes[-1][0].set_xlabel("rows verified at once")
    axes[-1][0].xaxis.get_major_locator().set_params(integer=True)
    return canvas


def cycle(run: dict) -> Canvas | None:
    """Where the cycle of each shape goes, one bar a shape; a line for one plain token."""
    found = by_name(run)
    shapes = [s for s in shapes_of(found, "draft") if f"verify.{s}" in found]
    if "speedup" not in "".join(found):
        shapes = [s for s in shapes if f"break_even.{s}" in found] or shapes
    if not shapes:
        return None
    canvas, axis = _canvas(1.9 + 0.42 * len(shapes))
    left = [0.0] * len(shapes)
    for stage, colour in STAGES.items():
        values = [found[f"{stage}.{s}"]["value"] if f"{stage}.{s}" in found else 0.0 for s in shapes]
        axis.barh(shapes, values, left=left, color=colour, label=stage)
        left = [a + b for a, b in zip(left, values, strict=True)]
    if "plain" in found:
        axis.axvline(found["plain"]["value"], color=RED, ls="--", label="one plain token")
    axis.set(xlabel="ms a cycle", ylabel="shape")
    axis.invert_yaxis()
    canvas.legend(loc="outside upper center", ncols=3)
    return canvas


def speed(run: dict) -> Canvas | None:
    """Tokens/s of each shape with the line of plain decoding."""
    found = by_name(run)
    shapes, plain = shapes_of(found, "tokens_per_second"), found.get("tokens_per_second.0-1-1")
    if not shapes or plain is None:
        return None
    shapes += ["auto"] if "tokens_per_second.auto" in found else []
    canvas, axis = _canvas(1.8 + 0.42 * len(shapes))
    figures = [found[f"tokens_per_second.{s}"] for s in shapes]
    colours = [GREEN if f["value"] > plain["value"] else GREY for f in figures]
    bars = list(zip(*map(_spread, figures), strict=True))
    axis.barh(shapes, [f["value"] for f in figures], xerr=bars, color=colours, error_kw={"capsize": 3})
    line = f"{plain['value']:.0f}" if plain["value"] >= 100 else f"{plain['value']:.3g}"
    axis.axvline(plain["value"], color=RED, ls="--", label=f"plain decoding, {line}")
    axis.set(xlabel="tokens/s", ylabel="shape")
    axis.invert_yaxis()
    canvas.legend(loc="outside upper center")
    return canvas


def predicted(run: dict) -> Canvas | None:
    """Predicted beside measured cycle of each shape, and how far off."""
    found = by_name(run)
    shapes = shapes_of(found, "predicted_cycle")
    if not shapes:
        return None
    canvas, axis = _canvas(1.8 + 0.42 * len(shapes))
    measured = [found[f"cycle.{s}"] for s in shapes]
    guesses = [found[f"predicted_cycle.{s}"]["value"] for s in shapes]
    bars = list(zip(*map(_spread, measured), strict=True))
    axis.errorbar([f["value"] for f in measured], shapes, xerr=bars, fmt="o", color=BLUE, capsize=3, label="measured")
    axis.plot(guesses, shapes, "D", color=RED, mfc="none", ms=8, label="predicted")
    parts = {f"cycle_of_parts.{s}": s for s in shapes if f"cycle_of_parts.{s}" in found}
    axis.plot([found[name]["value"] for name in parts], [*parts.values()], "x", color=GREEN, ms=8, label="by its parts")
    widest = max(*guesses, *(found[name]["value"] for name in parts), *(f["p90"] or f["value"] for f in measured))
    for shape, f, guess in zip(shapes, measured, guesses, strict=True):
        axis.text(widest * 1.06, shape, f"{100 * (guess / f['value'] - 1):+.0f} %", va="center", fontsize=11.5)
    axis.set(xlabel="ms a cycle", ylabel="shape", xlim=(0, widest * 1.25))
    axis.invert_yaxis()
    canvas.legend(loc="outside upper center", ncols=3)
    return canvas


def acceptance(run: dict) -> Canvas | None:
    """Share of cycles that kept each draft position."""
    found = by_name(run)
    shapes = list(dict.fromkeys(n.split(".")[1] for n in found if n.startswith("accept_rate.") and n.count(".") == 2))
    if not shapes:
        return None
    canvas, axis = _canvas(4.4 + 0.16 * len(shapes))
    for number, shape in enumerate(sorted(shapes, key=lambda s: [int(x) for x in s.split("-")])):
        rates, depth = [], 1
        while f"accept_rate.{shape}.{depth}" in found:
            rates.append(found[f"accept_rate.{shape}.{depth}"]["value"])
            depth += 1
        line = "o-" if shape.split("-")[1] == "1" else "s--"
        axis.plot(range(1, depth), rates, line, label=shape, color=matplotlib.colormaps["tab10"](number % 10))
    axis.set(xlabel="draft position", ylabel="share of cycles that kept it", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    canvas.legend(loc="outside upper center", ncols=3, title="shape (dashed: trees)")
    return canvas


def classes(run: dict) -> Canvas | None:
    """Teacher-forced agreement of a head's first pass by class of token."""
    found = by_name(run)
    names = [n.removeprefix("top1.1.") for n in found if n.startswith("top1.1.")]
    if not names:
        return None
    canvas, axis = _canvas(2.0 + 0.45 * len(names))
    wider = next(n for n in found if n.endswith(f".1.{names[0]}") and not n.startswith("top1.")).split(".")[0]
    labels = [name.replace("_", " ") for name in names]
    best = [found[f"{wider}.1.{name}"]["value"] for name in names]
    axis.barh(labels, best, color="#9CC7E2", label=f"among its {wider[3:]} best")
    axis.barh(labels, [found[f"top1.1.{name}"]["value"] for name in names], color=BLUE, height=0.5, label="its best")
    axis.set(xlabel="share of tokens guessed", xlim=(0, 1))
    axis.invert_yaxis()
    canvas.legend(loc="outside upper center", ncols=2)
    return canvas


def kept(run: dict) -> Canvas | None:
    """Guesses kept by class of token, of the shape that kept most tokens for its time."""
    found = by_name(run)
    shapes = sorted({n.split(".")[1] for n in found if n.startswith("class_rate.")})
    if not shapes:
        return None
    shape = max(shapes, key=lambda s: found[f"speedup.{s}"]["value"] if f"speedup.{s}" in found else 0.0)
    names = [n.split(".", 2)[2] for n in found if n.startswith(f"class_rate.{shape}.")]
    canvas, axis = _canvas(1.6 + 0.45 * len(names))
    rates = [found[f"class_rate.{shape}.{name}"]["value"] for name in names]
    axis.barh([name.replace("_", " ") for name in names], rates, color=BLUE)
    axis.set(xlabel=f"share of guesses kept, shape {shape}", xlim=(0, 1))
    axis.invert_yaxis()
    return canvas


PLOTS = {
    "verify": verify,
    "cycle": cycle,
    "speed": speed,
    "predicted": predicted,
    "acceptance": acceptance,
    "classes": classes,
    "kept": kept,
}


def save(plot, run: dict, path) -> bool:
    """Draw one plot to a PNG file; False where the run has nothing for it."""
    with matplotlib.rc_context(STYLE):
        canvas = plot(run)
        if canvas is not None:
            canvas.savefig(path)
    return canvas is not None
