"""Fault B46 of the whole kind: padded rows, idle slots and ended requests touch nothing that is somebody's."""

import pytest
import torch
from toys import disturb, pair

from engine import Sampling, Shape
from engine.buffers import State
from engine.session import Session
from engine.shape import PLAIN

PROMPTS = [[1, 2, 3, 4, 5], [9] * 17, [7, 8, 9] * 6]
LENGTHS = [4, 30, 17]  # they end at different cycles, while others go on
SHAPES = [PLAIN, Shape(1, 1, 2), Shape(3, 1, 4), Shape(3, 4, 12)]


@pytest.fixture
def engine(toys):
    """A pair whose cache holds NaN wherever nobody has written, four slots, small pages."""
    engine = pair(toys.history(), toys.random_draft(), max_batch=4, page_size=4, max_context=96)
    disturb(engine, float("nan"))
    return engine


def samplings():
    return [Sampling(max_new_tokens=n, ignore_eos=True) for n in LENGTHS]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_requests_rows_keep_their_bytes(engine, shape, monkeypatch):
    """Mutants: padding written to row 0 of a sequence; a slot that keeps its table when its request ends; rows past a
    request's last page looked up in whatever the table holds there."""
    foreign = engine.pool.take(64)  # somebody else's pages, the lowest ones
    slots = [page * 4 + row for page in foreign for row in range(4)]
    start = State.start

    def littered(state, slot, pages, *rest):
        start(state, slot, pages, *rest)
        state.table[slot, len(pages) :] = foreign[0]  # stale entries past the request's own pages

    monkeypatch.setattr(State, "start", littered)
    storage = engine.parts.cache.storage
    for kind in storage:
        storage[kind][:, :, slots] = torch.randn(storage[kind][:, :, slots].shape)
    before = {kind: rows[:, :, slots].clone() for kind, rows in storage.items()}
    engine.generate(PROMPTS, samplings(), shape=shape)
    for kind, rows in storage.items():
        assert torch.equal(rows[:, :, slots], before[kind]), kind
    engine.pool.give_back(foreign)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_three_requests_in_four_slots_equal_each_alone(engine, shape):
    """Mutants: NaN of an unused row reaching a request; an ended slot that goes on emitting; one prefix for all."""
    alone = [engine.generate(p, s, shape=shape).token_ids for p, s in zip(PROMPTS, samplings(), strict=True)]
    disturb(engine, float("nan"))
    engine.pool.forget()
    together = [r.token_ids for r in engine.generate(PROMPTS, samplings(), shape=shape)]
    assert together == alone


def test_an_idle_slot_writes_to_the_scratch_page_alone(engine, monkeypatch):
    """Mutant: an idle slot's cycle writing at row 0 of page 1."""
    launch, seen = Session._launch, []

    def watched(session):
        report = launch(session)
        idle = [slot for slot, request in enumerate(session.slots) if request is None]
        seen.extend(session.state.table[slot].abs().sum().item() for slot in idle)
        return report

    monkeypatch.setattr(Session, "_launch", watched)
    engine.generate(PROMPTS, samplings(), shape=Shape(3, 1, 4))
    assert seen and not any(seen)
