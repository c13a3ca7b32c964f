"""Drafters and weights that change under a running engine."""

import gc
import time
import weakref

import pytest
import torch
from oracles import Replay
from toys import V, disturb, pair

from engine import Refused, Sampling, Shape
from engine.cache import Rows
from engine.cycle import Cycle
from engine.graph import Entry
from engine.watch import tensors

PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 2, 8)
TEXT = [(i * i + 5 * i) % V for i in range(45)]

pytestmark = pytest.mark.usefixtures("nan_memory")


def test_drafters_that_were_replaced_are_let_go(toys):
    """Programs, captures and views of the old one go; storage of the same size is zeroed in place, another size is
    allocated anew; the target's own programs stay. Mutants: a table of programs that keeps every drafter; captures that
    point to storage that is gone; storage re-allocated for nothing, under captures that write it."""
    engine = pair(toys.history(), toys.random_draft())
    engine.generate(TEXT[:9], Sampling(max_new_tokens=5), shape=PLAIN)
    engine.generate(TEXT[:9], Sampling(max_new_tokens=5), shape=CHAIN)
    storage, plain = engine.cache.storage["draft"], len(engine.graphs.entries)
    old = weakref.ref(engine.drafter)
    engine.drafter = pair(toys.history(), toys.random_draft(seed=9)).drafter
    gc.collect()
    assert old() is None and engine.cache.storage["draft"] is storage and not storage.any()
    assert len(engine.graphs.entries) == plain - 1 and {e["shape"] for e in engine.graphs.report()} == {"0-1-1"}
    want = engine.generate(TEXT[:9], Sampling(max_new_tokens=30), shape=PLAIN).token_ids
    wider = pair(toys.history(), toys.random_draft(kv_heads=4)).drafter
    text = TEXT[:9] + engine.generate(TEXT[:9], Sampling(max_new_tokens=50), shape=PLAIN).token_ids
    for drafter, rows in ((wider, wider.cache_rows), (Replay([text], V, 0.7), None), (wider, wider.cache_rows)):
        engine.drafter = drafter
        disturb(engine)
        assert engine.cache.kinds["draft"] == rows and ("draft" in engine.cache.storage) == (rows is not None)
        if rows is not None:
            assert engine.cache.storage["draft"].shape[3] == 4
        for shape in (CHAIN, TREE):
            assert engine.generate(TEXT[:9], Sampling(max_new_tokens=30), shape=shape).token_ids == want
    engine.drafter = None
    assert not [key for key in engine.programs.cycles if key[1] != PLAIN]
    with pytest.raises(Refused, match="needs a draft"):
        engine.generate(TEXT[:9], shape=CHAIN)
    assert Rows(1, 2, 4, 16) == wider.cache_rows


class Captured:
    """Stands for a captured graph over the weights of its time: a replay runs the cycle with them."""

    def __init__(self, cycle, log):
        self.cycle, self.log = cycle, log

    def replay(self):
        self.log.append(1)
        self.cycle.run()


@pytest.mark.parametrize("place", ["target", "tied", "draft", "layer", "drafter's layer"])
def test_a_replaced_weight_drops_the_captures(toys, place):
    """Captures point to tensors: one that was replaced is seen when the next request begins, one changed in place
    leaves them alone. Mutants: captures kept; captures dropped at every request; only the top level looked at; a weight
    whose old tensor another name still holds (a tied head) taken for unchanged."""
    engine = pair(toys.history(), toys.random_draft())
    sampling, log = Sampling(max_new_tokens=9), []
    engine.generate(TEXT[:9], sampling, shape=CHAIN)

    def capture():
        columns = engine.programs.widths[0]
        cycle = engine.programs.cycle(1, CHAIN, engine.drafter, detail=False, stamped=False, columns=columns)
        entry = Entry(1, str(CHAIN), Cycle.stages, None, Captured(cycle, log))
        engine.graphs.entries[1, CHAIN, id(cycle), Cycle.stages] = entry

    def replays():
        before = len(log)
        engine.generate(TEXT[:9], sampling, shape=CHAIN)
        return len(log) - before

    if place == "tied":
        engine.target.head.weight = engine.target.embedding.weight
        replays()
    capture()
    assert replays() > 0 < replays()
    with torch.no_grad():
        engine.target.layers[1].attention.out.weight.mul_(1.25)
        engine.drafter.fusion.fc.weight.mul_(1.25)
    assert replays() > 0
    if place == "layer":
        engine.target.layers[1] = engine.target.layers[0]
    elif place == "drafter's layer":
        engine.drafter.layers[0] = pair(toys.history(), toys.random_draft(seed=8)).drafter.layers[0]
    else:
        head = engine.target.head if place in ("target", "tied") else engine.drafter.head
        head.weight = head.weight * 1.5
    assert replays() == 0
    capture()
    assert replays() > 0 < replays()
    if place == "target":
        engine.forget()
        assert replays() == 0


def test_weights_changed_in_place_count_from_the_next_request(toys):
    """Target and draft. Mutant: a copy taken when a program was built."""

    def sharpened(config, tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)

    engine = pair(toys.map(), toys.map_draft())
    engine.generate([3, 9], Sampling(max_new_tokens=9), shape=CHAIN)
    other = pair(toys.altered(toys.map(), sharpened), toys.map_draft())
    with torch.no_grad():
        engine.target.head.weight.copy_(engine.target.head.weight.roll(1, 0).clone())
    for shape in (PLAIN, CHAIN):
        want = other.generate([3, 9], Sampling(max_new_tokens=9), shape=shape)
        got = engine.generate([3, 9], Sampling(max_new_tokens=9), shape=shape)
        assert (got.token_ids, got.cycles) == (want.token_ids, want.cycles)


def test_the_look_at_the_weights_costs_little(toys):
    """It runs before every first token: under 10 microseconds a tensor. Mutant: values read instead of versions."""
    engine, times = pair(toys.history(layers=8), toys.random_draft(layers=8)), []
    for _ in range(20):
        began = time.perf_counter()
        engine._look()
        times.append(time.perf_counter() - began)
    assert min(times) < 10e-6 * len(tensors([engine.target, engine.drafter]))
