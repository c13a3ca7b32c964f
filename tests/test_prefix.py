"""Prompts that begin like an earlier one read its rows: the same bits as a fresh prefill's, fewer rows computed, and no
page lost or read by anybody too late."""

import json
import random

import pytest
import torch
from test_ends import pages_add_up
from toys import NEXT, V, disturb, follow, pair

from engine import Engine, Sampling, Shape
from engine.cache import Pool
from engine.generate import main
from engine.options import DEMO

PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 2, 8)
UNIT, LENGTH, NEW = 8, 30, 10
FIRST = [(i * i + 3 * i) % V for i in range(LENGTH)]
pytestmark = pytest.mark.usefixtures("nan_memory")


def small(toys, **options):
    """HISTORY and a RANDOM head; blocks of 8 rows."""
    sizes = {"page_size": 4, "prefill_chunk": UNIT, **options}
    return pair(toys.history(), toys.random_draft(draft_vocab=V), **sizes)


def sharing(count, length=LENGTH):
    """A prompt that begins with the first `count` tokens of FIRST, and not with one more."""
    return FIRST[:count] + [(t + 1 + i) % V for i, t in enumerate((FIRST * 3)[count:length])]


class Counted:
    """Rows of prompts that pass through the target: passes that are no tree."""

    def __init__(self, engine):
        self.rows, self.forward, self.engine = 0, engine.target.forward, engine
        engine.target.forward = self

    def __call__(self, batch, cache):
        self.rows += 0 if batch.tree is not None else batch.tokens.numel()
        return self.forward(batch, cache)


def run(engine, prompt, shape, new=NEW):
    """(reused, all that one request gives: ids, features, logits, trees; its prompt's cache rows), to compare bit by
    bit."""
    events, seen = engine.stream(prompt, Sampling(max_new_tokens=new), shape=shape), []
    for event in events:
        request, tree = event.request, event.tree
        seen += [torch.tensor(event.tokens), event.features]
        seen += [] if tree is None else [tree.tokens, tree.parents, tree.target_ids, tree.aux, tree.logits]
        slots = [page * engine.pool.page_size + i for page in request.pages for i in range(engine.pool.page_size)]
        rows = {kind: planes[:, :, slots].clone() for kind, planes in engine.cache.storage.items()}
    seen.append(rows["target"][:, :, : len(prompt)])
    if shape != PLAIN:
        seen.append(rows["draft"][:, :, : len(prompt) - 1])
    return request.reused, seen


def same(a, b):
    assert len(a) == len(b)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=str)
def test_reused_rows_change_no_bit(toys, shape):
    """A prompt shares 0 … all tokens with one that came before: ids, logits, features, draft trees and cache rows of
    both kinds are those of an engine that reuses nothing. Mutants: a block that does not cover the token after it (the
    drafter's last row); rows of an incomplete chunk reused; pages of a block's middle; a prefill that starts a row
    early or late; rows that cycles wrote taken for a prompt's."""
    fresh, reusing = small(toys, prefix_cache=False), small(toys)
    run(reusing, FIRST, shape)
    count = Counted(reusing)
    for shared in (0, 1, 7, 8, 9, 15, 16, 17, 18, 23, 24, 25, 29, 30):
        disturb(fresh)
        reused, got = run(reusing, sharing(shared), shape)
        none, want = run(fresh, sharing(shared), shape)
        assert none == 0 and reused == max(0, min(shared, LENGTH) - 1) // UNIT * UNIT
        assert count.rows == LENGTH - reused
        assert same(got, want), shared
        count.rows = 0
        pages_add_up(reusing)


@pytest.mark.parametrize("chunk, page", [(8, 4), (4, 4), (4, 8), (6, 4), (5, 3), (32, 4), (7, 1)])
def test_blocks_are_whole_chunks_and_whole_pages(toys, chunk, page):
    """The unit is their least common multiple. Mutants: the page alone; the chunk alone."""
    engine, fresh = (small(toys, page_size=page, prefill_chunk=chunk, prefix_cache=on) for on in (True, False))
    unit = next(n for n in range(1, 200) if n % chunk == 0 == n % page)
    long = (FIRST * 3)[:70]
    run(engine, long, CHAIN)
    for cut in (unit, unit + 1, 69):
        prompt = long[:cut] + [(t + 1) % V for t in long[cut:]]
        reused, got = run(engine, prompt, CHAIN)
        assert reused == min(cut - 1, 69) // unit * unit
        assert same(got, run(fresh, prompt, CHAIN)[1])


def test_a_conversation(toys):
    """Each turn is the last one, its answer and something new: the beginning is computed once, the answer, whose rows
    cycles wrote, as a prompt's. Mutant: blocks kept of the first prompt only."""
    engine, fresh = small(toys), small(toys, prefix_cache=False)
    turn, seen = FIRST[:20], 0
    for number in range(4):
        got = engine.generate(turn, Sampling(max_new_tokens=9), shape=TREE)
        want = fresh.generate(turn, Sampling(max_new_tokens=9), shape=PLAIN)
        assert got.token_ids == want.token_ids
        assert got.reused_tokens == got.stats["reused_tokens"] == (seen - 1) // UNIT * UNIT if number else not seen
        seen, turn = len(turn), turn + got.token_ids + [number, 7, 3 * number]


def test_plain_requests_leave_no_rows_for_the_drafter(toys):
    """Plain decoding with a draft at hand writes no draft rows. Mutant: one name for both kinds of blocks."""
    engine, fresh = small(toys), small(toys, prefix_cache=False)
    run(engine, FIRST, PLAIN)
    disturb_draft(engine)
    assert run(engine, FIRST, PLAIN)[0] == 24
    reused, got = run(engine, FIRST, CHAIN)
    assert reused == 0 and same(got, run(fresh, FIRST, CHAIN)[1])


def disturb_draft(engine):
    engine.cache.storage["draft"].fill_(float("nan"))


def test_another_drafter_reuses_no_rows(toys):
    """Equal Rows, so that the storage is the same. Mutant: prefixes that outlive their drafter."""
    engine, fresh, other = small(toys), small(toys, prefix_cache=False), toys.random_draft(seed=11, draft_vocab=V)
    run(engine, FIRST, CHAIN)
    engine.drafter = fresh.drafter = pair(toys.history(), other).drafter
    reused, got = run(engine, FIRST, CHAIN)
    assert reused == 0 and same(got, run(fresh, FIRST, CHAIN)[1])
    engine.drafter = engine.drafter
    assert run(engine, FIRST, CHAIN)[0] == 24


@pytest.mark.parametrize("how", ["target in place", "draft in place", "target replaced", "past torch"])
def test_changed_weights_reuse_no_rows(toys, how):
    """Mutant: rows of the weights that were."""
    engine, fresh = small(toys), small(toys, prefix_cache=False)
    run(engine, FIRST, CHAIN)
    for e in (engine, fresh):
        norm = e.target.layers[0].attention.norm if how != "draft in place" else e.drafter.hidden_norm
        with torch.no_grad():
            if "in place" in how:
                norm.weight.mul_(1.5)
            elif how == "past torch":
                norm.weight.data.mul_(1.5)
                e.forget()
            else:
                norm.weight = norm.weight * 1.5
    reused, got = run(engine, FIRST, CHAIN)
    assert reused == 0 and same(got, run(fresh, FIRST, CHAIN)[1])
    assert run(engine, FIRST, CHAIN)[0] == 24


def test_requests_that_run_at_once_share(toys):
    """Four requests of one beginning, some left early: each is right, a page that one leaves stays with the others, and
    what was written for the first is there for the next. Mutants: a block given back by its first reader; a block that
    its second reader takes from the free list."""
    engine, fresh = small(toys, max_batch=4, pages=64), small(toys, prefix_cache=False)
    prompts = [FIRST[:25] + [i, 2 * i + 1, 5] for i in range(7)]
    samplings = [Sampling(max_new_tokens=n) for n in (12, 2, 30, 5, 1, 30, 9)]
    want = [r.token_ids for r in fresh.generate(prompts, samplings, shape=PLAIN)]
    for shape in (CHAIN, TREE):
        results = engine.generate(prompts, samplings, shape=shape)
        assert [r.token_ids for r in results] == want
        assert [r.reused_tokens for r in results][1:] == [24] * 6
        pages_add_up(engine)
        for left in (1, 3, 6, 9):
            events = engine.stream_all(prompts, samplings, shape=shape)
            for _ in range(left):
                next(events)
            events.close()
            pages_add_up(engine)
    assert [r.token_ids for r in engine.generate(prompts, samplings, shape=CHAIN)] == want


def test_blocks_are_given_up_where_pages_run_short(toys):
    """Free pages count blocks that nobody holds; the least recently used goes first, a block never before those that
    follow it; a request that needs the whole cache gets it. Mutants: cached pages that no request can have; a block
    given up while a request reads it; the newest given up first."""
    engine = small(toys, pages=41, max_context=256)
    size, turns = engine.pool.size, [[(7 * n + i * (n + 2)) % V for i in range(26)] for n in range(8)]
    for turn in turns:
        engine.generate(turn, Sampling(max_new_tokens=4), shape=CHAIN)
        assert engine.pool.free == size
        pages_add_up(engine)
    assert engine.generate(turns[-1], Sampling(max_new_tokens=4), shape=CHAIN).reused_tokens == 24
    assert engine.generate(turns[0], Sampling(max_new_tokens=4), shape=CHAIN).reused_tokens < 24
    whole = size * 4 - 10 - CHAIN.rows_past_prefix + 1
    assert len(engine.generate(FIRST[:10], Sampling(max_new_tokens=whole), shape=CHAIN).token_ids) == whole
    assert engine.generate(turns[-1], Sampling(max_new_tokens=4), shape=CHAIN).reused_tokens == 0
    pages_add_up(engine)


def test_switched_off(toys):
    """Mutant: an option that does nothing."""
    engine = small(toys, prefix_cache=False)
    for _ in range(2):
        count = Counted(engine)
        assert engine.generate(FIRST, Sampling(max_new_tokens=4)).reused_tokens == 0 and count.rows == LENGTH
    assert not engine.pool._blocks


def test_on_the_command_line(toys, tmp_path, capsys):
    """Each prompt's reused tokens are in the statistics; the option and a comparison start from nothing. Mutant: a
    comparison whose second way finds what the first one wrote."""
    first = follow(3, 20, NEXT)
    (tmp_path / "ids.jsonl").write_text("\n".join(json.dumps({"token_ids": ids}) for ids in (first, first + [7], [5])))
    argv = ["--prompt-file", str(tmp_path / "ids.jsonl"), "--target", toys.map(), "--draft", toys.map_draft()]
    argv += "--device cpu --max-context 64 --page-size 4 --prefill-chunk 8 --max-new-tokens 3 --stats".split()
    for more, reused in ([], [0, 16, 0]), (["--no-prefix-cache"], [0] * 3), (["--compare"], [0] * 3):
        assert main([*argv, str(tmp_path / "stats.json"), *more]) == 0
        requests = json.loads((tmp_path / "stats.json").read_text())["requests"]
        assert [request["reused_tokens"] for request in requests] == reused
        assert [request["prompt_tokens"] for request in requests] == [20, 21, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [PLAIN, CHAIN, Shape(4, 4, 16)], ids=str)
def test_reused_rows_change_no_bit_on_a_gpu(shape):
    """The kernels for prompts, captured cycles after them. Mutants: those above."""
    sizes = dict(max_context=1024, max_batch=1, page_size=16, prefill_chunk=128, pages=256)  # nothing has to make room
    fresh, reusing = (Engine.load(DEMO / "target", DEMO / "draft", prefix_cache=on, **sizes) for on in (False, True))
    draw, vocabulary = random.Random(5), fresh.target.head.vocabulary
    first = [draw.randrange(vocabulary) for _ in range(449)]
    run(reusing, first, shape)
    for shared in (128, 129, 300, 449):
        prompt = first[:shared] + [(t + 1) % vocabulary for t in first[shared:]]
        reused, got = run(reusing, prompt, shape, new=60)
        assert reused == (shared - 1) // 128 * 128 and same(got, run(fresh, prompt, shape, new=60)[1])


def test_a_failed_prompt_leaves_no_block(toys):
    """Non-finite logits at the prompt's end, an error inside its passes. Mutant: blocks named before their rows are
    written."""
    engine = pair(toys.map(), toys.map_draft(), page_size=4, prefill_chunk=UNIT)
    prompt, forward, calls = follow(3, 30, NEXT), engine.target.forward, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("lost")
        return forward(*args)

    engine.target.forward = failing
    with pytest.raises(RuntimeError):
        engine.generate(prompt, Sampling(max_new_tokens=4))
    del engine.target.forward
    assert not engine.pool._blocks
    result = engine.generate(prompt, Sampling(max_new_tokens=4))
    assert result.reused_tokens == 0 and result.token_ids == follow(prompt[-1], 4, NEXT)


def test_random_accounts():
    """3,000 random takes, keeps and returns against the rules: no page in two hands but as part of one block, as many
    free as nobody holds, a block's forerunners cached as long as it is. Mutants: any account off by one."""
    draw, pool = random.Random(3), Pool(40, 2, unit=4)
    held, before = [], {}
    for _ in range(3000):
        if draw.random() < 0.5 or not held:
            ids = [draw.randrange(2) for _ in range(draw.randrange(1, 30))]
            names = pool.names(ids, drafted=False)
            assert len(names) == (len(ids) - 1) // 4
            before.update(zip(names[1:], names, strict=False))
            free, rows, reused = pool.free, len(ids) + draw.randrange(9), pool.cached(names)
            pages = pool.take(rows, names)
            if pages is None:
                assert pool.pages_for(rows) - reused // 2 > free - sum(
                    2 for name in names[: reused // 4] if not pool._blocks[name].users
                )
                continue
            assert len(pages) == pool.pages_for(rows) == len(set(pages)) and 0 not in pages
            if draw.random() < 0.8:
                pool.keep(pages, names)
            held.append((pages, ids, names))
        else:
            pages, _, _ = held.pop(draw.randrange(len(held)))
            pool.give_back(pages)
        blocks = list(pool._blocks.values())
        owned = [page for block in blocks for page in block.pages]
        loose = [page for pages, _, _ in held for page in pages if page not in owned]
        assert sorted(owned + loose + pool._free) == list(range(1, 40))
        assert pool.free == 39 - len({page for pages, _, _ in held for page in pages})
        for block in blocks:
            assert block.users == {id(pages) for pages, _, _ in held if set(block.pages) <= set(pages)}
        assert all(before[name] in pool._blocks for name in pool._blocks if name in before)
