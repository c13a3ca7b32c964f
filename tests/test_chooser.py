"""How a shape is chosen, by tables of costs and patterns of acceptance alone: no engine runs."""

import pytest
from test_auto import costs

from engine import Shape
from engine.chooser import Average, Chooser, Experience, Rates
from engine.cost import CostTable
from engine.shape import PLAIN


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
