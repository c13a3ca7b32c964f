"""A cycle is a program of static shapes that never asks the host: its stages are operations on State and Tree alone."""

from dataclasses import fields, replace

import pytest
import torch
from oracles import Replay
from test_cycle import PLAIN, PROMPT, SHAPES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from toys import V, pair

from engine import Sampling, loading
from engine.buffers import State, Tree
from engine.cache import Cache
from engine.cycle import CatchUp, Cycle
from kernels import REFERENCE
from weights.capture import boundaries


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
    """All else would be a launch of its own. Mutants: a gather, a fill, a copy or an index made between operations."""
    noted = Noted(REFERENCE)
    engine = pair(toys.history(), toys.random_draft(), ops=noted.ops)
    events = engine.stream(PROMPT, Sampling(max_new_tokens=9), shape=shape, details=False)
    for _ in range(2):
        next(events)
    cycle = engine.programs.cycle(1, shape, engine.drafter if shape.steps else None, detail=False, stamped=False)
    with noted:
        cycle.run()
    events.close()
    assert not noted.names


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


@pytest.fixture(scope="module")
def history(toys):
    return pair(toys.history(), toys.random_draft())
