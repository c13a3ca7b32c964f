"""`python -m bench.failures`: a rank is killed while weights are read, while a cycle is captured and while tokens come;
each time the seconds until everything has ended, and what is said first. Exit codes: 0; 1 where it takes a minute."""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch

from engine import Engine, Sampling, spawn
from engine.engine import DEFAULT_SHAPE
from engine.options import DEMO, Parser, capture_option, least
from engine.ranks import RankFailed
from engine.tp import launched
from weights.config import Refused

from . import command
from .results import Figure
from .spin import DelayedTarget

LIMIT, VICTIM = 60.0, 1
WHEN = ("load", "capture", "decode")


def parser() -> Parser:
    """Options."""
    p = Parser("python -m bench.failures", __doc__)
    add = p.add_argument
    add("--target", metavar="DIR|HUB_ID", help="default: the demo pair")
    add("--draft", metavar="DIR|HUB_ID|random:NAME", help="default: the demo draft with the demo target")
    capture_option(add)
    add("--when", nargs="+", choices=WHEN, default=list(WHEN), help="default: all three")
    add("--tp", type=least(2), default=2, metavar="N", help="ranks; default %(default)s")
    add("--device", metavar="cpu|cuda", help="default: CUDA where there is a GPU")
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    o = command.options(parser(), argv)
    if o.draft and not o.target:
        raise Refused("--draft: supported with --target DIR|HUB_ID")
    if not o.target:
        o.target, o.draft = str(DEMO / "target"), str(DEMO / "draft")
    return o


class Deadly(DelayedTarget):
    """A target whose pass, while it is captured (on the CPU: the first one), kills the process."""

    def forward(self, batch, cache):
        """As the real one's, but for that."""
        if not batch.tokens.is_cuda or torch.cuda.is_current_stream_capturing():
            self.spin()
        return self.real.forward(batch, cache)


def doomed(o, when: str, stamp: str) -> None:
    """On a rank: decode; rank VICTIM writes the time to the file `stamp` and dies as an out-of-memory killer has it."""

    def die():
        Path(stamp).write_text(repr(time.time()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)

    victim = launched()[0] == VICTIM
    progress = (lambda done, total: 2 * done > total and die()) if victim and when == "load" else None
    given = {name: getattr(o, name) for name in ("tp", "device", "capture_layers")}
    engine = Engine.load(o.target, o.draft, max_batch=1, progress=progress, **given)
    if victim and when == "capture":
        engine.parts.target = Deadly(engine.parts.target, die)
    engine.prepare(DEFAULT_SHAPE)
    for number, _ in enumerate(engine.stream([1, 2, 3], Sampling(500, ignore_eos=True), details=False)):
        if victim and number == 8:
            die()


def run(o, typed: str) -> list:
    """Figures, and what was said; Late where it took too long."""
    figures, said, late = [], [], False
    for when in o.when:
        with tempfile.TemporaryDirectory() as folder:
            stamp = Path(folder, "stamp")
            try:
                spawn(doomed, o.tp, o, when, str(stamp))
                first = "nobody was killed"
            except RankFailed as error:
                first = str(error).splitlines()[0]
            # without a stamp the command ended before its time
            died = float(stamp.read_text(encoding="utf-8")) if stamp.exists() else 0.0
            spent = time.time() - died
        figures.append(Figure.of(f"ended.{when}", "s", spent, note=first))
        said.append(f"{when}: {spent:.1f} s, first said: {first}")
        late |= spent > LIMIT or not first.startswith(f"rank {VICTIM}: was killed by SIGKILL")
    if late:
        raise Late("; ".join(said))
    return figures


class Late(command.Failed):
    """The command did not end in time, or blamed another rank."""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.failures", parse, run, argv, ranks=False)
