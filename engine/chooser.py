"""Which shape each cycle takes: one and the same, or the one of most expected tokens per second by a cost table and by
what each request's cycles have kept so far.

Decisions rest on the table and on tokens alone, which are the same on every rank; no clock is read here. The model: a
chain keeps its draft token at depth i, given that it kept those before, with chance c_i. A tree, whose first children
are that chain, keeps one with 1 - (1 - c_i)^g, where g grows with the logarithm of the candidates that are left at that
depth, times a factor that is learned for each shape and depth. A request's c_i are exponential averages; they begin at
what the requests before it kept, and deeper than it has looked they follow from the depth before.
"""

import math

from .buffers import BACKLOG
from .shape import PLAIN

PRIOR = 0.65  # c_i before anything has been seen
FIRST, LASTING = 16, 256  # cycles that PRIOR counts for, and how many cycles of all requests an average looks back on
OWN, WINDOW = 16, 32  # the same of one request: what earlier requests count for, and its own cycles
TREES = 64  # cycles that the model of trees counts for
BRANCHES = 0.45  # growth of g by a doubling of candidates; the demo pair's trees show 0.4 to 0.5
SURE = 0.999  # no chance is higher
HOLD, QUIET = 4, 16  # cycles from one decision to the next, after evidence and without
MARGIN = 0.03  # by how much one shape that drafts must seem faster than another: less seems so by chance
DWELL = 16  # cycles that a change of shape is written off over
TRIALS, CATCHING_UP = 0.01, 0.01  # shares of the time for shapes that only might be better, and for catching up
LEAST = 16  # plain cycles between two catch-ups
FORGOTTEN = 64  # tokens without evidence after which half of it is doubted
HOPE = 0.05  # by how much a shape that was never run may be better than the model says


class Average:
    """An exponential average: its first value counts for `mass` observations, and never more than `window` count."""

    def __init__(self, value, mass, window):
        self.value, self.mass, self.window = value, mass, window

    def add(self, seen, times=1):
        """One observation, or several alike."""
        while times and self.mass < self.window:
            self.mass, times = self.mass + 1, times - 1
            self.value += (seen - self.value) / self.mass
        self.value += (seen - self.value) * (1 - (1 - 1 / self.window) ** times)


class Fixed:
    """One shape, whatever happens; others: shapes that the caller's next cycles may take."""

    backlog = BACKLOG

    def __init__(self, shape, others=()):
        self.shapes = (shape, *others)

    def choose(self, requests, lag):
        """The shape."""
        return self.shapes[0]

    def cycle(self, request, shape, matched, chain, missed):
        """Nothing is learned."""

    def foreseen(self, request, agreed, compared):
        """Nothing is learned."""


class Experience:
    """What all requests of an engine have shown: c_1, c_i over the c before it, and for each (shape, depth) how much
    more or less of a tree is kept than the model says. Ratios are what was seen over what was said, both fading.

    Args:
        shapes: all that may be chosen.
    """

    def __init__(self, shapes):
        self.shapes = tuple(shapes)
        self.depths = max(1, *(shape.path - 1 for shape in self.shapes))
        self.first, self.deeper = Average(PRIOR, FIRST, LASTING), [[FIRST, FIRST] for _ in range(self.depths)]
        self.deep = [shape.path - 1 for shape in self.shapes]
        self.power = [self._powers(shape) if shape.topk > 1 else None for shape in self.shapes]
        self.seen = [[float(TREES)] * (shape.path - 1) for shape in self.shapes]
        self.said, self.runs = [list(row) for row in self.seen], [0] * len(self.shapes)

    def _powers(self, tree):
        """g at depths 1, 2, …"""
        left = [min(tree.topk, tree.draft_tokens - 1) / 2**depth for depth in range(tree.path - 1)]
        return [1 + BRANCHES * math.log2(max(1.0, candidates)) for candidates in left]

    def next(self, depth, before):
        """What to expect of c at `depth` (from 2) where it is `before` one depth up."""
        seen, said = self.deeper[depth - 1]
        return min(1.0, before * seen / said)

    def went_on(self, depth, before, hit):
        """A chain that was expected to keep its token with chance `before` one depth up kept it at `depth`, or not."""
        fade, ratio = 1 - 1 / LASTING, self.deeper[depth - 1]
        ratio[:] = ratio[0] * fade + hit, ratio[1] * fade + before

    def lengths(self, chances):
        """Expected tokens of a cycle, the bonus token counted, of each shape, where one request's c_1, c_2, … are
        `chances`."""
        chains, kept = [1.0], 1.0
        for chance in chances:
            kept *= chance if chance < SURE else SURE
            chains.append(chains[-1] + kept)
        return [self._tree(row, chances) if self.power[row] else chains[deep] for row, deep in enumerate(self.deep)]

    def _tree(self, row, chances):
        total = kept = 1.0
        for chance, power, seen, said in zip(chances, self.power[row], self.seen[row], self.said[row], strict=False):
            one = seen / said * (1 - (1 - (chance if chance < SURE else SURE)) ** power)
            kept *= one if one < SURE else SURE
            total += kept
        return total

    def learn(self, row, chances, matched):
        """A cycle of shape number `row` kept `matched` draft tokens, where its chain had these chances."""
        if self.power[row] is None:
            return
        fade, seen, said = 1 - 1 / LASTING, self.seen[row], self.said[row]
        for depth in range(min(matched + 1, len(seen))):
            model = 1 - (1 - min(SURE, chances[depth])) ** self.power[row][depth]
            seen[depth] = seen[depth] * fade + (depth < matched)
            said[depth] = said[depth] * fade + model


class Rates:
    """One request's chances by depth."""

    def __init__(self, experience):
        self.experience, self.age = experience, 0  # tokens since the last evidence
        self.first = Average(experience.first.value, OWN, WINDOW)
        self.hits, self.tries = [0.0] * experience.depths, [0.0] * experience.depths  # below the first depth, fading
        self.found = None

    def chances(self):
        """[c_1, c_2, …]."""
        if self.found is None:
            self.found = [self.first.value]
            for depth in range(2, len(self.hits) + 1):
                prior = self.experience.next(depth, self.found[-1])
                self.found.append((self.hits[depth - 1] + OWN * prior) / (self.tries[depth - 1] + OWN))
        return self.found

    def stale(self):
        """How much the evidence may be out of date, from 0 to 1."""
        return 1 - 0.5 ** (max(0, self.age - WINDOW) / FORGOTTEN)

    def cycle(self, shape, matched, chain, missed):
        """A cycle of `shape` kept `matched` draft tokens, the first `chain` of them those of the chain in its tree,
        which was wrong after them (`missed`), or ended there. Plain decoding shows nothing; evidence gets older."""
        self.age += matched + 1
        if shape != PLAIN:
            self.experience.learn(self.experience.shapes.index(shape), self.chances(), matched)
            self._see([1.0] * chain + [0.0] * missed)

    def foreseen(self, agreed, compared):
        """Of `compared` proposals for one token ahead, `agreed` were the tokens that came."""
        if compared:
            self._see([agreed / compared], compared)

    def _see(self, hits, times=1):
        """Whether a chain went on at depths 1, 2, …, so many times."""
        if not hits:
            return
        chances, fade = self.chances(), (1 - 1 / WINDOW) ** times
        self.hits, self.tries = [x * fade for x in self.hits], [x * fade for x in self.tries]
        self.first.add(hits[0], times)
        self.experience.first.add(hits[0], times)
        for depth, hit in enumerate(hits[1:], 2):
            self.experience.went_on(depth, chances[depth - 2], hit)
            self.hits[depth - 1] += hit
            self.tries[depth - 1] += 1
        self.age, self.found = 0, None


class Chooser:
    """Takes, cycle by cycle, the shape with most expected tokens a millisecond for the requests in progress.

    A shape that only might be better is tried, for a cycle, when what the trial is expected to lose has been saved up:
    a share TRIALS of the time. Between two decisions lie some cycles, fewer when they have shown something.

    Args:
        table: engine.cost.CostTable at this batch size; shapes: those captured, plain decoding among them; experience:
        of these shapes, others too.
    """

    def __init__(self, table, shapes, experience):
        self.table, self.shapes, self.experience = table, tuple(shapes), experience
        self.rows = [experience.shapes.index(shape) for shape in self.shapes]
        self.reach = [shape.path if shape != PLAIN else math.inf for shape in self.shapes]  # rows a cycle looks back on
        pause = table.catch_up_ms(BACKLOG) / (CATCHING_UP * table.plain)
        self.backlog = min(BACKLOG, max(LEAST, math.ceil(pause)))  # plain cycles between two catch-ups
        waiting = table.catch_up_ms(BACKLOG) / self.backlog
        self.ms = [table.cycle(shape) + waiting * (shape == PLAIN) for shape in self.shapes]
        self.saved, self.rates, self.best, self.left, self.news = 0.0, {}, None, 0, False

    def choose(self, requests, lag):
        """The next cycle's shape; requests: those in progress; lag: rows that the drafter may be behind."""
        if len(requests) != len(self.rates) or any(r.index not in self.rates for r in requests):
            self.rates = {r.index: self.rates.get(r.index) or Rates(self.experience) for r in requests}
            self.left = 0
        if self.news:
            self.left, self.news = min(self.left, HOLD), False
        chosen = None
        if self.left <= 0:
            chosen, self.left = self._decide(lag), QUIET
        self.left -= 1
        chosen = self.best if chosen is None else chosen
        self.saved = min(self.saved + TRIALS * self.ms[self.best], max(self.ms))
        self.experience.runs[self.rows[chosen]] += 1
        return self.shapes[chosen]

    def _decide(self, lag):
        """Set the best shape; returns another one that deserves a trial now, or None. Python's own numbers: of so few,
        arrays take longer."""
        running, experience = list(self.rates.values()), self.experience
        change = self.table.catch_up_ms(lag - 1) / DWELL if lag > 1 else 0.0  # where a shape must wait for a catch-up
        ms = [own + change * (lag > reach) for own, reach in zip(self.ms, self.reach, strict=True)]
        tokens = hoped = self._tokens(rates.chances() for rates in running)
        speed = [tokens[row] / own for row, own in zip(self.rows, ms, strict=True)]
        first = max(range(len(speed)), key=speed.__getitem__)
        now = first if self.best is None else self.best
        if PLAIN in (self.shapes[first], self.shapes[now]) or speed[first] > (1 + MARGIN) * speed[now]:
            now = first
        self.best = now
        if any(rates.age > WINDOW for rates in running):
            hoped = self._tokens([c + r.stale() * (1 - c) for c in r.chances()] for r in running)
        hope, count = [], len(running)
        for row, shape, own in zip(self.rows, self.shapes, ms, strict=True):
            more = (hoped[row] - count) * (1 + HOPE * FIRST / (FIRST + experience.runs[row]))
            hope.append((count + min(count * (shape.path - 1), more)) / own)
        trial = max(range(len(hope)), key=hope.__getitem__)
        loss = ms[trial] * (1 - speed[trial] / speed[self.best])
        if trial in (self.best, first) or hope[trial] <= speed[self.best] or loss > self.saved:
            return None
        self.saved -= loss
        return trial

    def _tokens(self, chances):
        """Expected tokens of a cycle of each shape of the experience, all requests together."""
        return list(map(sum, zip(*map(self.experience.lengths, chances), strict=True)))

    def cycle(self, request, shape, matched, chain, missed):
        """One request's cycle kept `matched` draft tokens, before any cut; chain, missed: of kernels.accept.walk."""
        if request.index in self.rates:
            self.rates[request.index].cycle(shape, matched, chain, missed)
            self.news = self.news or shape != PLAIN

    def foreseen(self, request, agreed, compared):
        """A catch-up compared `compared` proposals of the drafter with the tokens that came; `agreed` were right."""
        if request.index in self.rates:
            self.rates[request.index].foreseen(agreed, compared)
            self.news = True
