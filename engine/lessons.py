"""What a head is trained on: text whose lessons the target gives as training goes, or a dump of what it said before.

Either has `target` (its embedding and head at least), `shares` [V] of every id in the text trained on, `own` (windows
that the target wrote, None: none), `about` (a line), `lesson(step, draft_ids)` and `evaluate(head)`.

Shapes: B sequences, L tokens of a window, M windows, V vocabulary.
"""

import dataclasses
import hashlib
import json
import time

import torch

from kernels import REFERENCE
from weights import Source
from weights.config import Refused
from weights.dump import Choice, Dump
from weights.formats import format_of

from .forced import PAGE, Teacher, lesson_of
from .plan import Plan
from .streams import Windows, streams
from .targets import TARGETS
from .tp import TP
from .train_head import chain_length, hits

ROWS = 8192  # sequences continued at once
PROBES = 64  # held-out windows
CONTINUED = 128  # tokens that the target adds to each of them
HELD = 50  # one of so many sequences of a dump is held out


def load_target(opened, capture, length, device):
    """The target of an Opened, fp32 and without a drafter. Raises Refused before memory is filled."""
    plan = Plan(opened, None, capture, length, REFERENCE, TP(), torch.float32)
    plan.build("meta")[1].check()
    target, source, _, _ = plan.build(device)
    source.fill()
    return target


def own_text(target, windows, count, say):
    """`count` windows [count, L] int32 that begin with corpus text and go on as the target does, greedily."""
    length, pieces, began = windows.length, [], time.monotonic()
    shortest = max(PAGE, length // 4 // PAGE * PAGE)  # long continuations wander off from what a prompt leads to
    known = range(shortest, max(shortest, length - 2 * PAGE) + 1, PAGE)
    rows = min(ROWS, -(-count // len(known)))
    teacher = Teacher(target, rows, length, windows.stream.device)
    for i, start in enumerate(range(0, count, rows)):
        prefixes = windows.corpus(min(rows, count - start), known[i % len(known)], 1 << 40 | i)
        pieces.append(teacher.continued(prefixes, length).int())
        say(f"self-generated {start + len(prefixes)} of {count} windows, {time.monotonic() - began:.0f} s")
    return torch.cat(pieces)


class FromText:
    """Lessons of a corpus, and of the target's own text where asked for.

    Args:
        o: options of engine.train; opened: engine.opening.Opened; capture: the boundaries; say: callable(line).
        own: self-generated windows of an interrupted run.
    """

    def __init__(self, o, opened, capture, say, own=None):
        self.o = o
        stream, self.held = (s.to(o.device) for s in streams(o, opened.folder, opened.config.vocab))
        self.end_ids = opened.config.eos_ids
        self.target = load_target(opened, capture, o.length + PAGE, o.device)
        self.about = f"{len(stream)} tokens on {o.device}"
        self.windows, self.own = Windows(stream, self.end_ids, o.length, o.seed), own
        if o.self_generated and own is None:
            self.own = own_text(self.target, self.windows, o.windows, say)
        self.shares = frequencies(stream, self.own, o.self_generated, opened.config.vocab)
        self.teacher = Teacher(self.target, o.batch, o.length, o.device)

    def lesson(self, step, draft_ids):
        """The Lesson of a step."""
        windows = self.windows.mixed(step, self.o.batch, self.own, self.o.self_generated)
        return self.teacher.lesson(windows, draft_ids, self.o.sharpen)

    def evaluate(self, head):
        """Agreement on held-out text, and on the target's own greedy continuations of it with the accept length that a
        chain would reach there."""
        o, stream = self.o, self.held
        windows = Windows(stream, self.end_ids, o.length, o.seed)
        texts = windows.corpus(min(PROBES, max(1, len(stream) // o.length)), o.length, 0).split(o.batch)
        teacher = self.teacher
        known = max(1, min(o.length // 2 // PAGE * PAGE, o.length - 2 * o.ttt))
        length = min(o.length, known + CONTINUED + o.ttt)
        own = [teacher.continued(part[:, :known], length) for part in texts]
        plain, greedy = (
            torch.cat([hits(head, teacher.lesson(part, head.draft_ids), o.ttt) for part in parts])
            for parts in (texts, own)
        )
        greedy = greedy[:, known - 1 :]  # the first of these rows drafts right after the target's first own token
        return {
            "heldout_top1": [round(x, 4) for x in plain.float().mean((0, 1)).tolist()],
            "greedy_top1": [round(x, 4) for x in greedy.float().mean((0, 1)).tolist()],
            "greedy_accept_length": {f"{s}-1-{s + 1}": round(chain_length(greedy, s), 3) for s in range(1, o.ttt + 1)},
        }


class FromDump:
    """Lessons of a dump of hidden states: any stretch of a sequence of it is a window. Of the target only embedding,
    final norm and head are loaded.

    Raises Refused where the dump is not of this target, or holds too few windows.
    """

    own = None

    def __init__(self, o, opened):
        self.o, self.dump = o, Dump(o.dump)
        if (said := self.dump.settings["target"]) != fingerprint(opened):
            raise Refused(f"--dump {o.dump}: it is of another target ({said}) than --target {o.target}")
        total = len(self.dump.sequences)
        long = [i for i in range(total) if self.dump.sequences[i][2] >= o.length]
        if len(long) < 2:
            had = f"{len(long)} of {total} sequences have the {o.length} tokens of --length"
            raise Refused(f"--dump {o.dump}: {had}; supported: at least 2")
        first = len(long) - max(1, len(long) // HELD)
        self.train, self.held = (Choice(self.dump, part, o.length) for part in (long[:first], long[first:]))
        self.target = load_edge(opened, o.device)
        self._compare()
        tokens = sum(self.dump.sequences[i][2] for i in self.train.sequences)
        self.about = f"{tokens} tokens in {len(self.train.sequences)} of {total} sequences of {o.dump} on {o.device}"
        counts = torch.zeros(opened.config.vocab, dtype=torch.double)
        for i in self.train.sequences:
            counts += torch.bincount(self.dump.rows(i, "tokens"), minlength=len(counts))
        self.shares = (counts / counts.sum()).to(o.device)

    @property
    def override(self):
        """The boundaries of the dump as --capture-layers has them."""
        return "boundary:" + ",".join(map(str, self.dump.settings["boundaries"]))

    def _compare(self):
        """Refused where this target's head does not say what the dump's said."""
        number = self.train.sequences[0]
        hidden, best = (self.dump.rows(number, name, 0, self.o.length) for name in ("hidden", "best"))
        same = self.target.head(hidden.float().to(self.o.device))[1][:, 0].cpu() == best
        if same.float().mean() < 0.9:
            raise Refused(f"--dump {self.o.dump}: its hidden states are of other weights than --target {self.o.target}")

    def _lesson(self, choice, numbers, draft_ids, sharpen=1.0):
        def rows(name):
            found = [self.dump.rows(i, name, at, self.o.length) for i, at in map(choice.__getitem__, numbers)]
            return torch.stack(found).to(self.o.device)

        tokens, features, hidden = rows("tokens").long(), rows("features").float(), rows("hidden").float()
        return lesson_of(self.target, tokens, features, hidden, draft_ids, sharpen)

    def lesson(self, step, draft_ids):
        """The Lesson of a step; it depends on (seed, step) alone."""
        draw = torch.Generator().manual_seed(self.o.seed * 1_000_003 + step)
        numbers = torch.randint(len(self.train), (self.o.batch,), generator=draw)
        return self._lesson(self.train, numbers.tolist(), draft_ids, self.o.sharpen)

    def evaluate(self, head):
        """Agreement on windows held out."""
        numbers = torch.linspace(0, len(self.held) - 1, min(PROBES, len(self.held))).long()
        found = [
            hits(head, self._lesson(self.held, part.tolist(), head.draft_ids), self.o.ttt)
            for part in numbers.split(self.o.batch)
        ]
        return {"heldout_top1": [round(x, 4) for x in torch.cat(found).float().mean((0, 1)).tolist()]}


def fingerprint(opened):
    """What tells a target's config from another's."""
    raw = json.dumps(opened.checkpoint.config, sort_keys=True).encode()
    return f"{opened.config.architecture} {hashlib.sha256(raw).hexdigest()[:16]}"


def load_edge(opened, device):
    """A target of an Opened without its layers, fp32."""
    source = Source(opened.checkpoint, device, torch.float32)
    source.ignore("*layers.*")
    make, config = TARGETS[opened.config.architecture], dataclasses.replace(opened.config, layers=0)
    experts = format_of(opened.checkpoint.config, opened.checkpoint.where)
    target = make(config, source, (), 1, experts, REFERENCE, TP())
    source.fill()
    return target


def frequencies(stream, own, share, vocabulary):
    """[V] share of every id in the text trained on."""
    counts = torch.bincount(stream, minlength=vocabulary).double() / len(stream)
    if own is None:
        return counts
    return (1 - share) * counts + share * torch.bincount(own.flatten(), minlength=vocabulary) / own.numel()
