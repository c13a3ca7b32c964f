"""B22: logits that are not finite end a request with their position (target) or are dropped (head)."""

import pytest
from toys import BRANCH, NEXT, V, follow, pair

from engine import Sampling, Shape
from engine.generate import main
from engine.session import NonFinite

PLAIN = Shape(0, 1, 1)
pytestmark = pytest.mark.usefixtures("nan_memory")


def poisoned(toys, path, name, token, value=float("nan"), column=None):
    def change(config, tensors):
        tensors[name][token, slice(None) if column is None else column] = value

    return toys.altered(path, change)


@pytest.mark.parametrize("shape", [PLAIN, Shape(3, 1, 4), Shape(3, 2, 8)], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_nan_of_the_target_names_its_position(toys, shape, steps):
    """The target turns to NaN at one token of the text: what precedes is handed out, then the error names the position;
    the next request is served. Mutants: finite not looked at past the root; argmax of NaN as an id; pages kept."""
    start, token = 9, follow(9, steps, NEXT)[-1]
    engine = pair(poisoned(toys, toys.map(), "model.embed_tokens.weight", token), toys.map_draft())
    seen = []
    with pytest.raises(RuntimeError, match=rf"non-finite logits at position {steps + 1}\b"):
        for event in engine.stream([4, start], Sampling(max_new_tokens=20), shape=shape, details=False):
            seen += event.tokens
    assert seen == follow(start, steps, NEXT)
    assert engine.pool.free == engine.pool.size
    fine = NEXT[token]
    count = V - 2  # all the way round to the token before the broken one
    assert engine.generate([fine], Sampling(max_new_tokens=count), shape=shape).token_ids == follow(fine, count, NEXT)


@pytest.mark.parametrize("shape", [PLAIN, Shape(3, 1, 4), Shape(3, 2, 8)], ids=str)
def test_others_go_on(toys, shape):
    """Five prompts in two slots, the first NaN after some tokens, the third at its prompt's end: the others' answers
    are whole, then the error names both. Mutants: a failure that ends what runs beside it or waits; a slot or pages
    that it keeps; its prompt's rows cached for the next one; tokens before it not handed out."""
    token = follow(9, 4, NEXT)[-1]
    target = poisoned(toys, toys.map(), "model.embed_tokens.weight", token)
    engine = pair(target, toys.map_draft(), max_batch=2, page_size=2, prefill_chunk=4)
    fine, broken = NEXT[token], [*follow(NEXT[token], 8, NEXT), token]
    prompts, cap = [[9], [fine], broken, [NEXT[fine]], [1, 2, fine]], 24
    samplings = [Sampling(max_new_tokens=cap)] * 5
    with pytest.raises(NonFinite) as found:
        engine.generate(prompts, samplings, shape=shape)
    whole = [r and r.token_ids for r in found.value.results]
    assert whole == [None, follow(fine, cap, NEXT), None, follow(NEXT[fine], cap, NEXT), follow(fine, cap, NEXT)]
    said = "non-finite logits at position 4 of request 0; non-finite logits at position 8 of request 2"
    assert str(found.value) == said
    seen, ended = {i: [] for i in range(5)}, []
    with pytest.raises(NonFinite, match=said):
        for event in engine.stream_all(prompts, samplings, shape=shape):
            seen[event.request.index] += event.tokens
            ended += [event.request.index] * event.request.finished
    assert sorted(ended) == [*range(5)] and seen[0] == follow(9, 4, NEXT) and not seen[2]
    assert engine.pool.free == engine.pool.size and not engine.pool.cached(engine.pool.names(broken, shape != PLAIN))
    assert engine.generate([fine], samplings[0], shape=shape).token_ids == follow(fine, cap, NEXT)


def test_what_others_said_is_shown(toys, capsys, tmp_path):
    """On the command line: every text in its place, then the reason; exit code 1. Mutant: a failed prompt that holds
    back those behind it for ever, or is left out."""
    token = follow(9, 4, NEXT)[-1]
    target, fine = poisoned(toys, toys.map(), "model.embed_tokens.weight", token), NEXT[token]
    (tmp_path / "ids.jsonl").write_text("".join(f'{{"token_ids": [{t}]}}\n' for t in (9, token, fine)))
    argv = ["--prompt-file", str(tmp_path / "ids.jsonl"), "--target", target, "--device", "cpu", "--max-context", "64"]
    assert main([*argv, "--batch", "2", "--max-new-tokens", "12"]) == 1
    out, err = capsys.readouterr()
    said = [[int(word) for word in line.split()] for line in out.splitlines()]
    assert said == [follow(9, 4, NEXT), [], follow(fine, 12, NEXT)]
    reasons = "position 4 of request 0; non-finite logits at position 0 of request 1"
    assert err.endswith(f"error: non-finite logits at {reasons}\n")


@pytest.mark.parametrize("value, row", [(float("nan"), 5), (float("inf"), 5), (float("nan"), slice(None))])
def test_broken_target_head(toys, value, row):
    """One NaN, one inf and a head of NaN: refused at the prompt's last position. Mutant: NaN compared and lost."""
    column = None if row == slice(None) else 11
    engine = pair(poisoned(toys, toys.map(), "lm_head.weight", row, value, column), toys.map_draft())
    with pytest.raises(RuntimeError, match="non-finite logits at position 2"):
        engine.generate([4, 3, 9], Sampling(max_new_tokens=9))
    assert engine.pool.free == engine.pool.size


@pytest.mark.parametrize("shape", [Shape(3, 1, 4), Shape(4, 4, 16)], ids=str)
@pytest.mark.parametrize("value, row", [(float("nan"), 5), (float("inf"), 5), (float("nan"), slice(None))])
def test_broken_draft_head(toys, value, row, shape):
    """The same in the head: its proposals are dropped, the text is the target's. Mutants: a NaN proposal as an id
    outside the vocabulary; a drafter's NaN that reaches the target."""
    engine = pair(toys.map(), poisoned(toys, toys.map_draft(), "lm_head.weight", row, value))
    result = engine.generate([4, 3, 9], Sampling(max_new_tokens=20), shape=shape)
    assert result.token_ids == follow(9, 20, NEXT) and result.stats["accept_length"] == 1.0
    for event in engine.stream([9], Sampling(max_new_tokens=6), shape=shape):
        assert event.tree is None or set(event.tree.tokens[1:].tolist()) == {-1}


def test_a_rejected_node_may_be_nan(toys):
    """The target is NaN at tokens that are only ever proposed, never right. Mutant: a node's values that reach rows
    which do not see it (zero times NaN)."""
    target = toys.map()
    for token in BRANCH:
        target = poisoned(toys, target, "model.embed_tokens.weight", token)
    start = NEXT[BRANCH[0]]
    count = min(follow(start, V, NEXT).index(token) for token in BRANCH if token != BRANCH[0])
    engine = pair(target, toys.fixed_draft(BRANCH))
    assert count > 1
    result = engine.generate([start], Sampling(max_new_tokens=count), shape=Shape(2, 4, 8))
    assert result.token_ids == follow(start, count, NEXT)
