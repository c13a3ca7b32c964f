"""Two hundred requests of every kind on one engine: pages come back after each, the whole cache serves at the end."""

import random

import pytest
from test_ends import pages_add_up
from test_streaming import TALE, characters
from test_text import saved
from toys import cycle_of, follow, pair

from engine import Refused, Sampling, Shape

SHAPES = [Shape(0, 1, 1), Shape(1, 1, 2), Shape(3, 1, 4), Shape(6, 1, 7), Shape(3, 2, 8), Shape(4, 4, 16)]
ENDS = ("cap", "cap", "stop string", "stop id", "left early", "exception", "refused", "scored", "sampled")
pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.mark.timeout(120)
def test_two_hundred_requests(toys):
    """Lengths over many pages, beginnings shared and not, six shapes, one to four at once; whatever ends a request,
    what is free is as before, and answers are right. Mutants: a page lost a hundred requests; a shared block given up
    under its reader; a slot's stops left for the next request."""
    draw, after = random.Random(7), cycle_of(range(len(TALE)))
    target = toys.altered(toys.map(after), lambda config, tensors: None)
    text = saved(characters()[0], target)
    engine = pair(target, toys.map_draft(after), page_size=4, prefill_chunk=8, pages=60, max_batch=4)
    free, reused = engine.pool.free, 0
    stems = [follow(i, 40, after) for i in (0, 5, 11)]
    for number in range(200):
        shape, end, cap = draw.choice(SHAPES), draw.choice(ENDS), draw.randrange(1, 25)
        count = draw.choice((1, 1, 2, 4, 6)) if end in ("cap", "stop string") else 1
        prompts = [draw.choice(stems)[: draw.randrange(1, 40)] + [draw.randrange(len(TALE))] for _ in range(count)]
        want = [follow(p[-1], cap, after) for p in prompts]
        if end == "cap":
            results = engine.generate(prompts, Sampling(max_new_tokens=cap), shape=shape)
            assert [r.token_ids for r in results] == want
            reused += sum(r.reused_tokens for r in results)
        elif end == "stop string":
            places = [draw.randrange(cap) for _ in prompts]
            stops = [text.decode(ids[at : at + 2]) for ids, at in zip(want, places, strict=True)]
            samplings = [Sampling(max_new_tokens=cap, stop=[stop]) for stop in stops]
            for result, ids, stop in zip(engine.generate(prompts, samplings, shape=shape), want, stops, strict=True):
                whole = text.decode(ids)
                assert result.text == (whole[: whole.find(stop)] if stop in whole else whole)
                assert result.token_ids == ids[: len(result.token_ids)]
        elif end == "stop id":
            at = draw.randrange(min(cap, len(TALE)))
            sampling = Sampling(max_new_tokens=cap, stop_ids=[want[0][at]])
            assert engine.generate(prompts[0], sampling, shape=shape).token_ids == want[0][: at + 1]
        elif end == "left early":
            events = engine.stream(prompts[0], Sampling(max_new_tokens=30), shape=shape)
            for _, _ in zip(range(draw.randrange(4)), events, strict=False):
                pass
            events.close()
        elif end == "exception":
            left = draw.randrange(4)
            with pytest.raises(KeyError):
                for at, _ in enumerate(engine.stream(prompts[0], Sampling(max_new_tokens=30), shape=shape)):
                    if at == left:
                        raise KeyError("the caller's own")
        elif end == "refused":
            with pytest.raises(Refused):
                engine.generate([*prompts, [1] * 300], Sampling(max_new_tokens=cap), shape=shape)
        elif end == "scored":
            assert engine.score(prompts[0]).logprobs.shape == (len(prompts[0]) - 1,)
        else:
            sampling = Sampling(max_new_tokens=cap, temperature=0.05, seed=number)
            assert engine.generate(prompts[0], sampling, shape=shape).token_ids == want[0]
        assert engine.pool.free == free, (number, end)
        pages_add_up(engine)
    assert reused > 1000
    shape = SHAPES[4]
    whole = engine.pool.size * 4 - 20 - shape.rows_past_prefix + 1
    prompt = stems[0][:20]
    result = engine.generate(prompt, Sampling(max_new_tokens=whole), shape=shape)
    assert result.token_ids == follow(prompt[-1], whole, after) and engine.pool.free == free
    with pytest.raises(Refused, match="pages"):
        engine.generate(prompt, Sampling(max_new_tokens=whole + 1), shape=shape)
