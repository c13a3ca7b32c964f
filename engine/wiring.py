"""Which reading of a head's file is the right one: the head is run teacher-forced under every reading that its trainer
may have meant, on the features of one pass of the target, and asked how often it names the target's own next token.

A wrong reading costs no correctness, only acceptance, and nothing else would ever tell.
"""

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

import weights
from weights.capture import FINAL, Capture, readings
from weights.config import Refused

from .forced import Teacher, due, guesses, handing_out

PASSES = 3  # of the head over each position: recycling shows from the second on
BLOCK = 16  # positions in a row that count as one observation: neighbours are no independent ones
FEWEST = 16 * BLOCK  # positions below which nothing is said
POINTS, ERRORS = 0.02, 3.0  # a reading is better by more than so much, and by so many standard errors
WINDOW = 512  # most tokens of one text
SHORT = 1024  # tokens of the check at load
KNOWN = 4  # random ids that a target without a tokenizer starts its own texts from


@dataclass(frozen=True)
class Reading:
    """`boundaries` in the order in which the head joins them; the other two as in weights.config.Eagle3Config."""

    name: str
    boundaries: tuple[int | str, ...]
    norm_before_residual: bool
    recycle: str

    @property
    def captured(self):
        """The boundaries in the order in which the target hands them out."""
        return ascending(self.boundaries)

    @property
    def switches(self):
        """What it takes the head's own arithmetic to be."""
        return self.norm_before_residual, self.recycle

    def of(self, drafter):
        """The drafter under this reading."""
        captured = self.captured
        return drafter.read_as([captured.index(i) for i in self.boundaries], *self.switches)

    def __str__(self):
        return f"boundaries {', '.join(map(str, self.boundaries))}, {self.recycle} recycling" + (
            ", norm_before_residual" if self.norm_before_residual else ""
        )


def ascending(boundaries):
    """Boundaries in the order in which targets hand them out: FINAL last."""
    return tuple(sorted(boundaries, key=lambda i: math.inf if i == FINAL else i))


@dataclass(frozen=True, eq=False)
class Finding:
    """How a reading did: hits [positions, passes] bool, the same positions for every reading."""

    reading: Reading
    hits: torch.Tensor

    @property
    def agreement(self):
        """Share of positions and passes at which the head named the target's own token."""
        return float(self.hits.double().mean())

    @property
    def by_pass(self):
        """The same, pass by pass."""
        return self.hits.double().mean(0).tolist()

    def against(self, other):
        """(how far above `other`, its standard error), over blocks of neighbouring positions."""
        apart = (self.hits.double() - other.hits.double()).mean(1)
        blocks = apart[: len(apart) // BLOCK * BLOCK].view(-1, BLOCK).mean(1)
        return float(apart.mean()), float(blocks.std() / math.sqrt(len(blocks)))

    def beats(self, other):
        """Whether it is better by more than chance and more than nothing."""
        gain, error = self.against(other)
        return gain > POINTS and gain > ERRORS * error


@dataclass(frozen=True)
class Verdict:
    """All findings, the one in force first."""

    findings: tuple[Finding, ...]

    @property
    def force(self):
        """The finding of the reading in force."""
        return self.findings[0]

    @property
    def best(self):
        """The finding with the greatest agreement; of equals the first."""
        return max(self.findings, key=lambda finding: finding.agreement)

    @property
    def wrong(self):
        """Whether another reading beats the one in force."""
        return self.best.beats(self.force)

    @property
    def positions(self):
        """How many were looked at."""
        return len(self.force.hits)


class Examination:
    """A head under examination: features of every boundary that any reading of its files needs, from one pass of the
    target over the texts.

    Args:
        parts: engine.loading.Parts, with what is in force; texts: lists of ids, the longer ones cut to WINDOW.
        fields: of Eagle3Config, whose other readings are tried too; boundaries: try other ones too.
        bar: object whose `update` is told of tokens done, or None.

    Raises Refused where the texts are too short to say anything.
    """

    def __init__(self, parts, texts, fields=("norm_before_residual", "recycle"), boundaries=True, bar=None):
        config = parts.drafter.config
        self.parts, self.fields, self.bar = parts, fields, bar
        most = min(WINDOW, parts.max_context)
        self.texts = [ids[:most] for ids in texts if len(ids) > PASSES]
        if (positions := sum(len(ids) - PASSES for ids in self.texts)) < FEWEST:
            raise Refused(f"text: {positions} positions to look at; supported: at least {FEWEST}")
        found = readings(config, parts.target.config.layers, parts.capture)
        self.orders = found if boundaries else found[:1]
        self.captured = ascending(set(itertools.chain(*(order for _, order in self.orders))))
        self.passed = self._teach()

    def _teach(self):
        """The target over every text; features wait in the host's memory."""
        parts = self.parts
        teacher = Teacher(parts.target, 1, max(map(len, self.texts)), parts.device, parts.dtype)
        out = []
        with handing_out(parts.target, self.captured):
            for ids in self.texts:
                passed = teacher.read(ids, WINDOW)
                out.append((passed.features.cpu(), due(passed.best, PASSES)))
                self._told(len(ids))
        return out

    def finding(self, reading):
        """Run the head under one reading."""
        parts, drafter = self.parts, reading.of(self.parts.drafter)
        width, hits = parts.target.config.hidden, []
        columns = [self.captured.index(i) * width for i in reading.captured]
        for ids, (features, wanted) in zip(self.texts, self.passed, strict=True):
            own = torch.cat([features[:, at : at + width] for at in columns], 1).to(parts.device)
            said = guesses(drafter, ids, own, PASSES, 1, parts.device, parts.dtype)[..., 0]
            hits.append((said == wanted).cpu())
            self._told(len(ids))
        return Finding(reading, torch.cat(hits))

    def verdict(self):
        """Every boundary reading, then the other switches over the one in force and over the best so far."""
        config, found = self.parts.drafter.config, []
        own = config.norm_before_residual, config.recycle
        for name, order in self.orders:
            found.append(self.finding(Reading(name, order, *own)))
        best = found[self.parts.tp.word(lambda: found.index(Verdict(tuple(found)).best))].reading
        for base in dict.fromkeys((found[0].reading, best)):
            found += [self.finding(reading) for reading in self.switched(base)]
        return Verdict(tuple(found))

    def switched(self, reading):
        """The other readings of the switches in `fields`, one by one and, where both are open, together."""
        others = {
            "norm_before_residual": not reading.norm_before_residual,
            "recycle": "pre-norm" if reading.recycle == "post-norm" else "post-norm",
        }
        named = {
            "norm_before_residual": f"norm_before_residual {str(others['norm_before_residual']).lower()}",
            "recycle": f"{others['recycle']} recycling",
        }
        for count in range(1, len(self.fields) + 1):
            for chosen in itertools.combinations(self.fields, count):
                name = " and ".join(named[field] for field in chosen)
                name = name if reading.boundaries == self.orders[0][1] else f"{reading.name}, {name}"
                yield dataclasses.replace(reading, name=name, **{field: others[field] for field in chosen})

    def _told(self, tokens):
        if self.bar is not None:
            self.bar.update(tokens)


def texts_for(parts, tokens):
    """Texts of `tokens` tokens in all to examine a head on: the demo's prompts through the target's tokenizer, or
    without one the target's own, drawn from a fixed seed."""
    if parts.text is None:
        return own_texts(parts, tokens)
    out, left = [], tokens
    for line in (Path(weights.__file__).parent / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        out.append(parts.text.encode(json.loads(line)["prompt"])[: min(WINDOW, left)])
        left -= len(out[-1])
    return out


def own_texts(parts, tokens):
    """The target's own texts, drawn at temperature 1 after random ids."""
    length = min(128, parts.max_context)
    rows = -(-tokens // length)
    draws = torch.Generator(parts.device).manual_seed(0)
    vocabulary = parts.target.head.vocabulary
    start = torch.randint(vocabulary, (rows, KNOWN), generator=torch.Generator().manual_seed(0)).to(parts.device)
    teacher = Teacher(parts.target, rows, length, parts.device, parts.dtype)
    return teacher.continued(start, length, draws).tolist()


def settle(parts, announce=None):
    """Measure what the head's files leave open and take the reading that is better, in place: the target's boundaries,
    `parts.drafter`, `parts.capture` and the guesses of its report. Nothing where nothing is open.

    announce: callable(line) or None, told before it begins.
    """
    fields, guessed = dict(parts.drafter.config.guesses), parts.capture.source == "guessed"
    if not fields and not guessed:
        return
    if announce:
        announce("the head's files leave open how it is wired: measuring it (--no-check skips this)")
    try:
        verdict = Examination(parts, texts_for(parts, SHORT), tuple(fields), guessed).verdict()
        verdict = parts.tp.every(verdict)[0]  # all ranks read it alike
    except Refused:  # the context is too short for a text that says anything
        return
    number, sure = parts.tp.word(lambda: _taken(verdict))
    reading = verdict.findings[number].reading
    parts.drafter = reading.of(parts.drafter)
    if guessed and "boundaries" in sure:
        parts.capture = Capture(reading.captured, "measured", sure["boundaries"])
        parts.target.boundaries = reading.captured
    elif guessed:
        why = f"{parts.capture.why}; measured over {verdict.positions} positions, no reading is clearly the best"
        parts.capture = dataclasses.replace(parts.capture, why=why)
    for field in (field for field in fields if field in sure):
        parts.measured.append(f"{field} {getattr(reading, field)} ({sure[field]})")
        parts.reports[-1].guessed.remove(fields[field])


def _taken(verdict):
    """(number of the finding to go on with, {attribute of its reading: by what figures it is sure}). An attribute is
    sure that was changed, or whose other values all do clearly worse."""
    taken, sure = verdict.best if verdict.wrong else verdict.force, {}
    shown = f"measured: top-1 {taken.agreement:.1%} over {verdict.positions} positions"
    for name in ("boundaries", "norm_before_residual", "recycle"):

        def differs(finding, name=name):
            return getattr(finding.reading, name) != getattr(taken.reading, name)

        others = [finding for finding in verdict.findings if differs(finding)]
        if others:
            top = max(others, key=lambda finding: finding.agreement)
            against = verdict.force if differs(verdict.force) else top
            if against is verdict.force or taken.beats(top):
                sure[name] = f"{shown}, {against.agreement:.1%} as {against.reading}"
    return verdict.findings.index(taken), sure
