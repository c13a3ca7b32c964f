"""The toy kit is what it says: every other test leans on it."""

import pytest
import torch
from oracles import LAYOUTS, Replay, layout
from toys import BRANCH, NEXT, OTHER, RING, V, follow, pair

from engine import Sampling, Shape

CHAIN = Shape(3, 1, 4)
pytestmark = pytest.mark.usefixtures("nan_memory")


def logits_of(engine, prompt, shape):
    """[rows, V] of every tree of a run."""
    events = engine.stream(prompt, Sampling(max_new_tokens=5), shape=shape)
    return torch.cat([event.tree.logits for event in events if event.tree is not None])


def test_map_target_knows_its_next_token_by_8(toys):
    """MAP: ids by hand, the best logit 8 above all others. Mutant: attention or experts that add something."""
    engine = pair(toys.map())
    assert engine.generate([5, 9], Sampling(max_new_tokens=80)).token_ids == follow(9, 80, NEXT)
    best = logits_of(engine, [9], Shape(0, 1, 1)).topk(2).values
    torch.testing.assert_close(best[:, 0] - best[:, 1], torch.full((len(best),), 8.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize("ids", [None, BRANCH])
def test_map_draft_is_right_every_time(toys, ids):
    """298 proposals, none wrong. Mutant: a draft position or feature off by one."""
    after = NEXT if ids is None else RING
    engine = pair(toys.map(after), toys.map_draft(after, ids), max_context=512)
    result = engine.generate([7], Sampling(max_new_tokens=298), shape=Shape(5, 1, 6))
    assert result.token_ids == follow(7, 298, after)
    assert set(result.stats["emitted_per_cycle"][:-1]) == {6}


def test_wrong_draft_is_right_nowhere(toys):
    assert not any(a == b for a, b in zip(NEXT, OTHER, strict=True))
    result = pair(toys.map(), toys.wrong_draft()).generate([7], Sampling(max_new_tokens=40), shape=CHAIN)
    assert result.token_ids == follow(7, 40, NEXT) and set(result.stats["emitted_per_cycle"]) == {1}


def test_fixed_draft_proposes_its_ids(toys):
    """All ids of the table, whatever the weights. Mutant: d2t read as ids, not offsets."""
    engine = pair(toys.map(), toys.fixed_draft(BRANCH))
    for event in engine.stream([7], Sampling(max_new_tokens=6), shape=Shape(1, 4, 5)):
        assert event.tree is None or sorted(event.tree.tokens[1:].tolist()) == sorted(BRANCH)


def test_coin_target_has_its_distribution_everywhere(toys):
    p = [0.5, 0.2, 0.1, 0.1, 0.06, 0.04] + [0.0] * (V - 6)
    seen = logits_of(pair(toys.coin(p)), [3, 60, 2], Shape(0, 1, 1)).softmax(-1)
    torch.testing.assert_close(seen, torch.tensor(p).expand_as(seen), atol=1e-5, rtol=1e-4)


def test_history_text_does_not_repeat_itself(toys):
    ids = pair(toys.history()).generate([3, 1, 4], Sampling(max_new_tokens=60)).token_ids
    assert len(set(zip(ids, ids[1:], strict=False))) > 45


@pytest.mark.parametrize("shape", [Shape(3, 1, 4), Shape(3, 2, 8), Shape(4, 4, 16), Shape(5, 8, 64)], ids=str)
def test_oracle_layouts_scatter_the_right_branch(shape):
    """In a tree commit has rows to move, and they lie elsewhere each time."""
    paths = set()
    for seed in range(LAYOUTS):
        parents, depths, path = layout(shape, seed)
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
        assert max(depths) <= shape.steps and depths[path[-1]] == len(path) - 1 == shape.path - 1
        paths.add(tuple(path))
        if shape.topk > 1:
            assert path[-1] == shape.draft_tokens - 1 and path != list(range(len(path)))
    assert shape.topk == 1 or len(paths) > 3


@pytest.mark.parametrize("shape", [Shape(4, 1, 5), Shape(5, 8, 64)], ids=str)
def test_replay_accepts_every_length(toys, shape):
    """The 70 % oracle: 0 to steps drafts accepted all occur, more than 2.5 tokens a cycle."""
    engine = pair(toys.history())
    prompt = [9, 8, 7]
    text = prompt + engine.generate(prompt, Sampling(max_new_tokens=200)).token_ids
    engine.drafter = Replay([text], V, 0.7)
    result = engine.generate(prompt, Sampling(max_new_tokens=200), shape=shape)
    assert set(result.stats["emitted_per_cycle"]) == set(range(1, shape.steps + 2))
    assert result.stats["accept_length"] > 2.5 and prompt + result.token_ids == text
