"""The EAGLE-3 head against an uncached pass of other code over the whole text: numbers, not argmaxes, after cycles that
accepted 0 to all of the drafts (B10)."""

import pytest
import torch
from oracles import Forced, FreshHead, Replay, Transformers
from toys import V, disturb, pair

from engine import Sampling, Shape

PROMPTS = [[9, 8, 7, 40, 2], [(11 * i + 3) % V for i in range(33)]]
SHAPES = [Shape(1, 1, 2), Shape(3, 1, 4), Shape(5, 1, 6), Shape(3, 2, 8), Shape(4, 4, 16), Shape(5, 8, 64)]
pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.fixture(scope="module")
def texts(toys):
    """Both prompts with 600 plain tokens."""
    engine = pair(toys.history(), max_context=1024)
    return [p + engine.generate(p, Sampling(max_new_tokens=600)).token_ids for p in PROMPTS]


@pytest.fixture(scope="module")
def model(toys):
    return Transformers(toys.history())


def forced(toys, texts, draft, right=0.7, **options):
    """An engine whose real drafter works and whose accept lengths an oracle decides."""
    engine = pair(toys.history(), draft, max_context=1024, **options)
    engine.drafter = Forced(engine.drafter, Replay(texts, V, right, seed=3))
    disturb(engine)
    return engine


def fresh(model, draft, text, engine, **borrowed):
    features = model.features(text, engine.target.boundaries)
    return FreshHead(draft, text, features, **borrowed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_head_equals_an_uncached_pass(toys, texts, model, shape):
    """Two requests of different length, every accept length. Mutants: features in another order or from a guessed
    hidden; a draft row off by one, kept from a rejected branch or missing after a full path; draft rope frozen; beams
    that see each other, or carry another beam's hidden; scores not cumulative; parents renumbered wrong."""
    draft = toys.random_draft()
    engine = forced(toys, texts, draft)
    count = 60 if shape.topk < 4 else 24
    results = engine.generate(PROMPTS, Sampling(max_new_tokens=count), shape=shape)
    heads = [fresh(model, draft, text[:150], engine) for text in texts]
    lengths = {n for result in results for n in result.stats["emitted_per_cycle"]}
    assert lengths == set(range(1, shape.path + 1)) or shape.topk == 8 and len(lengths) > 3
    checked = 0
    for slot, result in enumerate(results):
        assert PROMPTS[slot] + result.token_ids == texts[slot][: len(PROMPTS[slot]) + count]
        for round in engine.drafter.rounds[: len(result.cycles)]:
            heads[slot].check(round, slot)
            checked += 1
    assert checked == sum(len(result.cycles) for result in results)


def test_two_hundred_rounds(toys, texts, model):
    """Still the same numbers after 200 rounds. Mutant: a draft cache that drifts by a row now and then."""
    draft = toys.random_draft()
    engine = forced(toys, texts, draft, page_size=4)
    result = engine.generate(PROMPTS[0], Sampling(max_new_tokens=520), shape=Shape(3, 1, 4))
    rounds = engine.drafter.rounds
    assert len(rounds) == len(result.cycles) >= 200
    head = fresh(model, draft, texts[0], engine)
    for round in rounds[:10] + rounds[10:-10:6] + rounds[-10:]:
        head.check(round, 0)


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 1}, {"head_dim": 24}, {"rope_theta": 500.0, "rms_norm_eps": 1e-2}], ids=str
)
def test_heads_of_other_sizes(toys, texts, model, changes):
    """Full vocabulary; one key head, heads of an explicit size (B07), other constants. Mutants: heads grouped wrong,
    their size taken as hidden / heads; d2t invented where there is none; constants of the target's config."""
    draft = toys.random_draft(seed=6, draft_vocab=V, **changes)
    engine = forced(toys, texts, draft)
    engine.generate(PROMPTS[0], Sampling(max_new_tokens=20), shape=Shape(3, 2, 8))
    head = fresh(model, draft, texts[0][:60], engine)
    for round in engine.drafter.rounds:
        head.check(round, 0)


def test_borrowed_embedding_and_head(toys, texts, model):
    """Both come from the target. Mutant: a borrowed weight before or without the target's values."""

    def drop(config, tensors):
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    draft = toys.altered(toys.random_draft(draft_vocab=V), drop)
    engine = forced(toys, texts, draft)
    engine.generate(PROMPTS[0], Sampling(max_new_tokens=20), shape=Shape(3, 2, 8))
    weights = model.model.get_input_embeddings().weight, model.model.lm_head.weight
    embedding, head = (w.detach() for w in weights)
    head = fresh(model, draft, texts[0][:60], engine, embedding=embedding, head=head)
    for round in engine.drafter.rounds:
        head.check(round, 0)


@pytest.mark.parametrize("chunk", [1, 5, 8, 23])
def test_prefill_pieces_change_nothing(toys, chunk):
    """B11: proposals and the draft's rows are those of a prompt prefilled whole. Mutant: the target's guess in place of
    the next prompt token at the end of a piece."""
    prompt = [(5 * i * i + 2) % V for i in range(23)]
    kept = []
    for pieces in (512, chunk):
        engine = pair(toys.history(), toys.random_draft(), prefill_chunk=pieces, noise=0)
        events = list(engine.stream(prompt, Sampling(max_new_tokens=2), shape=Shape(3, 2, 8)))
        slots = torch.arange(16, 16 + 23)  # pages 1 and 2: the first that an empty pool gives
        kept.append((events[1].tree.tokens, engine.parts.cache.storage["draft"][:, :, slots], events[0].features))
    (tokens, rows, features), (want_tokens, want_rows, want_features) = kept
    assert rows.abs().amax((0, 1, 3, 4)).min() > 0
    assert torch.equal(tokens, want_tokens)
    torch.testing.assert_close(rows, want_rows, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features, want_features, atol=1e-5, rtol=1e-5)
