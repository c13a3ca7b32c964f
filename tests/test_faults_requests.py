"""What a request may ask and how it ends: end ids inside a run (B25), caps (B28), empty and overlong prompts (B31,
B32), streams that meet."""

from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from toys import NEXT, V, follow, one_line, pair, still_serves

from engine import Refused, Sampling, Shape
from engine.request import Request

PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 2, 8)
pytestmark = pytest.mark.usefixtures("nan_memory")


@pytest.fixture(autouse=True)
def cuts_on_the_device(monkeypatch):
    """The cycle itself ends a sequence: the host, which looks again, finds nothing left to cut off."""
    receive = Request.receive

    def checked(self, tokens, *args):
        kept, text = receive(self, tokens, *args)
        assert kept == tokens
        return kept, text

    monkeypatch.setattr(Request, "receive", checked)


@pytest.fixture(scope="module")
def engine(toys):
    return pair(toys.map(), toys.map_draft())


# ------------------------------------------------------------------ B25
@pytest.mark.parametrize("shape", [PLAIN, Shape(5, 1, 6), Shape(5, 2, 12)], ids=str)
@pytest.mark.parametrize("place", range(1, 13))
def test_end_id_at_every_place_of_a_run(toys, place, shape):
    """Exactly that many tokens, the end id last. Mutant: only the last token of a committed run looked at."""
    text = follow(9, 20, NEXT)
    engine = pair(toys.map(eos_token_id=text[place - 1]), toys.map_draft())
    result = engine.generate([3, 9], Sampling(max_new_tokens=20), shape=shape)
    assert result.token_ids == text[:place] and (result.finish_reason, result.stop) == ("stop", text[place - 1])
    assert sum(result.stats["emitted_per_cycle"]) == place - 1 and engine.pool.free == engine.pool.size
    whole = engine.generate([3, 9], Sampling(max_new_tokens=20, ignore_eos=True), shape=shape)
    assert (whole.token_ids, whole.finish_reason, whole.stop) == (text, "length", None)


def test_two_end_ids_and_those_of_the_request(toys):
    """The first that comes counts; a stop wins over the cap in the same place; ignore_eos leaves the request's own."""
    text = follow(9, 20, NEXT)
    engine = pair(toys.map(eos_token_id=[text[11], text[7]]), toys.map_draft())
    shape = Shape(5, 1, 6)
    assert engine.generate([9], Sampling(max_new_tokens=20), shape=shape).token_ids == text[:8]
    capped = engine.generate([9], Sampling(max_new_tokens=8), shape=shape)
    assert (capped.token_ids, capped.finish_reason) == (text[:8], "stop")
    own = Sampling(max_new_tokens=20, stop_ids=[text[4], text[9]])
    assert engine.generate([9], own, shape=shape).token_ids == text[:5]
    ignoring = Sampling(max_new_tokens=20, stop_ids=[text[9]], ignore_eos=True)
    assert engine.generate([9], ignoring, shape=shape).token_ids == text[:10]


# ------------------------------------------------------------------ B28
@pytest.mark.parametrize("right", [True, False])
def test_caps(toys, right):
    """k = 1..7, cap 0..20: exactly so many, the counts agree, and cap 1 drafts nothing. Mutants: a whole run emitted
    past the cap; the count before the cut."""
    engine = pair(toys.map(), toys.map_draft() if right else toys.wrong_draft())
    for k in range(1, 8):
        for cap in range(21) if k in (1, 3, 7) else (0, 1, k, k + 1, k + 2, 20):
            result = engine.generate([3, 9], Sampling(max_new_tokens=cap), shape=Shape(k, 1, k + 1))
            assert result.token_ids == follow(9, cap, NEXT) and result.finish_reason == "length"
            assert result.stats["output_tokens"] == cap
            assert sum(result.stats["emitted_per_cycle"]) == max(0, cap - 1)
    assert engine.generate([3, 9], Sampling(max_new_tokens=1)).stats["cycles"] == 0


def test_cap_one_runs_no_cycle(toys):
    engine = pair(toys.map(), toys.map_draft())
    engine.generate([3, 9], Sampling(max_new_tokens=1))
    engine.generate([3, 9], Sampling(max_new_tokens=0))
    assert engine.graphs.report() == []


@pytest.mark.parametrize("cap", [-1, 1.5, "3", None, True])
def test_caps_that_are_none(cap):
    with pytest.raises(Refused) as error:
        Sampling(max_new_tokens=cap)
    one_line(error, "max_new_tokens")


# ------------------------------------------------------------------ B31
def with_tokenizer(toys):
    """The MAP target with a tokenizer of one token a character, a space among them."""
    path = toys.altered(toys.map(), lambda config, tensors: None)
    tokenizer = Tokenizer(models.WordLevel({" ": 0, **{chr(58 + i): i for i in range(1, V)}}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(f"{path}/tokenizer.json")
    Path(f"{path}/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


def test_bad_prompts_are_refused_and_the_next_is_served(toys):
    """Empty, blank, foreign ids, wrong kinds: refused before any pass. Mutant: an empty prompt that reaches prefill."""
    engine = pair(with_tokenizer(toys), toys.map_draft())
    passes = []
    forward = engine.target.forward
    engine.target.forward = lambda *args: passes.append(1) or forward(*args)
    for prompt in ("", "   \n", [], [[3], []], [-1], [V], [3, 1.5], [3, "4"], [True], None, 7, [None], ["a", ""], [[]]):
        with pytest.raises(Refused) as error:
            engine.generate(prompt)
        one_line(error, "prompt")
        assert not passes, prompt
    for shape in (PLAIN, CHAIN, TREE):
        assert engine.generate([9], Sampling(max_new_tokens=12), shape=shape).token_ids == follow(9, 12, NEXT)
    word = engine.generate("CB", Sampling(max_new_tokens=4))
    assert word.token_ids == follow(8, 4, NEXT) and word.text == "".join(chr(58 + t) for t in word.token_ids)


def test_one_prompt_alone_is_a_list_of_one_too(engine):
    sampling = Sampling(max_new_tokens=3)
    assert engine.generate([9], sampling).token_ids == engine.generate([[9]], sampling)[0].token_ids
    with pytest.raises(Refused):
        engine.generate([[9], [8]], [sampling])
    with pytest.raises(Refused) as error:
        engine.generate("text", sampling)
    one_line(error, "tokenizer")
    still_serves(engine)


def test_text_options_need_a_tokenizer(engine):
    with pytest.raises(Refused) as error:
        engine.generate([9], Sampling(stop=["x"]))
    one_line(error, "stop", "tokenizer")
    with pytest.raises(Refused) as error:
        engine.generate([9], Sampling(stop_ids=[V]))
    one_line(error, "stop_ids", str(V))
    still_serves(engine)


# ------------------------------------------------------------------ B32
@pytest.mark.timeout(30)
@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=str)
def test_prompts_longer_than_pool_or_context(toys, shape):
    """Context 64, pool of 48 rows: the right tokens, or need and limit. Mutant: a request that waits for ever for pages
    that will never be."""
    engine = pair(toys.map(), toys.map_draft(), max_context=64, page_size=4, pages=13)
    for n in (1, 20, 44, 47, 48, 49, 63, 64, 65):
        prompt = follow(5, n, NEXT)
        for cap in (1, 100):
            need = n + min(cap, 64 - n) - 1 + shape.rows_past_prefix
            if n < 64 and need <= 48:
                result = engine.generate(prompt, Sampling(max_new_tokens=cap), shape=shape)
                assert result.token_ids == follow(prompt[-1], min(cap, 64 - n), NEXT)
                continue
            with pytest.raises(Refused) as error:
                engine.generate(prompt, Sampling(max_new_tokens=cap), shape=shape)
            one_line(error, *(["64"] if n >= 64 else [str(-(-need // 4)), "has 12"]))
            assert engine.pool.free == engine.pool.size
    still_serves(engine, shape)


def test_one_bad_prompt_of_many_stops_all_before_any(engine):
    """Mutant: half the list decoded, then an error."""
    with pytest.raises(Refused):
        engine.generate([[9], [3] * 300], Sampling(max_new_tokens=4))
    still_serves(engine)


# ------------------------------------------------------------------ streams of one engine
def test_two_streams_do_not_mix(engine):
    """The second is refused while the first runs; opened before and run after, it is right. Mutants: buffers resized by
    a stream that has not begun; a stream left early that keeps the engine."""
    long, short = (
        engine.stream(follow(5, 60, NEXT), Sampling(max_new_tokens=60)),
        engine.stream([9], Sampling(max_new_tokens=4)),
    )
    first = next(long)
    with pytest.raises(Refused) as error:
        next(short)
    one_line(error, "in progress")
    rest = [t for event in long for t in event.tokens]
    assert first.tokens + rest == follow(follow(5, 60, NEXT)[-1], 60, NEXT)
    still_serves(engine)
    for _ in engine.stream([9], Sampling(max_new_tokens=30)):
        break
    still_serves(engine)


def test_what_is_handed_out_does_not_change(engine):
    """Copies: nothing changes at the next cycle. Mutant: views of the buffers."""
    events = engine.stream([9], Sampling(max_new_tokens=20), shape=TREE)
    kept = [next(events), next(events)]
    fields = ("tokens", "parents", "depths", "target_ids", "aux", "logits")
    before = [kept[0].features.clone(), kept[1].features.clone()] + [getattr(kept[1].tree, f).clone() for f in fields]
    list(events)
    after = [kept[0].features, kept[1].features] + [getattr(kept[1].tree, f) for f in fields]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
