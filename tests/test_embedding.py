"""The engine inside other code: lists of prompts, conversations, scores, drafters of one's own, weights that change
under it."""

import pytest
import torch
from ngram import NGram, emitted
from oracles import Transformers
from test_cycle_program import NoHost
from test_ends import pages_add_up
from test_text import byte_level, saved
from torch.testing import assert_close
from toys import BRANCH, NEXT, RING, V, follow, pair

from engine import Engine, Refused, Sampling, Shape
from engine.options import DEMO

PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 2, 8)
TEXT = [(i * i + 5 * i) % V for i in range(45)]
pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.fixture(scope="module")
def engine(toys):
    return pair(toys.map(), toys.map_draft(), max_batch=2, page_size=4, pages=60)


# ------------------------------------------------------------------ lists


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=str)
def test_results_stand_in_the_order_of_the_prompts(engine, shape):
    """Nine prompts in two slots, each with a sampling of its own; the short ones end first. Mutants: results in the
    order of their ends; one sampling for all; a slot refilled with what its last request left."""
    prompts = [follow(3 * i, 1 + i, NEXT) for i in range(9)]
    caps = [20, 1, 0, 9, 2, 14, 1, 30, 3]
    stops = [[], [], [], [follow(prompts[3][-1], 5, NEXT)[-1]], *[[]] * 5]
    samplings = [Sampling(max_new_tokens=c, stop_ids=s) for c, s in zip(caps, stops, strict=True)]
    results = engine.generate(prompts, samplings, shape=shape)
    want = [follow(p[-1], c, NEXT) for p, c in zip(prompts, caps, strict=True)]
    want[3] = want[3][:5]
    assert [r.token_ids for r in results] == want
    assert [r.prompt_tokens for r in results] == list(range(1, 10))
    assert [r.finish_reason for r in results] == ["stop" if i == 3 else "length" for i in range(9)]
    pages_add_up(engine)


def test_what_is_refused_is_said_of_which_prompt(engine):
    """The index of the prompt, and nothing of the list decoded. A single prompt has none. Mutant: a message that leaves
    the reader to search."""
    bad = {
        "prompt 2: it is empty": [],
        f"prompt 2: token id {V}; ": [V],
        "prompt 2: 300 tokens leave no room": [1] * 300,
        "prompt 2: this checkpoint has no tokenizer": "text",
        "prompt 2: cache: the request needs 6": [1] * 230,
    }
    for message, prompt in bad.items():
        before = engine.graphs.report()
        with pytest.raises(Refused) as refusal:
            engine.generate([[1], [2], prompt], Sampling(max_new_tokens=20))
        assert str(refusal.value).startswith(message) and engine.graphs.report() == before
        with pytest.raises(Refused) as refusal:
            engine.generate(prompt, Sampling(max_new_tokens=20))
        assert not str(refusal.value).startswith("prompt 0")
    with pytest.raises(Refused, match="prompt 1: stop_ids: 64"):
        engine.generate([[1], [2]], [Sampling(), Sampling(stop_ids=[V])])
    with pytest.raises(Refused, match="1 for 2 prompts"):
        engine.generate([[1], [2]], [Sampling()])
    with pytest.raises(Refused, match="it is a tuple"):
        engine.generate((1, 2))
    pages_add_up(engine)


# ------------------------------------------------------------------ conversations


def test_conversations(toys, tmp_path):
    """B38: the template writes the start token, once; a text that was put through a template elsewhere and spells it
    gets no second one; messages that are none are refused by number. Mutants: special tokens added to a template's
    text; a missing role left to the template, which prints nothing."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    text = saved(byte_level(), tmp_path, chat_template=template)
    start, talk = text.tokenizer.bos_token_id, [{"role": "user", "content": "hi"}]
    assert text.chat(talk) == [start, *b"user:hi;assistant:"]
    assert text.encode("hi") == [start, *b"hi"] == text.encode("<start>hi")
    target = toys.altered(toys.map(), lambda config, tensors: None)
    with_template = pair(target, toys.map_draft())
    with_template.parts.text = text
    for messages, words in {
        "number 1 is": [*talk, {"content": "x"}],
        "number 1 is 'x'": [*talk, "x"],
        "number 0 has no content": [{"role": "user"}],
        "number 0 is": [{}],
    }.items():
        with pytest.raises(Refused, match=messages):
            with_template.generate(words)
    saved(byte_level(), tmp_path / "bare")
    with_template.parts.text = type(text)(tmp_path / "bare")
    with pytest.raises(Refused, match="no chat template"):
        with_template.generate(talk)


# ------------------------------------------------------------------ scores


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 45])
def test_scores_are_those_of_one_uncached_pass(toys, n):
    """Log-probabilities of every token and all captured boundaries, over chunks of 32. Mutants: token i scored by row
    i; the last chunk's first token lost; boundaries of the last chunk alone; rows of another request's pages."""
    engine = pair(toys.history(), toys.random_draft(), page_size=4)
    engine.generate(TEXT[:40], Sampling(max_new_tokens=3), shape=CHAIN)
    scored = engine.score(TEXT[:n])
    model = Transformers(toys.history())
    logits, boundaries = model(TEXT[:n])
    want = logits[:-1].log_softmax(-1).gather(1, torch.tensor(TEXT[1:n], dtype=torch.int64)[:, None])[:, 0]
    assert scored.token_ids == TEXT[:n] and scored.layers == (0, 1, 3)
    assert scored.logprobs.shape == (n - 1,) and scored.boundaries.shape == (n, 3 * V)
    assert_close(scored.logprobs, want, atol=1e-4, rtol=1e-4)
    assert_close(scored.boundaries, torch.cat([boundaries[b] for b in scored.layers], -1), atol=1e-4, rtol=1e-4)
    pages_add_up(engine)


def test_scores_are_refused_or_leave_no_trace(toys):
    """The whole context fits; more is refused, during a stream too; requests before and after are as they were, shared
    prefixes among them. Mutants: pages kept by a score that failed; a score that writes a cached block."""
    engine = pair(toys.map(), toys.map_draft(), page_size=4, prefill_chunk=8, max_context=64, pages=17)
    assert engine.score(follow(3, 64, NEXT)).logprobs.shape == (63,)
    for ids, words in {65: "65 tokens; the context holds 64", 0: "empty"}.items():
        with pytest.raises(Refused, match=words):
            engine.score(follow(3, ids, NEXT))
    small = pair(toys.map(), page_size=4, max_context=64, pages=9)
    with pytest.raises(Refused, match="has 8"):
        small.score(follow(3, 33, NEXT))
    prompt = follow(3, 20, NEXT)
    engine.generate(prompt, Sampling(max_new_tokens=3))
    engine.score([9] * 20)
    again = engine.generate(prompt, Sampling(max_new_tokens=9))
    assert again.token_ids == follow(prompt[-1], 9, NEXT) and again.reused_tokens == 16
    engine.target.forward = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.score(prompt)
    del engine.target.forward
    pages_add_up(engine)


# ------------------------------------------------------------------ drafters of one's own


@pytest.mark.parametrize("shape", [Shape(1, 1, 2), CHAIN, Shape(7, 1, 8), TREE], ids=str)
def test_an_ngram_drafter(toys, shape):
    """A target that walks in a circle of four: once round, everything is accepted, whatever the slot, the batch, the
    beginning that came from the cache. Mutants: history by slot, which a refill or a shared prefix leaves empty;
    prefixes that outlive their drafter; backlog tokens one place off; tokens of the cycle before the last lost."""
    engine = pair(toys.map(RING), max_batch=4, page_size=4, prefill_chunk=8)
    engine.drafter = NGram(engine.cache)
    one = engine.generate([BRANCH[0]], Sampling(max_new_tokens=60), shape=shape)
    assert one.token_ids == follow(BRANCH[0], 60, RING)
    assert set(one.stats["emitted_per_cycle"][7:-1]) == {shape.steps + 1}
    assert one.stats["emitted_per_cycle"] == emitted([BRANCH[0]], one.token_ids, shape.steps)
    prompts = [(list(BRANCH) * 6)[: 17 + i] for i in range(6)]
    for _ in range(2):
        for prompt, result in zip(
            prompts, engine.generate(prompts, Sampling(max_new_tokens=21), shape=shape), strict=True
        ):
            assert result.token_ids == follow(prompt[-1], 21, RING)
            assert set(result.stats["emitted_per_cycle"][:-1]) == {shape.steps + 1}
    assert result.reused_tokens == 16
    engine.drafter = NGram(engine.cache)  # it has seen nothing
    again = engine.generate(prompts[0], Sampling(max_new_tokens=21), shape=shape)
    assert again.reused_tokens == 0 and set(again.stats["emitted_per_cycle"][:-1]) == {shape.steps + 1}
    pages_add_up(engine)


def test_a_drafter_asks_the_host_nothing(toys):
    """It may be captured. Mutants: int(tensor) or a bool index in the example or in History."""
    engine = pair(toys.map(RING), page_size=4)
    engine.drafter = NGram(engine.cache)
    events = engine.stream([BRANCH[0]], Sampling(max_new_tokens=9), shape=CHAIN)
    next(events)
    with NoHost():
        engine.programs.cycle(1, CHAIN, engine.drafter, detail=True, stamped=False).run()
    events.close()


@pytest.mark.gpu
def test_an_ngram_drafter_is_captured():
    """On a GPU, with no features captured: ids of plain decoding, cycles replayed, exactly the drafts accepted that the
    rule finds in the text, and a weight that is replaced counts. How often a text repeats itself hangs on its bits, so
    no rate is asked for. Mutants: tokens of the backlog written with the features only; captures kept."""
    engine = Engine.load(DEMO / "target", None, max_batch=1, graphs="required")
    engine.drafter = NGram(engine.cache)
    prompt, sampling = "x = 1\ny = 2\nx = 1\ny = 2\nx = 1\n", Sampling(max_new_tokens=120, ignore_eos=True)
    for _ in range(2):
        plain, got = (engine.generate(prompt, sampling, shape=shape) for shape in (PLAIN, CHAIN))
        assert got.token_ids == plain.token_ids
        cycles = emitted(engine.parts.text.encode(prompt), plain.token_ids, CHAIN.steps)
        assert got.stats["emitted_per_cycle"] == cycles and max(cycles) > 1
        assert all(entry["captured"] and not entry["eager"] for entry in engine.graphs.report())
        engine.target.head.weight = engine.target.head.weight.flip(1).contiguous()


class Watcher:
    """A drafter that guesses nothing, not even the root right, and keeps what it was shown of committed text:
    (positions, tokens, features)."""

    cache_rows = None

    def __init__(self):
        self.seen = []

    def extend(self, batch, features, cache):
        self.seen.append((batch.positions[0], batch.tokens[0], features.clone()))

    def propose(self, state, tree, cache):
        n = int(state.backlog[0])
        at = state.seq_lens[0] - n + torch.arange(n)
        self.seen.append((at, state.backlog_tokens[0, :n].clone(), state.backlog_features[0, :n].clone()))
        tree.tokens.fill_(-1)
        tree.parents.zero_()


@pytest.mark.parametrize("asked, layers", [("boundary:0,2", (0, 2)), ("output:1,2", (2, 3)), ("boundary:3", (3,))])
def test_features_without_a_draft(toys, asked, layers):
    """A target loaded alone captures what its user asks for: a drafter assigned later sees every committed token once,
    with the features under the token before it. Mutants: no features without a draft checkpoint; rows shown twice or
    not at all at the border of prompt and answer; a root that a drafter can get wrong."""
    engine = pair(toys.history(), capture_layers=asked, prefix_cache=False)
    engine.drafter = watcher = Watcher()
    result = engine.generate(TEXT[:40], Sampling(max_new_tokens=9), shape=CHAIN)
    assert result.token_ids == engine.generate(TEXT[:40], Sampling(max_new_tokens=9), shape=PLAIN).token_ids
    ids = TEXT[:40] + result.token_ids
    at, tokens, features = (torch.cat(x) for x in zip(*watcher.seen, strict=True))
    assert at.tolist() == list(range(47)) and tokens.tolist() == ids[1:48]
    assert_close(features, Transformers(toys.history()).features(ids[:47], layers), atol=1e-4, rtol=1e-4)
    assert engine.parts.capture.source == "override" and engine.score(ids).layers == layers
    for wrong, words in {"boundary:9": "outside", "boundary:1,1": "twice", "layers 1": "expected boundary:"}.items():
        with pytest.raises(Refused, match=words):
            pair(toys.history(), capture_layers=wrong)


def test_what_is_no_drafter_is_refused(engine):
    for thing, word in ((object(), "extend"), (3, "extend"), (type("Half", (), {"extend": print})(), "propose")):
        with pytest.raises(Refused, match=f"has no {word}"):
            engine.drafter = thing
    assert engine.generate([3], Sampling(max_new_tokens=4)).token_ids == follow(3, 4, NEXT)


def test_engine_load_knows_its_options():
    with pytest.raises(Refused, match="unknown option 'prefix'"):
        Engine.load(target="x", prefix=True)
