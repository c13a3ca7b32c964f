"""Log-probabilities of emitted tokens: the target's own, one a token after every cut, with speculation or without (B24,
B27)."""

import json

import pytest
import torch
from oracles import Replay, Transformers
from toys import NEXT, V, follow, pair

from engine import Refused, Sampling, Shape
from engine.generate import main

PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 3, 9)
PROMPT = [9, 8, 7, 40, 2, 5, 33]


@pytest.fixture(scope="module")
def history(toys):
    return pair(toys.history(), toys.random_draft()), Transformers(toys.history())


def check(result, reference, prompt, most):
    """Against log-softmax of the reference at each position, teacher forced."""
    ids, entries = result.token_ids, result.logprobs
    want = reference(prompt + ids)[0].log_softmax(-1)[len(prompt) - 1 : -1]
    assert [e["token_id"] for e in entries] == ids
    for token, entry, row in zip(ids, entries, want, strict=True):
        assert abs(entry["logprob"] - row[token]) < 1e-3
        best = row.topk(most).values.tolist()
        found = [value for _, value in entry["top"]]
        assert len(found) == most == len({i for i, _ in entry["top"]})
        assert found == pytest.approx(best, abs=1e-3) and found == sorted(found, reverse=True)
        assert all(abs(row[i] - value) < 1e-3 for i, value in entry["top"])


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=str)
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("right", [None, 0.7, 1.0])
def test_they_are_the_references(history, shape, temperature, right):
    """A RANDOM head, and oracles whose drafts are taken whole or in part. Mutants: rows of nodes instead of the path's;
    the row under the token instead of the one before; after the temperature; 0.0 for drafted tokens."""
    engine, reference = history
    real = engine.drafter
    how = dict(max_new_tokens=21, temperature=temperature, top_k=5 if temperature else 0, logprobs=3)
    plain = engine.generate(PROMPT, Sampling(**how), shape=PLAIN)
    try:
        if right is not None:
            engine.drafter = Replay([PROMPT + plain.token_ids], V, right)
        result = engine.generate(PROMPT, Sampling(**how), shape=shape)
    finally:
        engine.drafter = real
    check(result, reference, PROMPT, 3)
    if right is not None or shape != CHAIN or not temperature:  # else drafts were drawn, and the ids are others
        assert result.token_ids == plain.token_ids
        for ours, theirs in zip(result.logprobs, plain.logprobs, strict=True):
            assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-5)
            assert [i for i, _ in ours["top"]] == [i for i, _ in theirs["top"]]
    if right == 1.0 and shape != PLAIN:
        assert result.stats["accept_length"] > 3


def test_how_many(history):
    """None, 0, some and all of the vocabulary, in one batch: each gets its own. Mutants: the greatest wish for all; an
    empty list for None; ties by another order than the lowest id."""
    engine, reference = history
    wishes = [None, 0, 2, V]
    results = engine.generate([PROMPT] * 4, [Sampling(max_new_tokens=9, logprobs=n) for n in wishes])
    assert results[0].logprobs is None and results[0].stats["logprobs"] is None
    for result, most in zip(results[1:], wishes[1:], strict=True):
        check(result, reference, PROMPT, most)
    with pytest.raises(Refused, match=f"logprobs is {V + 1}; supported: 0 to {V}, the vocabulary"):
        engine.generate(PROMPT, Sampling(logprobs=V + 1))


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=str)
@pytest.mark.parametrize("cut", range(1, 8))
def test_they_end_with_the_tokens(toys, shape, cut):
    """A stop id and a cap at every offset of an accepted run. Mutant: entries past the cut, or none for its token."""
    engine, text = pair(toys.map(), toys.map_draft()), follow(9, 20, NEXT)
    for how in (dict(stop_ids=[text[cut - 1]]), dict(max_new_tokens=cut)):
        events = list(engine.stream([9], Sampling(logprobs=1, **how), shape=shape, details=False))
        entries = [entry for event in events for entry in event.logprobs]
        assert [e["token_id"] for e in entries] == text[:cut] == [t for event in events for t in event.tokens]
        assert events[-1].request.result(shape).logprobs == entries
        assert all(e["top"] == [[e["token_id"], e["logprob"]]] for e in entries)


def test_whoever_asks_for_none_pays_nothing(toys):
    """Mutants: logits kept for all; a session that keeps them for good."""
    engine = pair(toys.map(), toys.map_draft())
    for how in (dict(), dict(logprobs=1), dict()):
        engine.generate([9], Sampling(max_new_tokens=5, **how))
    kept = [program.tree.logits is not None for program in engine.programs.cycles.values()]
    assert kept == [False, True]


def test_impossible_tokens_can_be_written(toys, tmp_path):
    """A token of logit -inf is no JSON number: the lowest of fp32 stands for it."""

    def rule_out(config, tensors):
        tensors["lm_head.weight"][5] = -1e38

    target = toys.altered(toys.map(), rule_out)
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [3]}')
    given = f"--prompt-file {tmp_path}/ids.jsonl --target {target} --device cpu --max-context 64 --max-new-tokens 3"
    assert main([*given.split(), "--logprobs", str(V), "--stats", f"{tmp_path}/s.json"]) == 0
    (request,) = json.loads((tmp_path / "s.json").read_text())["requests"]
    assert [e["token_id"] for e in request["logprobs"]] == request["token_ids"] == follow(3, 3, NEXT)
    assert all(len(e["top"]) == V and e["top"][-1][1] <= -1e37 for e in request["logprobs"])
    assert torch.tensor([e["logprob"] for e in request["logprobs"]]).exp().min() > 0.9
