"""B47: shapes that alternate, across requests and within one: the same ids, one program a shape, and a head that has
caught up. B48: captures of several shapes in one pool of memory."""

import itertools

import pytest
import torch
from oracles import Forced, FreshHead, Replay, Transformers
from toys import NEXT, V, disturb, follow, pair

from engine import Sampling, Shape
from engine.asking import request_of
from engine.buffers import BACKLOG
from engine.chooser import Fixed
from engine.session import Session

PLAIN = Shape(0, 1, 1)
PROMPT = [9, 8, 7, 40, 2, 5, 33]
pytestmark = pytest.mark.usefixtures("nan_memory")
ROUNDS = [Shape(1, 1, 2), Shape(3, 1, 4), PLAIN, Shape(5, 1, 6), Shape(3, 2, 8), PLAIN, PLAIN, Shape(4, 4, 16)]


def test_requests_of_alternating_shapes(toys):
    """30 requests in one process, chain, tree and plain in turn, two prompts of different length, MAP and HISTORY. One
    program a (batch, shape), none added after the first time round. Mutants: programs found by too weak a key; one
    built anew each time."""
    engines = {
        "map": pair(toys.map(), toys.map_draft()),
        "history": pair(toys.history(), toys.random_draft()),
    }
    sampling = Sampling(max_new_tokens=9)
    prompts = [PROMPT, [(3 * i) % V for i in range(20)]]
    for name, engine in engines.items():
        want = [engine.generate(p, sampling, shape=PLAIN).token_ids for p in prompts]
        assert name == "history" or want == [follow(p[-1], 9, NEXT) for p in prompts]
        for number, shape in zip(range(30), itertools.cycle(ROUNDS), strict=False):
            for prompt, ids in zip(prompts, want, strict=True):
                result = engine.generate(prompt, sampling, shape=shape)
                assert result.token_ids == ids and result.shape == shape
                assert name == "history" or set(result.stats["emitted_per_cycle"][:-1]) == {shape.path}
            if number == len(ROUNDS):
                sizes = len(engine.graphs.entries), len(engine.programs.cycles), len(engine.programs.states)
        assert sizes[0] == len(set(ROUNDS))
        assert sizes == (len(engine.graphs.entries), len(engine.programs.cycles), len(engine.programs.states))
        assert all(e.eager > 1 for e in engine.graphs.entries.values())


class InTurn(Fixed):
    """A chooser that takes one shape after the other."""

    def __init__(self, shapes):
        super().__init__(*shapes[:1], shapes)
        self.turns = itertools.cycle(shapes)

    def choose(self, requests, lag):
        return next(self.turns)


def switching(engine, prompts, shapes, cap):
    """Decode with a shape for each launch, in turn; -> requests, in order."""
    requests = [request_of(engine.parts, i, p, Sampling(max_new_tokens=cap)) for i, p in enumerate(prompts)]
    session = Session(engine.programs, engine.pool, requests, len(prompts), InTurn(shapes), 32)
    for _ in session.events():
        pass
    return requests


@pytest.mark.parametrize("stretch", [1, 3, BACKLOG + 9], ids="{} plain rounds more".format)
def test_shapes_switch_within_a_request(toys, stretch):
    """Two requests, a new shape each round, plain rounds between and a long stretch of them: plain ids, and after every
    switch the head's numbers are those of an uncached pass. Mutants: no catch-up after plain rounds; the backlog cut at
    the next shape's path; catch-up positions or rows off by one."""
    draft, prompts = toys.random_draft(), [PROMPT, [(11 * i + 3) % V for i in range(20)]]
    engine = pair(toys.history(), draft, max_context=512)
    cap = 60 if stretch < BACKLOG else 180
    texts = [p + engine.generate(p, Sampling(max_new_tokens=cap + 20), shape=PLAIN).token_ids for p in prompts]
    engine.drafter = Forced(engine.drafter, Replay(texts, V, 0.7, seed=2))
    disturb(engine, float("nan"))
    requests = switching(engine, prompts, [*ROUNDS, *[PLAIN] * stretch], cap)
    assert [r.token_ids for r in requests] == [t[len(p) : len(p) + cap] for t, p in zip(texts, prompts, strict=True)]
    model = Transformers(toys.history())
    for slot, text in enumerate(texts):
        head = FreshHead(draft, text, model.features(text, engine.target.boundaries))
        rounds = [r for r in engine.drafter.rounds if r.seq_lens[slot] > 0]
        assert len(rounds) > 8
        for round in rounds:
            head.check(round, slot)
    assert engine.pool.free == engine.pool.size


def outlives(engine, want, shapes, turns, device):
    """Captures of `shapes` in this order, replayed `turns` times while blocks are taken, written over and given back,
    the drafter's made anew at times: plain decoding's logits every time."""
    engine.forget()
    for turn in range(turns):
        for shape in shapes:
            assert torch.equal(logits_of(engine, shape), want), (shape, turn)
        blocks = [torch.full((1 << size,), float("nan"), device=device) for size in (12, 18, 22, 24)]
        del blocks
        if turn % 25 == 24:
            engine.programs.drop(engine.drafter)


def logits_of(engine, shape):
    """Those of every token after the prompt's own, [n, V]."""
    events = list(engine.stream(PROMPT, Sampling(max_new_tokens=12, ignore_eos=True), shape=shape))
    return torch.cat([event.tree.logits[event.accepted] for event in events[1:]])


@pytest.mark.gpu
def test_captures_outlive_what_comes_and_goes(toys):
    """B48: the target's graphs before the draft's and behind them. Mutants: buffers of a capture that are not its
    pool's; captures of a drafter that is let go taking memory of others with them."""
    made = {how: pair(toys.history(), toys.random_draft(), device="cuda", graphs=how) for how in ("off", "required")}
    want = logits_of(made["off"], PLAIN)
    for shapes in ((PLAIN, Shape(3, 1, 4), Shape(3, 2, 8)), (Shape(3, 2, 8), Shape(3, 1, 4), PLAIN)):
        outlives(made["required"], want, shapes, 100, "cuda")
