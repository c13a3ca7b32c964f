"""Which shape each cycle takes: one and the same, or the one of most expected tokens per second by a cost table and by
what each request's cycles have kept so far.

Decisions rest on the table and on tokens alone, which are the same on every rank; no clock is read here. The model: a
chain keeps its draft token at depth i, given that it kept those before, with chance c_i. A tree, whose first children
are that chain, keeps one with 1 - (1 - c_i)^g, where g grows with the logarithm of the candidates that are left at that
depth, times a factor that is learned for each shape and depth. A request's c_i are exponential averages; they begin at
what the requests before it kept, and deeper than it has looked they follow from the depth before.
"""

import math

import torch

from .buffers import BACKLOG
from .shape import PLAIN

PRIOR = 0.65  # c_i before anything has been seen
FIRST, LASTING = 16, 256  # cycles that PRIOR counts for, and how many cycles of all requests an average looks back on
OWN, WINDOW = 16, 32  # the same of one request: what earlier requests count for, and its own cycles
TREES = 64  # cycles that the model of trees counts for
BRANCHES = 0.45  # growth of g by a doubling of candidates; the demo pair's trees show 0.4 to 0.5
SURE = 0.98  # no chance is higher
DWELL = 16  # cycles that a change of shape is written off over
TRIALS, CATCHING_UP = 0.01, 0.01  # shares of the time for shapes that only might be better, and for catching up
FORGOTTEN = 64  # tokens without evidence after which half of it is doubted
HOPE = 0.05  # by how much a shape that was never run may be better than the model says


class Average:
    """An exponential average: its first value counts for `mass` observations, and never more than `window` count."""

    def __init__(self, value, mass, window):
        self.value, self.mass, self.window = value, mass, window

    def add(self, seen):
        """One observation."""
        self.mass = min(self.mass + 1, self.window)
        self.value += (seen - self.value) / self.mass


class Branch:
    """How far the accepted path of each tree was the chain of first children, on its way to the host: what a chain of
    the same drafter would have kept."""

    def __init__(self, tree):
        self.nodes, found = tree.shape.draft_tokens, torch.cat([tree.parents, tree.path], 1)
        self.block = torch.empty(found.shape, dtype=found.dtype, pin_memory=True) if found.is_cuda else found
        if found.is_cuda:
            self.block.copy_(found, non_blocking=True)

    def chain(self, slot, matched):
        """(first nodes of the path that are first children, whether the tree ended there); matched: nodes accepted.
        The copy must have arrived."""
        row = self.block[slot].tolist()
        parents, path = row[1 : self.nodes], row[self.nodes :]
        for depth in range(matched + 1):
            first = parents.index(path[depth]) + 1 if path[depth] in parents else None
            if depth == matched or path[depth + 1] != first:
                return depth, first is None
        return matched, True


class Fixed:
    """One shape, whatever happens; others: shapes that the caller's next cycles may take."""

    backlog = BACKLOG

    def __init__(self, shape, others=()):
        self.shapes = (shape, *others)

    def choose(self, requests, lag):
        """The shape."""
        return self.shapes[0]

    def look(self, tree):
        """Nothing of a tree is of interest."""

    def cycle(self, request, slot, shape, matched, branch):
        """Nothing is learned."""

    def foreseen(self, request, agreed, compared):
        """Nothing is learned."""


class Ratio:
    """What was seen over what was said, both fading; at first 1, which counts for `mass` observations."""

    def __init__(self, mass):
        self.mass, self.seen, self.said = mass, 0.0, 0.0

    def add(self, seen, said):
        """One observation."""
        fade = 1 - 1 / LASTING
        self.seen, self.said = self.seen * fade + seen, self.said * fade + said

    @property
    def value(self):
        """By how much more is seen than said."""
        return (self.seen + self.mass) / (self.said + self.mass)


class Experience:
    """What all requests of an engine have shown: c_1, c_i over the c before it, and by (shape, depth) how much more or
    less of a tree is kept than the model says."""

    def __init__(self):
        self.first, self.deeper, self.factors, self.runs = Average(PRIOR, FIRST, LASTING), {}, {}, {}

    def next(self, depth, before):
        """What to expect of c at `depth` (from 2) where it is `before` one depth up."""
        return min(1.0, before * self._of(self.deeper, depth, FIRST).value)

    def went_on(self, depth, before, hit):
        """A chain that was expected to keep its token with chance `before` one depth up kept it at `depth`, or not."""
        self._of(self.deeper, depth, FIRST).add(hit, before)

    def kept(self, shape, depth, chance):
        """Chance that a tree of `shape` goes on at `depth`, where its chain does with `chance`."""
        if shape.topk == 1:
            return min(SURE, chance)
        return min(SURE, self._of(self.factors, (shape, depth), TREES).value * self._said(shape, depth, chance))

    def learn(self, shape, depth, chance, hit):
        """A cycle of `shape` went on at `depth` (hit 1.0) or did not (0.0), where the chain does with `chance`."""
        if shape.topk > 1:
            self._of(self.factors, (shape, depth), TREES).add(hit, self._said(shape, depth, chance))

    @staticmethod
    def _said(shape, depth, chance):
        left = min(shape.topk, shape.draft_tokens - 1) / 2 ** (depth - 1)
        power = 1 + BRANCHES * math.log2(max(1.0, left))
        return 1 - (1 - min(SURE, chance)) ** power

    @staticmethod
    def _of(ratios, key, mass):
        return ratios.setdefault(key, Ratio(mass))

    def doubt(self, shape):
        """How much better than the model says a shape may be: HOPE at first, less with every cycle of it."""
        return HOPE * FIRST / (FIRST + self.runs.get(shape, 0))


class Rates:
    """One request's chances by depth, and what each shape is expected to emit."""

    def __init__(self, experience, depths):
        self.experience, self.age = experience, 0  # tokens since the last evidence
        self.first = Average(experience.first.value, OWN, WINDOW)
        self.hits, self.tries = [0.0] * depths, [0.0] * depths  # below the first depth, fading
        self.known = {}

    def chances(self, stale=0.0):
        """c_1, c_2, …; stale: share of what is short of 1 that is hoped for."""
        found = [self.first.value]
        for depth in range(2, len(self.hits) + 1):
            prior = self.experience.next(depth, found[-1])
            found.append((self.hits[depth - 1] + OWN * prior) / (self.tries[depth - 1] + OWN))
        return [chance + stale * (1 - chance) for chance in found]

    def length(self, shape):
        """Expected tokens of a cycle, the bonus token counted."""
        if not self.known:
            self.known[None] = self.chances()
        if shape not in self.known:
            self.known[shape] = self._length(shape, self.known[None])
        return self.known[shape]

    def hope(self, shape):
        """The same if all goes well: old evidence may not hold, a shape may be better than the model says."""
        length = self.length(shape)
        if self.age > WINDOW:
            length = self._length(shape, self.chances(1 - 0.5 ** ((self.age - WINDOW) / FORGOTTEN)))
        return min(shape.path, 1 + (length - 1) * (1 + self.experience.doubt(shape)))

    def _length(self, shape, chances):
        total = reach = 1.0
        for depth in range(1, shape.path):
            reach *= self.experience.kept(shape, depth, chances[depth - 1])
            total += reach
        return total

    def cycle(self, shape, matched, chain, ended):
        """A cycle of `shape` kept `matched` draft tokens, the first `chain` of them those of the chain in its tree,
        which was wrong after them, or ended there. Plain decoding shows nothing; evidence gets older."""
        self.age += matched + 1
        if shape == PLAIN:
            return
        chances = self.chances()
        for depth in range(1, min(matched + 2, shape.path)):
            self.experience.learn(shape, depth, chances[depth - 1], float(depth <= matched))
        self._see([1.0] * chain + [0.0] * (not ended))

    def foreseen(self, agreed, compared):
        """Of `compared` proposals for one token ahead, `agreed` were the tokens that came."""
        for _ in range(compared):
            self._see([agreed / compared])

    def _see(self, hits):
        """Whether a chain went on at depths 1, 2, …"""
        if not hits:
            return
        chances, fade = self.chances(), 1 - 1 / WINDOW
        self.age, self.known = 0, {}
        self.hits, self.tries = [x * fade for x in self.hits], [x * fade for x in self.tries]
        self.first.add(hits[0])
        self.experience.first.add(hits[0])
        for depth, hit in enumerate(hits[1:], 2):
            self.experience.went_on(depth, chances[depth - 2], hit)
            self.hits[depth - 1] += hit
            self.tries[depth - 1] += 1


class Chooser:
    """Takes, cycle by cycle, the shape with most expected tokens a millisecond for the requests in progress.

    A shape that only might be better is tried when what the trial is expected to lose has been saved up: a share TRIALS
    of the time.

    Args:
        table: engine.cost.CostTable at this batch size; shapes: those captured, plain decoding among them.
    """

    def __init__(self, table, shapes, experience):
        self.table, self.shapes, self.experience = table, tuple(shapes), experience
        self.depths = max(shape.path - 1 for shape in shapes)
        self.ms = {shape: table.cycle(shape) for shape in shapes}
        pause = table.catch_up_ms(BACKLOG) / (CATCHING_UP * table.plain)
        self.backlog = min(BACKLOG, max(WINDOW, math.ceil(pause)))  # plain cycles between two catch-ups
        self.ms[PLAIN] += table.catch_up_ms(BACKLOG) / self.backlog
        self.saved, self.rates = 0.0, {}

    def choose(self, requests, lag):
        """The next cycle's shape; requests: those in progress; lag: rows that the drafter may be behind."""
        self.rates = {r.index: self._of(r) for r in requests}
        running = self.rates.values()
        ms = {s: self.ms[s] + self._change(s, lag) for s in self.shapes}
        speed = {s: sum(r.length(s) for r in running) / ms[s] for s in self.shapes}
        best = max(self.shapes, key=speed.get)
        shape = self._trial(running, ms, speed, best) or best
        self.saved = min(self.saved + TRIALS * ms[best], max(ms.values()))
        self.experience.runs[shape] = self.experience.runs.get(shape, 0) + 1
        return shape

    def _of(self, request):
        return self.rates.get(request.index) or Rates(self.experience, self.depths)

    def _change(self, shape, lag):
        """ms of catching up before this shape can draft, written off over the cycles it may stay."""
        return self.table.catch_up_ms(lag - 1) / DWELL if shape != PLAIN and lag > shape.path else 0.0

    def _trial(self, running, ms, speed, best):
        hope = {s: sum(r.hope(s) for r in running) / ms[s] for s in self.shapes}
        shape = max(self.shapes, key=hope.get)
        loss = ms[shape] * (1 - speed[shape] / speed[best])
        if shape == best or hope[shape] <= speed[best] or loss > self.saved:
            return None
        self.saved -= loss
        return shape

    def look(self, tree):
        """What `cycle` wants to know of a tree (engine.buffers.Tree), None of a chain."""
        return Branch(tree) if tree.shape.topk > 1 else None

    def cycle(self, request, slot, shape, matched, branch):
        """One request's cycle in `slot` kept `matched` draft tokens, before any cut; branch: of `look`."""
        if request.index in self.rates:
            chain = (matched, matched == shape.path - 1) if branch is None else branch.chain(slot, matched)
            self.rates[request.index].cycle(shape, matched, *chain)

    def foreseen(self, request, agreed, compared):
        """A catch-up compared `compared` proposals of the drafter with the tokens that came; `agreed` were right."""
        if request.index in self.rates:
            self.rates[request.index].foreseen(agreed, compared)
