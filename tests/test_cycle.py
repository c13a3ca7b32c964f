"""What a cycle's stages do: the accept walk and commit by hand, the counts of scripted accept patterns. What kind of
program they are: test_cycle_program.py."""

import gc
import math
import random

import pytest
import torch
from oracles import Replay
from toys import NEXT, V, follow, pair

from engine import Sampling, Shape
from engine.graph import uncollected
from kernels import REFERENCE

PLAIN = Shape(0, 1, 1)
SHAPES = [PLAIN, Shape(1, 1, 2), Shape(3, 1, 4), Shape(4, 2, 8), Shape(5, 8, 64)]
PROMPT = [9, 8, 7, 40, 2, 5, 33]
pytestmark = pytest.mark.usefixtures("nan_memory")


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
        assert ints["n"].tolist() == [case["n"] + int(k) for case, k in zip(cases, lens, strict=True)]
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
    lens = torch.tensor([4, 2])
    REFERENCE.commit(storage, pages, prefix + lens, path, lens, 4)

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
