"""The cycle: no host and static shapes in any stage, stages that speak only through State and Tree, and
the counts of scripted accept patterns."""

import gc
import math
import random
from dataclasses import fields, replace

import pytest
import torch
from oracles import Replay
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from toys import NEXT, V, follow, pair

from engine import Sampling, Shape, loading
from engine.buffers import State, Tree
from engine.cache import Cache
from engine.cycle import CatchUp, Cycle
from engine.graph import uncollected
from kernels import REFERENCE
from weights.capture import boundaries

PLAIN = Shape(0, 1, 1)
SHAPES = [PLAIN, Shape(1, 1, 2), Shape(3, 1, 4), Shape(4, 2, 8), Shape(5, 8, 64)]
PROMPT = [9, 8, 7, 40, 2, 5, 33]
pytestmark = pytest.mark.usefixtures("nan_memory")


class NoHost(TorchDispatchMode):
    """Refuses what waits for the device or gives a shape that depends on values."""

    REFUSED = (
        "_local_scalar_dense item is_nonzero equal allclose nonzero nonzero_numpy argwhere masked_select _unique2 "
        "unique_dim unique_consecutive bincount histc"
    ).split()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        masks = [
            x
            for x in (args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ())
            if x is not None
        ]
        assert name not in self.REFUSED and not any(m.dtype == torch.bool for m in masks), func
        assert func is not torch.ops.aten.repeat_interleave.Tensor, func
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def history(toys):
    return pair(toys.history(), toys.random_draft())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_stage_asks_the_host(history, shape):
    """Mutants: int(tensor), a bool mask as index or .item() anywhere in a cycle, result unchanged. (The mode
    does not see .tolist(): the house test does.)"""
    events = history.stream(PROMPT, Sampling(max_new_tokens=9), shape=shape)
    next(events)
    cycle = history.programs.cycle(1, shape, history.drafter, detail=True, stamped=False)
    with NoHost():
        cycle.run()
        CatchUp(history.drafter, history.parts.cache, cycle.state).run()
    events.close()


class Noted(TorchDispatchMode):
    """Names of what runs on tensors and is no view of one, and no operation of the table."""

    VIEWS = "view slice select expand unsqueeze as_strided empty new_empty split unbind transpose t".split()

    def __init__(self, ops):
        super().__init__()
        self.names, self.inside = [], False
        self.ops = replace(ops, **{f.name: self._quiet(getattr(ops, f.name)) for f in fields(ops)})

    def _quiet(self, operation):
        def call(*args):
            self.inside = True
            out = operation(*args)
            self.inside = False
            return out

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if not self.inside and name not in self.VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cycle_is_made_of_operations(toys, shape):
    """All else is a launch of its own: one that joins the features, one that counts the rows committed. Mutants: a
    gather, a fill, a copy or an index made between operations."""
    noted = Noted(REFERENCE)
    engine = pair(toys.history(), toys.random_draft(), ops=noted.ops)
    events = engine.stream(PROMPT, Sampling(max_new_tokens=9), shape=shape, details=False)
    for _ in range(2):
        next(events)
    cycle = engine.programs.cycle(1, shape, engine.drafter if shape.steps else None, detail=False, stamped=False)
    with noted:
        cycle.run()
    events.close()
    assert sorted(noted.names) == ["add_", "cat"]


@pytest.mark.parametrize(
    "expression", ["int(x[0])", "x[x > 1]", "x.nonzero()", "x[0].item()", "bool(x.any())", "x.unique()"]
)
def test_the_mode_refuses(expression):
    with pytest.raises((AssertionError, RuntimeError)), NoHost():
        eval(expression, {"x": torch.arange(3)})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_stage_has_static_shapes(toys, shape):
    """All four stages, three slots, on tensors without values. Mutant: a slice by a length on the device."""
    options = loading.Options(target=toys.history(), draft=toys.random_draft())
    target, draft = loading.open_target(options), loading.open_draft(options)
    capture = boundaries(draft.config, target.config.layers)
    with FakeTensorMode(allow_non_fake_inputs=False):
        plan = loading.Plan(target, draft, capture, 128, REFERENCE, loading.TP(), torch.float32)
        model, _, drafter, _ = plan.build(torch.device("cpu"))
        kinds = {"target": model.cache_rows, "draft": drafter.cache_rows}
        cache = Cache(kinds, 20, 4, torch.float32, torch.device("cpu"))
        state = State.allocate(3, 12, model.features, torch.float32, torch.device("cpu"))
        tree = Tree.allocate(3, shape, model.features, torch.float32, torch.device("cpu"), V)
        cycle = Cycle(model, drafter, cache, state, tree, REFERENCE)
        cycle.run()
        CatchUp(drafter, cache, state).run()
        assert tree.tokens.shape == (3, shape.draft_tokens) and state.seq_lens.shape == (3,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stages_speak_only_through_state_and_tree(history, shape, monkeypatch):
    """Each stage by an object of its own, the Tree full of nonsense before each cycle. Mutants: something kept on the
    cycle from draft to accept; a field of the Tree left from the cycle before."""
    sampling, real, prompts = Sampling(max_new_tokens=30), history.drafter, [PROMPT, PROMPT[:3]]
    plain = history.generate(prompts, Sampling(max_new_tokens=40), shape=PLAIN)
    oracle = Replay([p + r.token_ids for p, r in zip(prompts, plain, strict=True)], V, 0.7)

    def run():
        seen = []
        for history.drafter in (oracle, real):
            for result in history.generate(prompts, sampling, shape=shape):
                seen.append((result.token_ids, result.stats["emitted_per_cycle"]))
            events = history.stream(PROMPT, sampling, shape=shape)
            seen += [
                (e.tree.tokens.tolist(), e.tree.parents.tolist(), e.accepted) for e in events if e.tree is not None
            ]
        return seen

    want = run()
    assert want[0][0] == plain[0].token_ids[:30]

    def alone(self, stages=Cycle.stages):
        t = self.tree
        if t.shape.steps:
            for x in (t.tokens, t.parents):
                x.fill_(1 << 40)
        for x in (t.depths, t.ancestors, t.positions, t.index, t.target_ids, t.path, self.state.emitted):
            x.fill_(1 << 40)
        t.aux.fill_(float("nan"))
        t.lse.fill_(float("nan"))
        for stage in stages:
            getattr(Cycle(self.target, self.drafter, self.cache, self.state, t, self.ops), stage)()
        self.publish()

    monkeypatch.setattr(Cycle, "run", alone)
    assert run() == want


def walked(case):
    """What accept must give for one sequence, by hand: (path, emitted, matched, done, fault)."""
    path, emitted, matched, fault = [0], [], 0, False
    if case["done"]:
        return [], [], None, True, False
    while len(emitted) < case["limit"] - case["n"]:
        node = path[-1]
        if not case["finite"][node]:
            fault = True
            break
        emitted.append(case["answers"][node])
        if emitted[-1] in case["stops"]:
            return path, emitted, matched, True, False
        children = [
            i for i, p in enumerate(case["parents"]) if i and p == node and case["tokens"][i] == case["answers"][node]
        ]
        if not children:
            break
        path.append(children[0])
        matched += 1
    return path, emitted, matched, fault or len(emitted) == case["limit"] - case["n"], fault


def straight(case):
    """How many nodes a chain of first children keeps, and whether a further one was wrong."""
    node = kept = 0
    while children := [i for i, p in enumerate(case["parents"]) if i and p == node]:
        hits = [i for i in children if case["tokens"][i] == case["answers"][node]]
        if not hits or hits[0] != children[0]:
            return kept, 1
        node, kept = children[0], kept + 1
    return kept, 0


def test_accept_walk_by_hand():
    """600 random trees of four tokens, with stops, limits, ended slots and non-finite nodes. Mutants: the stop looked
    for in the last token only; emitting past the limit; a non-finite node off the path that ends the sequence; a second
    child preferred; an ended slot that emits; rows that are cut counted as the drafter's backlog; of a chain of first
    children, any child counted, a branch that ends counted as a miss, or the root's own parent taken for a child's."""
    draw = random.Random(1)
    t, depth = 7, 4
    for _ in range(150):
        cases = []
        for _ in range(4):
            parents = [0]
            depths = [0]
            for node in range(1, t):
                parents.append(draw.choice([i for i in range(node) if depths[i] < depth - 1]))
                depths.append(depths[parents[-1]] + 1)
            cases.append(
                dict(
                    parents=parents,
                    tokens=[draw.randrange(-1, 3) for _ in range(t)],
                    answers=[draw.randrange(3) for _ in range(t)],
                    finite=[draw.random() < 0.9 for _ in range(t)],
                    n=10,
                    limit=10 + draw.choice([1, 2, 3, 9]),
                    stops=draw.choice([[], [], [2], [0, 2]]),
                    done=draw.random() < 0.1,
                )
            )
        ints = {
            k: torch.tensor([c[k] for c in cases]) for k in ("parents", "tokens", "answers", "finite", "n", "limit")
        }
        stops = torch.tensor([(c["stops"] + [-1, -1])[:2] for c in cases])
        path, emitted = torch.zeros(2, 4, depth, dtype=torch.int64)
        lens, matched, fault, chain, missed, root = torch.zeros(6, 4, dtype=torch.int64)
        done, backlog, drafted = torch.tensor([int(c["done"]) for c in cases]), torch.full((4,), 7), draw.random() < 0.5
        ints["finite"] = torch.where(ints["finite"], 1.0, draw.choice([math.nan, math.inf, -math.inf]))
        REFERENCE.walk(
            *(ints[k] for k in ("tokens", "parents", "answers", "finite", "n", "limit")),
            *(stops, path, emitted, lens, matched, done, fault, chain, missed, root.fill_(-5), backlog, drafted),
        )
        assert torch.equal(backlog, lens + (0 if drafted else 7))
        for i, case in enumerate(cases):
            want_path, want, _, ended, broken = walked(case)
            k = int(lens[i])
            assert emitted[i, :k].tolist() == want and path[i, :k].tolist() == want_path[:k], case
            assert (bool(done[i]), bool(fault[i])) == (ended, broken), case
            assert int(root[i]) == (want[-1] if want else -5)
            if all(case["finite"]):
                assert (int(chain[i]), int(missed[i])) == straight(case), case


def test_commit_reads_the_whole_path_first():
    """Node 2 is read after row 2 was written, unless the path is read first; other rows stay. Mutants: rows moved one
    by one from the end; all T rows moved; 32-bit or unpaged slots."""
    pages = torch.tensor([[3, 1, 6], [2, 5, 4]], dtype=torch.int32)
    storage = torch.arange(7 * 4, dtype=torch.float32)[None, None, :, None, None].expand(2, 2, 28, 1, 1).clone()
    before = storage.clone()
    prefix, path = torch.tensor([2, 5]), torch.tensor([[0, 2, 3, 7], [0, 3, 4, 6]])
    REFERENCE.commit(storage, pages, prefix, path, torch.tensor([4, 2]), 4)

    def slot(b, row):
        return int(pages[b, row // 4]) * 4 + row % 4

    moved = {
        slot(b, int(prefix[b]) + k): slot(b, int(prefix[b] + path[b, k])) for b, n in ((0, 4), (1, 2)) for k in range(n)
    }
    for at in range(4, 28):
        assert torch.equal(storage[:, :, at], before[:, :, moved.get(at, at)]), at


# ------------------------------------------------------------------ B51: counts
@pytest.mark.parametrize("shape", [Shape(3, 1, 4), Shape(3, 2, 8)], ids=str)
def test_counts_of_a_scripted_pattern(toys, shape):
    """3, 0, 1, 2 drafts accepted of 3, a match after the miss in round three. Mutants: matches after a miss counted,
    the bonus token in the rate, the prefill's token in the length, rates per emitted token."""
    engine = pair(toys.map(), toys.map_draft())
    prompt, right = [3, 9], torch.zeros(30, 3, dtype=torch.bool)
    for n, row in {2: [1, 1, 1], 6: [0, 1, 1], 7: [1, 0, 1], 9: [1, 1, 0]}.items():
        right[n] = torch.tensor(row, dtype=torch.bool)
    text = follow(9, 40, NEXT)
    engine.drafter = Replay([prompt + text], V, right.tolist())
    result = engine.generate(prompt, Sampling(max_new_tokens=11), shape=shape)
    stats = result.stats
    assert result.token_ids == text[:11] and stats["output_tokens"] == 11
    assert stats["emitted_per_cycle"] == [4, 1, 2, 3] and stats["cycles"] == 4
    assert (stats["accept_length"], stats["accept_length_drafts"], stats["accept_rate"]) == (2.5, 1.5, 0.5)
    assert stats["accept_rate_by_position"] == [0.75, 0.5, 0.25]

    cut = engine.generate(prompt, Sampling(max_new_tokens=3), shape=shape).stats
    assert (cut["emitted_per_cycle"], cut["accept_rate"]) == ([2], 2 / 3)
    stopped = engine.generate(prompt, Sampling(max_new_tokens=20, stop_ids=[text[2]]), shape=shape).stats
    assert (stopped["emitted_per_cycle"], stopped["accept_rate"]) == ([2], 2 / 3)
    none = engine.generate(prompt, Sampling(max_new_tokens=1), shape=shape).stats
    assert (none["cycles"], none["accept_length"], none["accept_rate"]) == (0, None, None)
    plain = engine.generate(prompt, Sampling(max_new_tokens=5), shape=PLAIN).stats
    assert (plain["emitted_per_cycle"], plain["accept_length"]) == ([1] * 4, 1.0)
    assert (plain["accept_rate"], plain["accept_length_drafts"]) == (None, None)


def test_nothing_is_collected_during_a_capture():
    """What is garbage before a capture goes before it, what becomes garbage in it goes after it, also after an error.
    Mutants: a collection in the middle of a capture, which destroys an older graph there; the collector left off."""
    gone = []

    class Knot:
        def __init__(self, name):
            self.own, self.name = self, name

        def __del__(self):
            gone.append(self.name)

    gc.collect()
    Knot("before")
    with pytest.raises(ZeroDivisionError), uncollected():
        assert gone == ["before"]
        Knot("inside")
        kept = [[] for _ in range(100_000)]
        assert gone == ["before"] and len(kept) and 1 / 0
    assert gc.isenabled()
    gc.collect()
    assert gone == ["before", "inside"]
