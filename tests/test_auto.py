"""A shape that chooses itself, by an injected cost table and a clock that adds up its times: nothing here depends on
how fast the machine is. What it reaches by the wall is measured by `python -m bench.auto` on a GPU."""

import pytest
import torch
from oracles import Replay
from toys import NEXT, V, follow, one_line, pair

from engine import Engine, Sampling, Shape
from engine.auto import AUTO, GRID
from engine.chooser import Experience
from engine.cost import CostTable
from engine.options import DEMO
from engine.prompts import read
from engine.shape import PLAIN
from weights.config import Refused

SHAPES = [Shape.parse(text) for text in ("1-1-2", "3-1-4", "5-1-6", "3-4-8")]


def costs(row, step=0.1, plain=1.0, shapes=SHAPES, catch_up=0.3):
    """Plain decoding takes `plain` ms, every further row of a verify `row`, a draft pass `step`."""
    rows = {s.draft_tokens: plain + row * (s.draft_tokens - 1) for s in shapes}
    steps = {s.topk: step for s in shapes}
    return CostTable(plain, rows, 0.05, step, steps, shapes=tuple(shapes), catch_up={8: catch_up / 2, 64: catch_up})


CHEAP, FAIR, DEAR = costs(0.02), costs(0.12), costs(0.6)


class Clock:
    """Adds up what the table says of everything that an engine launches: (emitted so far, ms, what ran) in `ran`."""

    def __init__(self, engine, table):
        self.graphs, self.table, self.ran, self.real = engine.graphs, table, [], engine.graphs.run
        engine.graphs.run = self.run

    def run(self, program, batch, shape, stages):
        ms = self.table.catch_up_ms(program.width) if shape == "catch-up" else self.table.cycle(shape)
        self.ran.append((ms, shape))
        self.real(program, batch, shape, stages)

    @property
    def ms(self):
        return sum(ms for ms, _ in self.ran)


def auto(engine, table, prompts, tokens, shapes=SHAPES):
    """[(token ids, ms, ms after the first 64 tokens, shapes of the cycles)] of each prompt, one after the other."""
    engine.auto.shapes, engine.auto.costs = tuple(shapes), table
    engine.auto.forget()
    out = []
    for prompt in prompts:
        clock, sampling = Clock(engine, table), Sampling(max_new_tokens=tokens, ignore_eos=True)
        count, early = 0, None
        for event in engine.stream(prompt, sampling, shape=AUTO, details=False):
            count += len(event.tokens)
            if early is None and count >= 64:
                early = clock.ms, count
        engine.graphs.run = clock.real
        ids, ran = event.request.token_ids, event.request.shapes
        late = None if early is None else (clock.ms - early[0], len(ids) - early[1])
        out.append((ids, clock.ms, late, ran))
    return out


def replay(engine, prompt, tokens, right, kind=Replay):
    """A drafter that knows the text behind `prompt`, and the text; right: of Replay."""
    text = engine.generate(prompt, Sampling(max_new_tokens=tokens + 16, ignore_eos=True), shape=PLAIN).token_ids
    return kind([prompt + text], V, right), text[:tokens]


@pytest.mark.parametrize("table", [CHEAP, FAIR, DEAR], ids=["cheap", "fair", "dear"])
@pytest.mark.parametrize("kind", ["head", "blind"])
def test_a_draft_that_is_always_wrong_costs_little(kind, table, toys):
    """Within 3 % of plain decoding after the first 64 tokens, whether or not the drafter can say what it would have
    proposed. Mutants: the prior never given up; catch-ups that nobody pays for."""
    engine = pair(toys.map(), toys.wrong_draft(), max_context=1024, max_batch=1)
    if kind == "blind":
        engine.drafter = replay(engine, [3, 9], 600, 0.0)[0]
    ((ids, _, (ms, count), ran),) = auto(engine, table, [[3, 9]], 600)
    assert ids == follow(9, 600, NEXT)
    assert count > 500 and ms <= 1.03 * table.plain * count
    assert ran[-1] == PLAIN and (len(set(ran)) > 1 or table is DEAR)


@pytest.mark.parametrize("table", [CHEAP, FAIR, DEAR], ids=["cheap", "fair", "dear"])
def test_a_draft_that_is_always_right_is_used(table, toys):
    """At least 95 % of the best shape, whichever that is. Mutant: the greatest accept length taken for the best."""
    engine = pair(toys.map(), toys.map_draft(), max_context=1024, max_batch=1)
    ((ids, ms, _, ran),) = auto(engine, table, [[3, 9]], 600)
    best = max((s.path / table.cycle(s) for s in SHAPES), default=0)
    assert ids == follow(9, 600, NEXT) and 599 / ms >= 0.95 * max(best, 1 / table.plain)


class Seeing(Replay):
    """A Replay of one text that can say what it would have proposed."""

    def foresee(self, batch, features, cache):
        """Row p holds token p + 1 and proposes the one after it, right where a tree at p + 1 would be."""
        truth = self.texts[0, batch.index.clamp(min=0) + 2]
        right = self.right[batch.index.clamp(min=0) + 1, 0]
        return torch.where(right, truth, (truth + 1) % self.vocabulary)


@pytest.mark.parametrize("first", [True, False], ids=["right, then wrong", "wrong, then right"])
@pytest.mark.parametrize("kind, share", [(Seeing, 0.85), (Replay, 0.75)], ids=["seeing", "blind"])
def test_it_notices_that_acceptance_changes(kind, share, first, toys):
    """Half-way through the text; a drafter that says nothing while it is not asked is tried now and then. Mutants:
    averages over the whole request; plain decoding that is never left."""
    engine = pair(toys.map(), toys.map_draft(), max_context=1024, max_batch=1)
    right = [[(at < 300) == first] * 8 for at in range(640)]
    engine.drafter, text = replay(engine, [3, 9], 600, right, kind)
    ((ids, ms, _, ran),) = auto(engine, FAIR, [[3, 9]], 600)
    drafted = [shape != PLAIN for shape in ran]
    (begin, end), best = (drafted[40:60], drafted[-40:]), max(s.path / FAIR.cycle(s) for s in SHAPES)
    assert ids == text and 599 / ms > share * 599 / (300 + 300 / best)
    assert (sum(begin) > 15, sum(end) > 35) == (first, not first)


def test_plain_decoding_sees_when_drafting_would_pay(toys):
    """A head whose proposals agree with the tokens that come is used again without a trial. Mutants: the comparison a
    row off; a head that is extended and not compared."""
    engine = pair(toys.map(), toys.map_draft(), max_context=1024, max_batch=1)
    engine.auto.shapes, engine.auto.costs = tuple(SHAPES), FAIR
    engine.auto.forget()
    engine.auto.experience = Experience(engine.auto.candidates())
    engine.auto.experience.first.value = 0.0
    clock = Clock(engine, FAIR)
    result = engine.generate([3, 9], Sampling(max_new_tokens=200), shape=AUTO)
    ran = [shape for _, shape in clock.ran]
    first = ran.index("catch-up")
    assert set(ran[:first]) == {PLAIN} and first <= 64 and PLAIN not in ran[first + 30 :]
    assert result.token_ids == follow(9, 200, NEXT)


@pytest.fixture(scope="module")
def demo():
    return Engine.load(str(DEMO / "target"), str(DEMO / "draft"), device="cpu", max_context=640, prefix_cache=False)


@pytest.fixture(scope="module")
def measured(demo):
    """(prompts, {Shape: (token ids of each, cycles of all)}) of some demo prompts."""
    prompts = [demo.encode(prompt.content)[:64] for prompt in read(str(DEMO / "prompts.jsonl"))[::7]]
    found = {}
    for shape in (PLAIN, *SHAPES):
        results = demo.generate(prompts, Sampling(max_new_tokens=40, ignore_eos=True), shape=shape)
        found[shape] = [r.token_ids for r in results], sum(len(r.cycles) for r in results)
    return prompts, found


@pytest.mark.parametrize("table", [costs(0.03, 0.12), FAIR, DEAR], ids=["trees", "chains", "plain"])
def test_demo_prompts_reach_what_the_best_fixed_shape_does(table, demo, measured):
    """At least 95 % of it in two rounds from nothing, whatever the costs make the best. Mutant: the same shape whatever
    it costs."""
    prompts, found = measured
    done = auto(demo, table, prompts * 2, 40)
    assert [ids for ids, *_ in done] == found[PLAIN][0] * 2
    least = min(cycles * table.cycle(shape) for shape, (_, cycles) in found.items())
    assert sum(ms for _, ms, _, _ in done) <= 2 * least / 0.95


def test_what_cannot_be(toys):
    engine = pair(toys.map())
    for call in (lambda: engine.generate([3], shape=AUTO), lambda: engine.prepare(AUTO)):
        one_line(pytest.raises(Refused, call), "shape auto: there is no draft")
    one_line(pytest.raises(Refused, pair, toys.map(), shape=AUTO), "there is no draft")
    with pytest.raises(Refused, match="or 'auto'"):
        engine.generate([3], shape="fast")
    few = pair(toys.map(), toys.fixed_draft((1, 2)))
    assert all(shape.topk <= 2 for shape in few.auto.candidates()) and PLAIN in few.auto.candidates()
    assert set(pair(toys.map(), toys.map_draft()).auto.candidates()) == {PLAIN, *GRID}
    one_line(pytest.raises(Refused, pair, toys.map(), toys.fixed_draft((1, 2)), shapes=[Shape(3, 4, 8)]), "topk is 4")


def test_another_drafter_is_another_pair(toys):
    """What was measured and learned is the old one's. Mutant: kept."""
    engine = pair(toys.map(), toys.map_draft())
    engine.auto.shapes, engine.auto.costs = tuple(SHAPES), FAIR
    engine.generate([3], Sampling(max_new_tokens=30), shape=AUTO)
    assert engine.auto.tables and any(engine.auto.experience.runs)
    engine.drafter = replay(engine, [3], 20, 1.0)[0]
    assert not engine.auto.tables and engine.auto.experience is None
