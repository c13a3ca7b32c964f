"""A shape that chooses itself changes no id and no logit, and the drafter misses nothing."""

import pytest
import torch
from test_auto import CHEAP, FAIR, SHAPES, auto
from toys import one_line, pair

from engine import Engine, Sampling, Shape
from engine.auto import AUTO
from engine.chooser import Fixed
from engine.options import DEMO
from engine.prompts import read
from engine.shape import PLAIN
from weights.config import Refused


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


def test_every_rank_decides_alike(toys):
    """The same costs and tokens, the same shapes. Mutant: a clock or a set's order in the decision."""
    engine = pair(toys.history(), toys.random_draft(), max_context=256, max_batch=1)
    runs = [auto(engine, FAIR, [[9, 8], [7]], 80) for _ in range(2)]
    assert runs[0] == runs[1]


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
