"""Programs over page tables of several widths: a session takes those of the narrowest table that holds its rows."""

from types import SimpleNamespace

import pytest
import torch
from latent_toys import KIMI, deepseek
from oracles import Replay
from toys import V, disturb, pair

import kernels
from engine import Sampling, Shape, programs
from engine.asking import request_of
from engine.chooser import Fixed
from engine.programs import widths
from engine.session import Session
from engine.shape import PLAIN
from kernels import native

SHAPES = [PLAIN, Shape(3, 1, 4), Shape(4, 2, 8)]
PROMPTS = [[(11 * i + 3) % V for i in range(n)] for n in (90, 7)]
CAPS = (180, 300)


class Inside(Replay):
    """Right at 7 of 10 nodes; `seen`: the columns of every cycle's table, each of which must hold the cycle's rows."""

    def propose(self, state, tree, cache):
        super().propose(state, tree, cache)
        columns = state.pages.shape[1]
        assert int(state.seq_lens.max()) + tree.shape.rows_past_prefix <= columns * cache.page_size
        self.seen.append(columns)


@pytest.fixture(scope="module")
def engine(toys):
    return pair(toys.history(), toys.random_draft(), max_context=512)


@pytest.fixture(scope="module")
def plain(engine):
    """Ids of each prompt alone, by programs over the whole table."""
    engine.programs.widths = engine.programs.widths[-1:]
    ids = [
        engine.generate(p, Sampling(max_new_tokens=n), shape=PLAIN).token_ids
        for p, n in zip(PROMPTS, CAPS, strict=True)
    ]
    engine.programs.widths = widths(engine.programs.columns, 16, engine.parts.device)
    return ids


def test_widths():
    """On a GPU the tables whose attention has kernels of its own, and all; on the CPU doubled. Mutants: a short table
    of more positions than that kernel takes; a width of no column or beyond the table."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert widths(516, 16, cuda) == (44, 60, 516) and widths(129, 64, cuda) == (11, 15, 129)
    assert native.SHORT == (704, 960) and widths(12, 100, cuda) == (7, 9, 12)
    assert widths(60, 16, cuda) == (44, 60) and widths(44, 16, cuda) == (44,) and widths(9, 1024, cuda) == (9,)
    assert widths(36, 16, cpu) == (8, 16, 32, 36) and widths(3, 500, cpu) == (1, 2, 3)
    assert widths(8, 16, cpu) == (8,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
def test_tables_widen_under_a_request(engine, plain, shape, which):
    """Alone, and a short one beside a longer one that ends first: plain ids, every row inside its table, the narrowest
    programs at every length. Mutants: the rows of drafted nodes forgotten; the first request's length for all; tables
    that never get narrower again; a width chosen once a session."""
    texts = [prompt + ids for prompt, ids in zip(PROMPTS, plain, strict=True)]
    drafter, engine.drafter = engine.drafter, Inside(texts, V, 0.7, seed=2)
    engine.drafter.seen = seen = []
    disturb(engine, float("nan"))
    try:
        how = [Sampling(max_new_tokens=CAPS[i]) for i in which]
        results = engine.generate([PROMPTS[i] for i in which], how, shape=shape)
    finally:
        engine.drafter = drafter
    assert [r.token_ids for r in results] == [plain[i] for i in which]
    if shape != PLAIN:
        runs = [columns for at, columns in enumerate(seen) if at == 0 or seen[at - 1] != columns]
        assert runs == {(0,): [8, 16, 32], (1,): [8, 16, 32], (0, 1): [8, 16, 32, 16, 32]}[which]


def test_what_is_captured_ahead(engine):
    """At a session's opening the programs that it may take and no others. Mutants: all widths; the widest alone; the
    prompt's length without the nodes behind it."""
    shape, programs = Shape(3, 1, 4), engine.programs
    for length, tokens, want in (
        (20, 50, {8}),
        (20, 110, {8, 16}),
        (124, 100, {8, 16}),
        (125, 100, {16}),
        (9, 1, set()),
    ):
        programs.drop(engine.drafter)
        events = engine.stream([1] * length, Sampling(max_new_tokens=tokens), shape=shape, details=False)
        next(events)
        assert {key[3] for key in programs.cycles if key[1] == shape} == want, (length, tokens)
        events.close()
    programs.drop(engine.drafter)
    engine.prepare(shape)
    assert {key[3] for key in programs.cycles if key[1] == shape} == set(programs.widths)
    trees = {id(cycle.tree) for key, cycle in programs.cycles.items() if key[1] == shape}
    assert len(trees) == 1


def test_captures_are_watched(engine, monkeypatch):
    """Who watches walks through what is captured ahead, and only where something is. Mutants: captures behind the
    watcher's back; captured ones walked through again; an eager program taken for a capture; all objects looked at for
    every capture."""
    walked, made, looks, graphs = [], [], [], engine.graphs
    engine.programs.drop(engine.drafter)

    def watching(programs):
        for works in programs:
            walked.append(works[1:3])
            yield works

    monkeypatch.setattr(graphs, "capturing", watching)
    engine.prepare(Shape(2, 1, 3))
    assert not walked
    monkeypatch.setattr(graphs, "reason", None)
    monkeypatch.setattr(graphs, "_capture", lambda program, stages: made.append(program) or program)
    monkeypatch.setattr("engine.graph.gc.collect", lambda: looks.append(1))
    for shape, rounds in ((Shape(3, 1, 4), 1), (Shape(3, 1, 4), 1), (Shape(1, 1, 2), 2)):
        engine.prepare(shape)
        assert len(walked) == len(made) == rounds * len(engine.programs.widths) and walked[-1] == (1, shape)
        assert len(looks) == rounds
    monkeypatch.undo()
    engine.programs.drop(engine.drafter)


def test_captures_are_no_part_of_a_prompt(engine, monkeypatch):
    """Fault B52: a first piece of its width is captured under the prompt's own clock. Mutant: that time counted as
    prefill and as capture."""

    def forward(programs, target):
        def slow(batch, cache):
            engine.graphs.capture_ms += 1e6
            return target.forward(batch, cache)

        return slow

    monkeypatch.setattr(type(engine.programs), "forward", forward)
    monkeypatch.setattr(engine.graphs, "capture_ms", 0.0)
    result = engine.generate([1, 2, 3], Sampling(max_new_tokens=2, ignore_eos=True), shape=PLAIN)
    assert engine.graphs.capture_ms == 1e6 and result.prefill_ms < 1 - 9e5 and result.first_token_ms < 1 - 9e5


@pytest.mark.parametrize("emitted, flight, want", [(105, 0, 8), (106, 0, 16), (101, 1, 8), (102, 1, 16), (240, 1, 16)])
def test_cycles_under_way_count(engine, emitted, flight, want):
    """The host knows what was emitted before the cycles under way, each of which may emit a whole path; but no request
    gets longer than its limit. Mutants: cycles under way not counted; more rows than a request can have."""
    shape, how = Shape(3, 1, 4), Sampling(max_new_tokens=233)
    request = request_of(engine.parts, 0, [1] * 20, how)
    session = Session(engine.programs, engine.pool, [request], 1, Fixed(shape), 32)
    request.token_ids, session.slots = [1] * emitted, [request]
    session.flight.extend([SimpleNamespace(shape=shape)] * flight)
    assert session._columns(shape) == want  # 20 + emitted - 1 committed rows, 4 for each cycle, 4 nodes


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_fused_operations_see_part_of_a_table(toys, kind, monkeypatch):
    """Two rows of a table that is wider than what a pass sees of it. Mutant: the width of the view taken for the step
    from one sequence's pages to the next one's."""
    monkeypatch.setattr(programs, "NARROW", 16)
    path = toys.history() if kind == "grouped" else deepseek(toys, num_hidden_layers=1, **KIMI)
    asked = [[5, 9, 2, 7, 1, 30, 4, 8, 6, 3, 11], [4, 7]], Sampling(max_new_tokens=8, ignore_eos=True)
    found = []
    for table in (kernels.REFERENCE, kernels.FUSED):
        engine = pair(path, page_size=16, max_context=64, ops=table, dtype="float32")
        found.append([r.token_ids for r in engine.generate(*asked, shape=PLAIN)])
    assert found[0] == found[1] and {key[3] for key in engine.programs.cycles} == {1, 2}
