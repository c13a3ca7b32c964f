"""`python -m engine.diagnose`: is this head wired to this target as it was trained? States which boundaries feed it and
why, and how often it names the target's own next token under every reading of its files, teacher-forced on a text.
Exit codes: 0; 3 where another reading is clearly better than the one in force; 2 refused; 1 failed."""

import argparse
import sys

from . import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from weights.capture import FINAL
from weights.config import Refused

from . import prompts
from .device import DTYPES
from .engine import Engine
from .launch import guarded
from .options import DEMO, Parser, least
from .ranks import RankFailed, spawn
from .tp import launched, ranks_started
from .wiring import FEWEST, PASSES, WINDOW, Examination, Verdict, texts_for

LOST = 0.05  # agreement under which no reading can be called right


def parser() -> Parser:
    """Every option."""
    p = Parser("python -m engine.diagnose", __doc__)
    add = p.add_argument
    add("--target", metavar="DIR|HUB_ID", help="default: the demo pair")
    add("--draft", metavar="DIR|HUB_ID", help="an EAGLE-3 head; default: the demo draft with the demo target")
    add("--capture-layers", metavar="boundary:A,B,C|output:A,B,C", help="judge this in place of the draft's config")
    add("--text", metavar="FILE", help="*.jsonl: prompt | token_ids | messages; else one text; default: the demo's")
    add("--tokens", type=least(FEWEST), default=2048, metavar="N", help="the first N of the text; default %(default)s")
    add("--tp", type=least(1), metavar="N", help="ranks, a GPU each; default 1, under torchrun all that it started")
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on CUDA, float32 on the CPU")
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    o, unknown = parser().parse_known_args(argv)
    if unknown:
        raise Refused(f"{unknown[0]}: there is no such option; --help lists all")
    o.tp = o.tp or ranks_started()
    if o.target is None:
        o.target, o.draft = str(DEMO / "target"), o.draft or str(DEMO / "draft")
    if o.draft is None or o.draft == "none" or o.draft.startswith("random:"):
        raise Refused(f"--draft {o.draft or 'none'}: there is no trained head to examine; supported: DIR, HUB_ID")
    return o


def texts(o, engine: Engine) -> list[list[int]]:
    """The texts of --text, `o.tokens` tokens at most. Raises Refused."""
    out, left = [], o.tokens
    for prompt in prompts.read(o.text, "--text"):
        ids = prompts.encoded(prompt, engine.parts.text, engine.target.head.vocabulary)[:left]
        out += [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]
        left -= len(ids)
    return out


def table(verdict: Verdict) -> list[str]:
    """A line for each reading, the best one first and marked."""
    width = max(len(f.reading.name) for f in verdict.findings)
    passes = " ".join(f"pass {i}" for i in range(1, PASSES + 1))
    lines = [f"  {'reading':{width}}  top-1  {passes}  against the one in force  boundaries"]
    for finding in sorted(verdict.findings, key=lambda f: -f.agreement):
        gain, error = finding.against(verdict.force)
        each = " ".join(f"{100 * share:6.1f}" for share in finding.by_pass)
        against = "" if finding is verdict.force else f"{100 * gain:+.1f} ± {100 * error:.1f} points"
        mark = "*" if finding is verdict.best else " "
        shares = f"{100 * finding.agreement:5.1f}  {each}"
        where = ", ".join(map(str, finding.reading.boundaries))
        lines.append(f"{mark} {finding.reading.name:{width}}  {shares}  {against:24}  {where}")
    return lines


def conclusion(verdict: Verdict) -> str:
    """What to make of it, in one line."""
    best, force = verdict.best, verdict.force
    if best.agreement < LOST:
        return f"verdict: the head does not know this target under any reading ({best.agreement:.1%})"
    if not verdict.wrong:
        near = "" if best is force else f" ('{best.reading.name}' is no further ahead than chance or a trifle)"
        return f"verdict: the reading in force is right, as far as this text tells{near}"
    gain, error = best.against(force)
    better = f"'{best.reading.name}' is {100 * gain:.1f} ± {100 * error:.1f} points better"
    return f"verdict: WRONG READING IN FORCE: {better}; {remedy(best.reading, force.reading)}"


def remedy(best, force) -> str:
    """What makes the engine take reading `best`."""
    out = []
    if best.captured == (FINAL,):
        out.append("say 'use_aux_hidden_state': false in its config.json")
    elif best.captured != force.captured:
        out.append(f"give --capture-layers boundary:{','.join(map(str, best.captured))}")
    if best.boundaries != best.captured:
        out.append(
            f"its fc.weight joins layers in the order {list(best.boundaries)}: put its columns in ascending order"
        )
    if best.norm_before_residual != force.norm_before_residual:
        out.append(f"set 'norm_before_residual' to {str(best.norm_before_residual).lower()} in its config.json")
    if best.recycle != force.recycle:
        value = str(best.recycle == "post-norm").lower()
        out.append(f"set 'return_hidden_post_norm' to {value} in eagle_config of its config.json")
    return "; ".join(out)


SOURCES = {"config": "read from the config", "override": "given", "guessed": "GUESSED"}


def wiring(parts) -> list[str]:
    """What is in force and why."""
    config, capture = parts.drafter.config, parts.capture
    boundaries = ", ".join(map(str, capture.boundaries))
    return [
        f"in force: boundaries {boundaries}, {SOURCES[capture.source]}: {capture.why}",
        f"the config's layer ids: {'none' if config.aux_ids is None else ', '.join(map(str, config.aux_ids))}",
        f"{config.recycle} recycling, norm_before_residual {str(config.norm_before_residual).lower()}",
        *(f"GUESSED: {guess}" for _, guess in config.guesses),
    ]


def run(o) -> int:
    """Load, examine, print; returns the exit code."""
    words = {name: getattr(o, name) for name in ("tp", "device", "dtype", "capture_layers")}
    engine = Engine.load(o.target, o.draft, max_batch=1, check=False, **words)
    parts = engine.parts
    if parts.device.type == "cpu":
        torch.set_num_threads(1)
    print("\n".join(wiring(parts)), flush=True)
    found = texts_for(parts, o.tokens) if o.text is None else parts.tp.word(lambda: texts(o, engine))
    with tqdm(desc="examining", unit=" tokens", disable=None, leave=False) as bar:
        verdict = Examination(parts, found, bar=bar).verdict()
    print(
        f"{verdict.positions} positions of {len(found)} texts, {PASSES} passes of the head over each; top-1 in per cent"
    )
    print("\n".join([*table(verdict), conclusion(verdict)]))
    return 3 if verdict.wrong else 0


def command(argv: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        o = parse(argv)
        if launched() is not None:
            return guarded(lambda: run(o))
        return spawn(run, o.tp, o)[0] if o.tp > 1 else run(o)
    except (Refused, RankFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code, 1 where it was interrupted."""
    return interrupt.command(lambda _: command(sys.argv[1:] if argv is None else argv))
