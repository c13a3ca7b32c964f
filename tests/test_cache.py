"""Pages: every prompt length around their borders (B12), none lost whatever a request's end (B13), nobody's rows
touched by another, contexts filled to the last position (B29)."""

import pytest
import torch
from oracles import Forced, FreshHead, Replay, Transformers
from toys import NEXT, V, disturb, follow, pair

from engine import Refused, Sampling, Shape
from engine.cache import Cache, Pool, Rows

PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 2, 8)
pytestmark = pytest.mark.usefixtures("nan_memory")


def lengths(page):
    """1 .. 3p + 1, or those around the borders where that is many."""
    if page <= 4:
        return range(1, 3 * page + 2)
    return [1, 2, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1, 3 * page, 3 * page + 1]


@pytest.mark.parametrize("page", [1, 4, 16, 64])
def test_map_at_every_prompt_length(toys, page):
    """2p new tokens accept everything, nothing changes at a border. Mutants: an empty remainder at an exact multiple; a
    row after a border in the page before it."""
    engine = pair(toys.map(), toys.map_draft(), page_size=page, max_context=512)
    new = max(6, 2 * page)
    for n in lengths(page):
        prompt = follow(5, n, NEXT)
        result = engine.generate(prompt, Sampling(max_new_tokens=new), shape=CHAIN)
        assert result.token_ids == follow(prompt[-1], new, NEXT), n
        assert set(result.stats["emitted_per_cycle"][:-1]) <= {4}, n


@pytest.mark.parametrize("page", [1, 4, 16, 64])
def test_history_at_every_prompt_length(toys, page):
    """Ids of one uncached pass, and draft numbers of an uncached head: a row lost at a border shows. Mutant: draft rows
    in slots of another page size."""
    draft = toys.random_draft()
    engine = pair(toys.history(), draft, page_size=page, max_context=512)
    model, all_lengths = Transformers(toys.history()), list(lengths(page))
    text = [(i * i + 3) % V for i in range(max(all_lengths))]
    real = engine.drafter
    for n in all_lengths:
        engine.drafter = real
        want = engine.generate(text[:n], Sampling(max_new_tokens=24), shape=PLAIN).token_ids
        logits = model(text[:n] + want[:-1])[0][n - 1 :]
        assert logits.argmax(-1).tolist() == want, n
        forced = Forced(real, Replay([text[:n] + want], V, 0.7, seed=n))
        engine.drafter = forced
        disturb(engine)
        result = engine.generate(text[:n], Sampling(max_new_tokens=12), shape=(CHAIN, TREE)[n % 2])
        forced.release()
        assert result.token_ids == want[:12], n
        head = FreshHead(draft, text[:n] + want, model.features(text[:n] + want, engine.target.boundaries))
        for round in forced.rounds:
            head.check(round, 0)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_no_page_is_lost(toys, page, shape):
    """B13: rejected, accepted, stopped and abandoned requests give back what they took, and the whole pool serves one
    request at the end. Mutants: pages of the last reservation kept; nothing given back after an exception."""
    target, rows = toys.map(), 160
    engine = pair(target, toys.map_draft(), page_size=page, pages=rows // page + 1, max_context=200)
    free = engine.pool.free
    right, wrong = engine.drafter, pair(target, toys.wrong_draft()).drafter
    for drafter in (wrong, right):
        engine.drafter = drafter
        for i in range(50):
            prompt = follow(i, 1 + i % 5, NEXT)
            engine.generate(prompt, Sampling(max_new_tokens=4), shape=shape)
            assert engine.pool.free == free
    for i in range(50):
        stop = follow(i, 4, NEXT)[2 + i % 2]
        result = engine.generate([i], Sampling(max_new_tokens=30, stop_ids=[stop]), shape=shape)
        assert result.finish_reason == "stop" and engine.pool.free == free
    for i in range(10):
        with pytest.raises(KeyError):
            for number, _ in enumerate(engine.stream([i], Sampling(max_new_tokens=30), shape=shape)):
                if number == i % 4:
                    raise KeyError("the caller's own")
        assert engine.pool.free == free
    assert sorted(engine.pool._free) == list(range(1, free + 1))
    whole = rows - 10 - shape.rows_past_prefix + 1
    result = engine.generate(follow(3, 10, NEXT), Sampling(max_new_tokens=whole), shape=shape)
    assert len(result.token_ids) == whole and engine.pool.free == free
    with pytest.raises(Refused, match="pages"):
        engine.generate(follow(3, 10, NEXT), Sampling(max_new_tokens=whole + 1), shape=shape)


def test_a_small_pool_serves_a_long_queue(toys):
    """Requests wait for pages instead of failing. Mutant: a full pool that ends the loop, or never ends it."""
    engine = pair(toys.map(), toys.map_draft(), page_size=4, pages=9, max_batch=4)
    prompts = [follow(i, 1 + i % 9, NEXT) for i in range(12)]
    results = engine.generate(prompts, Sampling(max_new_tokens=9), shape=CHAIN)
    assert [r.token_ids for r in results] == [follow(p[-1], 9, NEXT) for p in prompts]
    assert engine.pool.free == engine.pool.size


def test_rows_of_others_are_never_written(toys):
    """One request's rows, held back by hand, are the same bytes after others of every shape and a batch with an empty
    slot. Mutant: padding into the first page."""
    engine = pair(toys.history(), toys.random_draft(), page_size=4)
    held = engine.pool.take(40)
    slots = torch.cat([torch.arange(4) + 4 * page for page in held])
    before = {kind: rows[:, :, slots].clone() for kind, rows in engine.parts.cache.storage.items()}
    for shape in (PLAIN, CHAIN, TREE, Shape(5, 8, 64)):
        engine.generate([[3, 1, 4], [1, 5], [9]], [Sampling(max_new_tokens=n) for n in (20, 3, 9)], shape=shape)
    for kind, rows in engine.parts.cache.storage.items():
        assert torch.equal(rows[:, :, slots], before[kind])


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=str)
def test_pages_of_an_emptied_slot_are_not_written(toys, shape):
    """Two requests end in one cycle; a third takes one slot and the other's pages. Mutant: an empty slot that keeps the
    table of its last request and goes on writing there."""
    engine = pair(toys.history(), toys.random_draft(), page_size=4, max_batch=2)
    third = [(5 * i + 1) % V for i in range(30)]
    want = engine.generate(third, Sampling(max_new_tokens=20), shape=PLAIN).token_ids
    short = Sampling(max_new_tokens=2)
    results = engine.generate([[3, 1], [4, 1], third], [short, short, Sampling(max_new_tokens=20)], shape=shape)
    assert results[2].token_ids == want


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE, Shape(5, 1, 6)], ids=str)
@pytest.mark.parametrize("page", [1, 16])
def test_context_is_used_to_its_last_position(toys, page, shape):
    """B29: a context of 64 gives 64 - prompt tokens, no more, no less, and no row past the table. Mutants: limit off by
    one; a table or rotary table without the rows that verify writes past the limit."""
    engine = pair(toys.map(), toys.map_draft(), page_size=page, max_context=64)
    k = shape.draft_tokens
    for n in range(64 - k - 2, 64):
        prompt = follow(5, n, NEXT)
        result = engine.generate(prompt, Sampling(max_new_tokens=100), shape=shape)
        assert result.token_ids == follow(prompt[-1], 64 - n, NEXT) and result.finish_reason == "length"
    with pytest.raises(Refused, match="64"):
        engine.generate(follow(5, 64, NEXT), Sampling(max_new_tokens=100), shape=shape)
    prompts = [follow(7, n, NEXT) for n in (63, 40, 59)]
    results = engine.generate(prompts, Sampling(max_new_tokens=100), shape=shape)
    assert [r.token_ids for r in results] == [follow(p[-1], 64 - len(p), NEXT) for p in prompts]


def test_slots_of_high_pages_are_64_bit():
    """B49's arithmetic: int32 page numbers times a page of 2^20 rows. Mutant: slots multiplied in 32 bits."""
    from kernels.cache_write import slots

    pages = torch.tensor([[5000, 7000]], dtype=torch.int32)
    got = slots(torch.tensor([[3, (1 << 20) + 5, -1]]), pages, 1 << 20)
    assert got.tolist() == [[5000 * (1 << 20) + 3, 7000 * (1 << 20) + 5, 0]]


def test_pool_and_cache_count():
    """Mutant: rows rounded down to pages."""
    pool = Pool(5, 4)
    assert (pool.free, pool.pages_for(8), pool.pages_for(9)) == (4, 2, 3)
    taken = pool.take(9)
    assert len(set(taken)) == 3 and 0 not in taken and pool.take(8) is None and pool.free == 1
    pool.give_back(taken)
    assert pool.free == 4
    with pytest.raises(Refused, match="needs 5 pages of 4 rows.*has 4"):
        pool.demand(17)
    kinds = {"target": Rows(3, 2, 2, 16), "draft": Rows(1, 2, 4, 16)}
    cache = Cache(kinds, 5, 4, torch.float32, torch.device("cpu"))
    assert Cache.nbytes(kinds, 5, 4, torch.float32) == sum(r.nbytes for r in cache.storage.values())
