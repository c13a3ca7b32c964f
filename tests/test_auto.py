"""A shape that chooses itself, by an injected cost table and a clock that adds up its times: nothing here depends on
how fast the machine is. What it reaches by the wall is measured by `python -m bench.auto` on a GPU."""

import json

import pytest
import torch
from oracles import Replay
from toys import NEXT, V, follow, one_line, pair

from engine import Engine, Sampling, Shape, measure, spawn
from engine.auto import AUTO, GRID
from engine.chooser import Average, Chooser, Experience, Fixed, Rates
from engine.cost import CostTable, json_of, table_of
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


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "eagle3-engine"


# What it must reach


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


# The law


class Scripted:
    """Takes shapes in a fixed order, over and over."""

    backlog = 20

    def __init__(self, order):
        self.order, self.shapes, self.at, self.seen = order, tuple(set(order)), 0, []

    def choose(self, requests, lag):
        self.at += 1
        return self.order[(self.at - 1) % len(self.order)]

    def cycle(self, request, shape, matched, chain, missed):
        pass

    def foreseen(self, request, agreed, compared):
        self.seen.append((request.index, agreed, compared))


ORDER = [Shape(3, 1, 4), *[PLAIN] * 3, Shape(1, 1, 2), Shape(5, 8, 64), *[PLAIN] * 30, Shape(4, 2, 8), Shape(7, 1, 8)]


def switched(engine, prompts, tokens):
    """Token ids of each prompt under ORDER, and what the head foresaw."""
    chooser, ids = Scripted(ORDER), [[] for _ in prompts]
    samplings = [Sampling(max_new_tokens=tokens, ignore_eos=True)] * len(prompts)
    for event in engine.run(prompts, samplings, chooser):
        ids[event.request.index] += event.tokens
    return ids, chooser.seen


def test_ids_are_those_of_plain_decoding_across_switches(toys):
    """Law 1. Mutants: a backlog that is dropped; a catch-up of too few rows; a narrow one for a wide lag."""
    engine = pair(toys.history(), toys.random_draft(), max_context=256)
    prompts = [[9, 8, 7, 40], [3], list(range(20))]
    plain = [engine.generate(p, Sampling(max_new_tokens=120), shape=PLAIN).token_ids for p in prompts]
    for group in ([0], [0, 1, 2]):
        assert switched(engine, [prompts[i] for i in group], 120)[0] == [plain[i] for i in group]


def test_the_drafter_has_seen_everything_after_a_switch(toys):
    """Its best guess at a place does not depend on the shapes that led there. Mutants: rows left out of a catch-up, or
    written one row off; the last row of the backlog not the one it drafts from."""
    engine, guesses = pair(toys.history(), toys.random_draft(), max_context=512), []
    for chooser in (Fixed(Shape(1, 1, 2)), Scripted(ORDER), Scripted([*ORDER[3:], Shape(2, 1, 3)])):
        at, found = 0, {}
        for event in engine.run([[9, 8, 7, 40]], [Sampling(max_new_tokens=200)], chooser, details=True):
            if event.tree is not None and len(event.tree.tokens) > 1:
                found[at] = int(event.tree.tokens[1])
            at += len(event.tokens)
        guesses.append(found)
    alone, *mixed = guesses
    for found in mixed:
        common = set(alone) & set(found)
        assert len(common) > 8 and all(alone[place] == found[place] for place in common)


def test_what_a_head_foresees_is_what_it_would_propose(toys):
    """A catch-up's proposals are those that cycles make at the same places. Mutants: a row off; padding counted."""
    engine = pair(toys.history(), toys.random_draft(), max_context=256)
    prompt, sampling, proposed, at = [9, 8, 7, 40], Sampling(max_new_tokens=60, ignore_eos=True), {}, 0
    for event in engine.stream(prompt, sampling, shape=Shape(1, 1, 2)):
        if event.tree is not None:
            proposed[at] = int(event.tree.tokens[1])
        at += len(event.tokens)
    ids = engine.generate(prompt, sampling, shape=PLAIN).token_ids
    foresee, seen = engine.drafter.foresee, {}

    def noted(batch, features, cache):
        said = foresee(batch, features, cache)
        for row, token, index in zip(batch.tokens[0], said[0], batch.index[0], strict=True):
            if index >= 0:
                seen[int(index) - len(prompt) + 2] = int(token)
                assert ids[int(index) - len(prompt) + 1] == int(row)
        return said

    engine.drafter.foresee = noted
    engine.programs.catch_ups.clear()
    _, counted = switched(engine, [prompt], 60)
    common = set(seen) & set(proposed)
    assert len(common) > 15 and all(seen[place] == proposed[place] for place in common)
    right = sum(ids[place] == token for place, token in seen.items())
    assert sum(c for _, _, c in counted) == len(seen) and sum(a for _, a, _ in counted) == right


@pytest.mark.parametrize("draft, share", [("map_draft", 1.0), ("wrong_draft", 0.0)])
def test_agreement_is_counted_for_each_request(draft, share, toys):
    """Mutants: slots mixed up; a slot that has just been seated counted with what was there before."""
    engine = pair(toys.map(), getattr(toys, draft)(), max_context=512)
    seen = switched(engine, [[3, 9], [5], [8, 1, 2]], 150)[1]
    assert {index for index, _, _ in seen} == {0, 1, 2}
    assert sum(c for *_, c in seen) > 150 and all(agreed == share * compared for _, agreed, compared in seen)


@pytest.mark.gpu
def test_logits_are_those_of_plain_decoding_across_switches():
    """Law 1 to the bit on a GPU, by graphs. Mutant: a catch-up captured over another width's rows."""
    engine = Engine.load(str(DEMO / "target"), str(DEMO / "draft"), graphs="required")
    prompts = [engine.encode(p.content) for p in read(str(DEMO / "prompts.jsonl"))[:4]]

    def logits(chooser):
        found, samplings = [[] for _ in prompts], [Sampling(max_new_tokens=150, ignore_eos=True)] * 4
        for event in engine.run(prompts, samplings, chooser, details=True):
            if event.tree is not None:
                found[event.request.index].append(event.tree.logits[event.accepted][: len(event.tokens)])
        return [torch.cat(rows) for rows in found]

    plain, mixed = logits(Fixed(PLAIN)), logits(Scripted(ORDER))
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


# How it decides


class Asked:
    def __init__(self, index=0):
        self.index = index


def settled(table, shapes, pattern, cycles=300):
    """The shape taken at last where a chain is kept as `pattern` (a list of 0 and 1, over and over) says by depth."""
    shapes = [PLAIN, *shapes]
    chooser, request, lag = Chooser(table, shapes, Experience(shapes)), Asked(), 1
    for at in range(cycles):
        shape = chooser.choose([request], lag)
        lag = shape.path if shape != PLAIN else lag + 1
        kept = pattern[at % len(pattern)]
        kept = min(kept, shape.path - 1)
        chooser.cycle(request, shape, kept, kept, int(kept < shape.path - 1))
    return chooser.choose([request], 1)


def test_trees_compete_on_cost_not_on_length():
    """The tree keeps more whatever it costs. Mutant: the accept length alone decides."""
    chain, tree = Shape(3, 1, 4), Shape(3, 4, 8)
    kept = [3, 1, 0, 2, 3, 1]
    cheap = CostTable(1.0, {4: 1.3, 8: 1.31}, shapes=(chain, tree))
    dear = CostTable(1.0, {4: 1.3, 8: 2.6}, shapes=(chain, tree))
    assert settled(dear, [chain, tree], kept) == chain
    assert settled(cheap, [tree], kept) == tree
    few, many = map(Experience([PLAIN, chain, tree]).lengths, ([0.2] * 3, [0.8] * 3))
    assert few[0] == many[0] == 1 and few[1] == pytest.approx(1 + 0.2 + 0.04 + 0.008)
    assert few[2] > few[1] and many[2] > many[1]


def test_proposals_compared_at_once_count_one_by_one():
    """A catch-up's are many. Mutants: one observation for all; averages that never forget."""
    for share, times in ((0.0, 3), (0.5, 60), (1.0, 500)):
        once, each = Average(0.65, 16, 32), Average(0.65, 16, 32)
        once.add(share, times)
        for _ in range(times):
            each.add(share)
        assert (once.value, once.mass) == (pytest.approx(each.value), each.mass)
    rates = [Rates(Experience([PLAIN, Shape(3, 1, 4)])) for _ in range(2)]
    for one in rates:
        one.cycle(Shape(3, 1, 4), 3, 3, 0)
    rates[0].foreseen(20, 40)
    for _ in range(20):
        rates[1].foreseen(1, 2)
    assert rates[0].chances() == pytest.approx(rates[1].chances()) and rates[0].chances()[0] < 0.65


def test_several_requests_are_served_at_once():
    """One for which drafting pays and three for which it does not. Mutant: the first request decides for all."""
    table, shapes = costs(0.2), [PLAIN, Shape(3, 1, 4)]
    for good, drafts in ((1, False), (4, True)):
        chooser, requests = Chooser(table, shapes, Experience(shapes)), [Asked(i) for i in range(4)]
        for _ in range(200):
            shape = chooser.choose(requests, 1)
            for request in requests:
                kept = 3 if request.index < good else 0
                chooser.cycle(request, Shape(3, 1, 4), kept, kept, int(not kept))
        assert (shape != PLAIN) == drafts


def test_a_change_of_shape_has_its_price():
    """Where the drafter must catch up first. Mutant: the price is forgotten."""
    table = costs(0.12, catch_up=16.0)
    shapes, found = [PLAIN, Shape(1, 1, 2)], []
    for lag in (1, 2, 20):
        found.append(Chooser(table, shapes, Experience(shapes)).choose([Asked()], lag))
    assert found == [Shape(1, 1, 2), Shape(1, 1, 2), PLAIN]


def test_trials_are_paid_for():
    """Hope that never ends, on a draft that keeps nothing, costs one per cent. Mutants: trials that nothing bounds;
    none at all."""
    table, shapes, request, ran = costs(0.12), [PLAIN, Shape(1, 1, 2)], Asked(), []
    chooser = Chooser(table, shapes, Experience(shapes))
    for _ in range(2000):
        ran.append(chooser.choose([request], 1))
        rates = chooser.rates[request.index]
        rates.first.value, rates.found, rates.age = 0.0, None, 10_000
    late = ran[20:]
    ms = sum(table.cycle(shape) for shape in late) / len(late)
    assert table.plain < ms < 1.0105 * table.plain


def test_every_rank_decides_alike(toys):
    """The same costs and tokens, the same shapes. Mutant: a clock or a set's order in the decision."""
    engine = pair(toys.history(), toys.random_draft(), max_context=256, max_batch=1)
    runs = [auto(engine, FAIR, [[9, 8], [7]], 80) for _ in range(2)]
    assert runs[0] == runs[1]


def chosen(target, draft):
    """On each rank: the costs it goes by, ids and shapes of two requests, ids of plain decoding."""
    torch.set_num_threads(1)
    engine = pair(target, draft, tp=2, max_context=128, max_batch=2, shapes=SHAPES[:2])
    how = [Sampling(max_new_tokens=60)] * 2
    plain = [r.token_ids for r in engine.generate([[3], [5, 9]], how, shape=PLAIN)]
    found = engine.generate([[3], [5, 9]], how, shape=AUTO)
    return json_of(engine.auto.tables[2]), [r.token_ids for r in found], [r.shapes for r in found], plain


def test_ranks_measure_and_choose_together(home, toys):
    """Two processes measure, each with a clock of its own, and go by the same costs. Mutants: how many cycles to time
    decided by each rank's clock, which leaves one waiting; a table of each rank's own; another rank's file read."""
    one, other = spawn(chosen, 2, toys.history(), toys.random_draft())
    assert one == other and one[1] == one[3] and len(list(home.iterdir())) == 1


def test_sampled_ids_do_not_depend_on_the_shapes(toys):
    """A seed gives the ids of plain decoding, whatever is chosen. Mutant: chains, which draw otherwise."""
    engine = pair(toys.history(), toys.random_draft(), max_context=256)
    engine.auto.shapes, engine.auto.costs = tuple(SHAPES), CHEAP
    how = [Sampling(max_new_tokens=60, temperature=1.0, seed=seed) for seed in (1, 2)]
    plain = [r.token_ids for r in engine.generate([[3], [5]], how, shape=PLAIN)]
    found = engine.generate([[3], [5]], how, shape=AUTO)
    assert [r.token_ids for r in found] == plain
    assert any(s != PLAIN for r in found for s in r.shapes) and all(s.topk > 1 or s == PLAIN for s in found[0].shapes)
    engine.auto.shapes = (Shape(3, 1, 4),)
    one_line(pytest.raises(Refused, engine.generate, [3], how[0], shape=AUTO), "sampling takes trees")


# What cycles cost


def test_costs_are_measured_once_and_kept(home, toys, monkeypatch):
    """Mutants: a key without the shapes, the code or the batch; a file that is not whole; a stale one that is used."""
    load = dict(device="cpu", max_context=128, max_batch=2, shape=AUTO, shapes=SHAPES)
    engine = Engine.load(toys.history(), toys.random_draft(), **load)
    (file,) = home.iterdir()
    table = engine.auto.tables[1]
    assert engine.auto.origin[1].startswith("measured") and str(file) in engine.auto.origin[1]
    assert set(table.shapes) == set(SHAPES) and set(table.catch_up) == {8, 64} and table.plain > 0
    assert all(table.cycle(s) > table.plain / 2 for s in SHAPES)
    assert not any(key[-1] for key in engine.programs.cycles)  # no stamped cycle is left
    assert engine.pool.free == engine.pool.size
    again = Engine.load(toys.history(), toys.random_draft(), **load)
    assert again.auto.origin[1] == f"read from {file}" and again.auto.tables[1] == table
    again.prepare(AUTO, 2)
    assert again.auto.origin[2].startswith("measured") and len(list(home.iterdir())) == 2
    stale = Engine.load(toys.history(), toys.random_draft(), **load | {"shapes": SHAPES[:2]})
    assert stale.auto.origin[1].startswith("measured") and set(stale.auto.tables[1].shapes) == set(SHAPES[:2])
    monkeypatch.setattr(measure, "_code", lambda: "another")
    assert Engine.load(toys.history(), toys.random_draft(), **load).auto.origin[1].startswith("measured")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"key": 1, "table": {}}', '{"key": {"a": 1}, "table": {"plain": 0}}', "\udcff"]
)
def test_a_kept_table_that_cannot_be_read_is_measured_again(text, tmp_path):
    """Mutant: any of these as an error."""
    file = tmp_path / "costs.json"
    assert measure.read(file, {"a": 1}) is None
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert measure.read(file, {"a": 1}) is None
    assert measure.keep(file, {"a": 1}, FAIR) == f"kept in {file}"
    assert measure.read(file, {"a": 1}) == FAIR and measure.read(file, {"a": 2}) is None
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_where_nothing_can_be_kept(tmp_path):
    """It says so, and goes on. Mutant: an error at start-up."""
    (tmp_path / "file").write_text("")
    said = measure.keep(tmp_path / "file" / "costs.json", {}, FAIR)
    assert said.startswith("not kept: ") and "\n" not in said


def test_ranks_take_the_slowest(toys):
    """A cycle ends when its slowest rank does, and all must decide by the same numbers. Mutant: each its own."""
    engine = pair(toys.history(), toys.random_draft())

    class Two:
        def every(self, numbers):
            return [numbers, [2 * x for x in reversed(numbers)]]

    engine.parts.tp = Two()
    assert measure._most(engine, [1.0, 5.0, 3.0]) == [6.0, 10.0, 3.0]


def test_a_table_survives_json():
    """Mutants: shapes or widths as texts; a rest of each shape summed up."""
    own = CostTable(1.5, {4: 2.0, 8: 3.0}, {Shape(3, 1, 4): 0.5}, 0.1, {1: 0.2}, {4: 9.0}, (Shape(3, 1, 4),), {8: 1.0})
    for table in (own, FAIR, CostTable(1.0, {4: 2.0}, shapes=(Shape(3, 1, 4),))):
        assert table_of(json.loads(json.dumps(json_of(table))), "x") == table


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


def test_the_command_line(home, toys, tmp_path, capsys):
    """The report says when the shape changed. Mutant: shapes of a fixed run."""
    from engine.generate import main

    ids, stats = tmp_path / "ids.jsonl", tmp_path / "stats.json"
    ids.write_text('{"token_ids": [3, 9]}')
    words = ["--target", toys.map(), "--draft", toys.map_draft(), "--prompt-file", str(ids), "--stats", str(stats)]
    words += ["--device", "cpu", "--max-context", "128", "--max-new-tokens", "40"]
    assert main([*words, "--shape", "auto"]) == 0
    said, run = capsys.readouterr().err, json.loads(stats.read_text())
    assert "shape auto: one of 0-1-1, 1-1-2" in said and "measured in" in said
    assert run["shapes"][0]["cycle"] == 0 and run["requests"][0]["token_ids"] == follow(9, 40, NEXT)
    names = {str(s) for s in (PLAIN, *GRID)}
    assert {entry["shape"] for entry in run["shapes"]} <= names and set(run["shapes"][0]) == {"cycle", "shape"}
    assert sum(entry["eager"] for entry in run["graphs"]) == run["requests"][0]["cycles"]
    assert main(words) == 0 and json.loads(stats.read_text())["shapes"] == []
