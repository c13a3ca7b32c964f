"""Speculation never changes the ids: every shape, alone and in a batch, with heads that are mostly wrong and oracles
that are mostly right. The right ids come from transformers, without cache, page or tree."""

from collections import Counter

import pytest
from oracles import Replay, Transformers
from toys import V, disturb, pair

from engine import Sampling, Shape

SHAPES = [Shape(1, 1, 2), Shape(2, 1, 3), Shape(3, 1, 4), Shape(4, 4, 16), Shape(5, 8, 64)]
PLAIN = Shape(0, 1, 1)
LONG = 90
PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6], list(range(16)), [(7 * i) % V for i in range(40)]]  # page 16, prefill 32
CAPS = [37, 50, 21, 60]  # the third ends at a stop id before that
pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.fixture(scope="module")
def engine(toys):
    return pair(toys.history(), toys.random_draft(), page_size=16)


@pytest.fixture(scope="module")
def texts(engine):
    """Plain ids after each prompt, long."""
    return [engine.generate(p, Sampling(max_new_tokens=LONG), shape=PLAIN).token_ids for p in PROMPTS]


@pytest.fixture
def drafter(engine):
    """The engine's own drafter back in its place afterwards."""
    real = engine.drafter
    yield real
    engine.drafter = real


def oracle(engine, texts, right, seed=0):
    engine.drafter = Replay([p + t for p, t in zip(PROMPTS, texts, strict=True)], V, right, seed=seed)
    disturb(engine)


def requests(texts):
    """Samplings of different ends, and the ids they must give."""
    stop = texts[2][13]
    samplings = [Sampling(max_new_tokens=cap, stop_ids=[stop] if i == 2 else []) for i, cap in enumerate(CAPS)]
    want = [t[:cap] for t, cap in zip(texts, CAPS, strict=True)]
    want[2] = want[2][: want[2].index(stop) + 1]
    return samplings, want


def test_plain_ids_are_those_of_transformers(toys, texts):
    """One uncached pass over each text. Mutants: cache row, position, page, norm or routing off."""
    model = Transformers(toys.history())
    for prompt, text in zip(PROMPTS, texts, strict=True):
        logits = model(prompt + text[:-1])[0][len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == text
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4  # no tie for rounding to decide


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_head_alone(engine, texts, shape):
    """Mutants: ancestor bits ignored; tokens emitted past a rejection."""
    disturb(engine)
    for prompt, text in zip(PROMPTS[:2], texts, strict=False):
        assert engine.generate(prompt, Sampling(max_new_tokens=40), shape=shape).token_ids == text[:40]


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES], ids=str)
def test_random_head_in_a_batch(engine, texts, shape):
    """Four requests at once, of different lengths and ends. Mutants: one limit or prefix for all rows; a finished slot
    that goes on emitting."""
    disturb(engine)
    samplings, want = requests(texts)
    assert [r.token_ids for r in engine.generate(PROMPTS, samplings, shape=shape)] == want


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_always_right_oracle(engine, texts, drafter, shape):
    """Every cycle emits the whole path, and in trees it lay scattered. Mutants: commit does nothing, commit stores
    before it has read all, rope at the cache row instead of the depth."""
    oracle(engine, texts, 1.0)
    for i in (1, 3):
        result = engine.generate(PROMPTS[i], Sampling(max_new_tokens=LONG), shape=shape)
        assert result.token_ids == texts[i]
        assert set(result.stats["emitted_per_cycle"][:-1]) == {shape.path}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mostly_right_oracle_in_a_batch(engine, texts, drafter, shape):
    """70 % of nodes right: every accept length comes up while the four rows differ. Mutants: accept walk or commit that
    mixes rows; the bonus token after a full path lost."""
    oracle(engine, texts, 0.7)
    samplings, want = requests(texts)
    results = engine.generate(PROMPTS, samplings, shape=shape)
    assert [r.token_ids for r in results] == want
    lengths = Counter(n for r in results for n in r.stats["emitted_per_cycle"])
    assert set(lengths) == set(range(1, shape.path + 1))


def test_slots_are_refilled(engine, texts, drafter):
    """Nine requests through four slots, mostly right. Mutant: State of a slot not cleared for the next request."""
    oracle(engine, texts, 0.7)
    samplings, want = requests(texts)
    order = [0, 3, 1, 2, 1, 0, 2, 3, 1]
    results = engine.generate([PROMPTS[i] for i in order], [samplings[i] for i in order], shape=Shape(4, 4, 16))
    assert [r.token_ids for r in results] == [want[i] for i in order]
    assert engine.pool.free == engine.pool.size


@pytest.mark.parametrize("noise", [1e4, float("nan")])
@pytest.mark.parametrize("shape", [PLAIN, Shape(3, 1, 4), Shape(4, 4, 16)], ids=str)
def test_rows_nobody_wrote_are_not_read(engine, texts, drafter, shape, noise):
    """Loud noise and NaN in every row of the cache, scratch page included, batch of three in four slots. Mutants:
    attention past the prefix, weights of zero times NaN, padding that writes outside the scratch page."""
    disturb(engine, noise)
    samplings, want = requests(texts)
    results = engine.generate(PROMPTS[:3], samplings[:3], shape=shape)
    assert [r.token_ids for r in results] == want[:3]
    oracle(engine, texts, 0.7)
    disturb(engine, noise)
    results = engine.generate(PROMPTS[:3], samplings[:3], shape=shape if shape.steps else Shape(5, 8, 64))
    assert [r.token_ids for r in results] == want[:3]


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_sizes(toys, texts, page_size):
    """The same ids whatever a page holds. Mutant: page number where a row number belongs."""
    engine = pair(toys.history(), toys.random_draft(), page_size=page_size)
    oracle(engine, texts, 0.7)
    samplings, want = requests(texts)
    for shape in (Shape(3, 1, 4), Shape(4, 4, 16)):
        assert [r.token_ids for r in engine.generate(PROMPTS, samplings, shape=shape)] == want
