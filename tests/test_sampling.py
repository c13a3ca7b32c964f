"""Sampling: what is drawn has the target's filtered distribution whatever the draft says (law 2; B19, B23)."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from toys import V, pair

from engine import Refused, Sampling, Shape
from kernels import REFERENCE, philox, sampling

PLAIN, SHORT, CHAIN, TREE = Shape(0, 1, 1), Shape(1, 1, 2), Shape(3, 1, 4), Shape(3, 3, 9)
SHAPES = [PLAIN, CHAIN, TREE]
COIN = {3: 0.31, 9: 0.27, 17: 0.18, 28: 0.12, 40: 0.08, 63: 0.04}  # id: probability
FACES = list(COIN)
N, LINE = 20_000, 0.02  # tokens drawn, total variation allowed: honest draws stay below 0.0096 in 99 of 100 runs
ROWS = 250  # requests at once
PROMPT = [9, 8, 7, 40, 2, 5, 33]


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """{id: probability} of {id: logit}, one token at a time, in the documented order."""
    weight = {i: math.exp((x - max(logits.values())) / temperature) for i, x in logits.items()}
    order = sorted(weight, key=lambda i: (-weight[i], i))
    order = order[: top_k or None]
    total, sofar, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if (top_p == 1 or sofar < top_p * total) and weight[i] >= min_p * weight[order[0]]:
            kept.append(i)
        sofar += weight[i]
    whole = sum(weight[i] for i in kept)
    return {i: weight[i] / whole for i in kept}


def variation(ids, expected):
    """Total variation between the ids drawn and {id: probability}."""
    return 0.5 * sum(abs(ids.count(i) / len(ids) - expected.get(i, 0)) for i in set(ids) | set(expected))


class Always:
    """A drafter without distribution: proposes one token over and over, in a chain or as every other child."""

    cache_rows = None

    def __init__(self, token):
        self.token = token

    def extend(self, batch, features, cache):
        """Keeps nothing."""

    def propose(self, state, tree, cache):
        """Writes tokens and parents, and no tree.q."""
        node = torch.arange(tree.shape.draft_tokens)
        wide = node * 0 if tree.shape.topk > 1 else (node - 1).clamp(min=0)
        tree.tokens.copy_(((self.token + node * (tree.shape.topk > 1)) % V).expand_as(tree.tokens))
        tree.tokens[:, 0] = state.root
        tree.parents.copy_(wide.expand_as(tree.parents))


def rows(engine, count, how, shape, **sampling):
    """`count` tokens in ROWS requests; the lists of ids."""
    each = Sampling(max_new_tokens=-(-count // ROWS), **how, **sampling)
    return [r.token_ids for r in engine.generate([[5]] * ROWS, each, shape=shape)]


@pytest.fixture(scope="module")
def coin(toys):
    """COIN target; FIXED head over five faces and an id that is none: its q changes with the token.

    Attention and experts, which add nothing to a COIN, are left out for speed.
    """

    def nothing(q, *rest):
        return torch.zeros_like(q).flatten(1)

    ops = replace(REFERENCE, attention=nothing, experts=lambda x, *rest: rest[-1])
    target = toys.coin([COIN.get(i, 0) for i in range(V)])
    return pair(target, toys.fixed_draft((3, 9, 17, 28, 40, 50)), max_batch=ROWS, max_context=128, ops=ops)


# ------------------------------------------------------------------ numbers
def test_philox_known_answers():
    """The three published vectors. Mutants: nine rounds, words in another order, 31 bits of a product."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for (*counter, low, high), words in (
        ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        key = high << 32 | low
        key = torch.tensor([key - (1 << 64) if key >> 63 else key])
        got = philox.philox(key, *(torch.tensor([c]) for c in counter))
        assert tuple(int(w) for w in got) == words


def test_uniform_numbers():
    """In [0, 1), even, and another for each key, position (2^32 apart too) and purpose; alone or in a batch the same.
    Mutants: the purpose left out; the high half of the position left out; a number of 1."""
    keys, at = torch.tensor([7, -7]), torch.arange(20_000).repeat(2, 1)
    found = [philox.uniform(keys, at, purpose) for purpose in range(3)] + [philox.uniform(keys, at + (1 << 32), 0)]
    whole = torch.stack(found)
    assert whole.min() >= 0 and whole.max() < 1
    assert (whole.mean(-1) - 0.5).abs().max() < 0.01 and (whole.var(-1) - 1 / 12).abs().max() < 0.003
    flat = whole.view(8, -1)
    assert (torch.corrcoef(flat) - torch.eye(8)).abs().max() < 0.04
    assert (torch.corrcoef(torch.stack([flat[0, 1:], flat[0, :-1]]))[0, 1]).abs() < 0.04
    assert torch.equal(philox.uniform(keys[1:], at[1:, 55:57], 2), found[2][1:, 55:57])
    assert torch.equal((whole * 2**24).frac(), torch.zeros_like(whole))


# ------------------------------------------------------------------ filters and the draw
def test_filters_by_hand():
    """600 rows with many ties, all filters at once. Mutants: ties cut by the highest id; the token that completes top-p
    left out; top-p over the whole row; min-p against the sum; filters before the temperature."""
    make = torch.Generator().manual_seed(3)

    def pick(*values):
        return torch.tensor(values)[torch.randint(len(values), (600,), generator=make)]

    logits = torch.randint(-4, 5, (600, 24), generator=make) * 0.7
    settings = [
        pick(0.3, 1.0, 2.5),
        pick(0, 1, 2, 5, 23, 24, 99),
        pick(1.0, 1e-6, 0.333, 0.613, 0.957),
        pick(0.0, 0.049, 0.31, 1.0),
    ]
    p = sampling.soften(logits, settings[0], sampling.cutoff(logits, *settings))
    for row in range(600):
        t, k, share, least = (x[row].item() for x in settings)
        want = filtered(dict(enumerate(logits[row].tolist())), t, int(k), share, least)
        assert set(p[row].nonzero()[:, 0].tolist()) == set(want), row
        torch.testing.assert_close(p[row][list(want)], torch.tensor(list(want.values())), atol=1e-6, rtol=1e-5)
    assert torch.equal(sampling.soften(logits, settings[0]), sampling.soften(logits, settings[0], None))


def test_draw_stays_inside_the_support():
    """Numbers at both ends and at every border. Mutants: cumulative >= u, which draws an id of probability 0 at u = 0;
    the last id of all, not the last possible, where rounding leaves u above the sum."""
    p = torch.zeros(9, 50)
    p[:, [4, 11, 30]] = torch.tensor([0.25, 0.5, 0.25 - 1e-6])
    u = torch.tensor([0.0, 0.1, 0.25 - 1e-6, 0.2501, 0.5, 0.7499, 0.7501, 0.9, 1 - 2.0**-24])
    assert sampling.draw(p, u).tolist() == [4, 4, 4, 11, 11, 11, 30, 30, 30]


def test_a_coin_of_zero_keeps_no_probability_of_zero():
    """Drafted token with p = 0, p < q, p > q; nothing drafted (q of zeros, or token -1). Mutants: coin <= ratio; a
    token without a distribution taken for certain; the residual not cut at 0."""
    p = torch.tensor([[0.0, 0.25, 0.75]]).repeat(6, 1)
    q = torch.tensor([[0.5, 0.5, 0.0]] * 3 + [[0.0, 0.0, 0.0]] * 2 + [[0.5, 0.5, 0.0]])
    tokens, coins = torch.tensor([0, 1, 1, 1, -1, 1]), torch.tensor([0.0, 0.49, 0.51, 0.0, 0.0, 0.0])
    u = torch.tensor([0.0, 0.9, 0.0, 0.0, 0.3, 0.99])
    assert sampling.draw(p, u, q, tokens, coins).tolist() == [2, 1, 2, 1, 2, 1]


SETTINGS = [
    dict(temperature=1.0),
    dict(temperature=0.5),
    dict(temperature=2.0, top_k=2),
    dict(temperature=1.0, top_p=0.6),
    dict(temperature=2.0, top_p=0.9, min_p=0.55),
]


@pytest.mark.parametrize(
    "shape, draft, settings",
    [
        (PLAIN, None, SETTINGS[:1]),
        (SHORT, None, SETTINGS[1:3]),
        (CHAIN, None, SETTINGS),
        (TREE, None, SETTINGS[::2]),
        (CHAIN, 63, SETTINGS[2:4]),
        (TREE, 38, SETTINGS[3:]),
    ],
)
def test_the_distribution(coin, shape, draft, settings):
    """20,000 draws each within 0.02, excluded tokens never; soft drafts that propose an impossible token too, and a
    drafter that always proposes the least likely one. Mutants: the argmax verified; unfiltered p compared; q's number
    used again for the coin; the residual from p alone; q not scaled by the temperature; every draft kept."""
    real = coin.drafter
    coin.drafter = real if draft is None else Always(draft)
    try:
        for how in settings:
            expected = filtered({i: math.log(p) for i, p in COIN.items()}, **how)
            ids = sum(rows(coin, N, how, shape), [])
            assert set(ids) == set(expected), how
            assert len(ids) == N and variation(ids, expected) < LINE, how
    finally:
        coin.drafter = real


@pytest.fixture(scope="module")
def chances():
    """Rows of a transition matrix over four of the tokens."""
    return torch.tensor([[0.7, 0.12, 0.1, 0.08], [0.04, 0.06, 0.8, 0.1], [0.34, 0.3, 0.12, 0.24], [0.6, 0.0, 0.4, 0.0]])


def transitions(toys, base, states, chances, vocabulary=None):
    """A MAP target or head whose next token follows `chances`; tokens elsewhere go to any state."""

    def change(config, tensors):
        table = torch.full((V, V), -1e4)
        table[:, states] = chances.mean(0).log()
        table[states, :] = -1e4
        for state, row in zip(states, chances, strict=True):
            table[state, states] = row.log().clamp(min=-1e4)
        tensors["lm_head.weight"] = table.T[list(range(V) if vocabulary is None else vocabulary)] / 8

    return toys.altered(base, change)


@pytest.mark.parametrize("shape, other", [(PLAIN, 0), (SHORT, 1), (CHAIN, 2), (TREE, 1)])
def test_adjacent_pairs(toys, chances, shape, other):
    """The next token's distribution after each token, drafted by a head that believes in another matrix. Mutants: the
    same number for all positions of a cycle; p of the row before; the residual drawn by a number already looked at."""
    states = [7, 19, 33, 60]
    target = transitions(toys, toys.map(), states, chances)
    draft = transitions(toys, toys.map_draft(), states, chances.roll(other, 0).clamp(min=0.02))
    engine = pair(target, draft, max_batch=ROWS, max_context=128)
    found = rows(engine, N + ROWS, dict(temperature=1.0), shape)
    seen = [both for ids in found for both in pairwise(ids)]
    firsts = [a for a, _ in seen]
    want = {
        (a, b): firsts.count(a) / len(seen) * float(chances[i, j])
        for i, a in enumerate(states)
        for j, b in enumerate(states)
        if chances[i, j]
    }
    assert set(seen) <= set(want) and len(seen) >= N and variation(seen, want) < LINE


@pytest.mark.parametrize("how", [dict(temperature=1.0), dict(temperature=0.4), dict(temperature=1.5, top_k=3)], ids=str)
@pytest.mark.parametrize("ids", [None, (60, 33, 19, 7)])
def test_a_draft_that_knows_is_always_kept(toys, chances, how, ids):
    """The head's distribution is the target's own, so p / q is near 1. Mutants: another temperature or filter for q; q
    not moved into the target's ids; q of another row; a coin above 1."""
    states, vocabulary = [7, 19, 33, 60], None if ids is None else list(ids)
    chances = chances + torch.tensor([0.01, 0.02, 0.03, 0.04])  # none impossible, no two alike
    target = transitions(toys, toys.map(), states, chances)
    draft = transitions(toys, toys.map_draft(ids=ids), states, chances, vocabulary)
    engine = pair(target, draft, max_batch=8)
    results = engine.generate([[7]] * 8, Sampling(max_new_tokens=81, **how), shape=CHAIN)
    rates = [r.stats["accept_rate"] for r in results]
    assert sum(rates) / len(rates) > 0.99


def test_the_accept_rate_is_the_overlap(toys):
    """One draft of two faces at even odds: kept with the sum of min(p, q). Mutants: min(1, p) for min(1, p / q)."""
    target = toys.coin([COIN.get(i, 0) for i in range(V)])

    def flat(config, tensors):
        tensors["lm_head.weight"].zero_()

    engine = pair(target, toys.altered(toys.fixed_draft((9, 40)), flat), max_batch=ROWS)
    results = engine.generate([[5]] * ROWS, Sampling(max_new_tokens=30, temperature=1.0), shape=SHORT)
    cycles = [cycle for r in results for cycle in r.cycles]
    kept = sum(matched for _, matched, _ in cycles) / len(cycles)
    assert abs(kept - (COIN[9] + COIN[40])) < 0.02


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_distribution_on_a_gpu(toys, shape):
    """20,000 captured draws of a COIN; excluded tokens never."""
    target = toys.coin([COIN.get(i, 0) for i in range(V)])
    sizes = dict(max_batch=8, max_context=1024, device="cuda", dtype="float32")
    engine = pair(target, toys.fixed_draft((3, 9, 17, 28, 40, 50)), **sizes)
    for how in SETTINGS[::2]:
        expected = filtered({i: math.log(p) for i, p in COIN.items()}, **how)
        found = engine.generate([[5]] * 24, Sampling(max_new_tokens=834, **how), shape=shape)
        ids = sum((r.token_ids for r in found), [])
        assert set(ids) == set(expected) and len(ids) >= N and variation(ids, expected) < LINE


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    "name, values",
    {
        "temperature": [-1, -1e-9, float("nan"), float("inf"), "1", None, True, 1e39],
        "top_k": [-1, 1.5, True, "2", None],
        "top_p": [0, -0.1, 1.1, float("nan"), None, True],
        "min_p": [-0.1, 1.1, float("nan"), None],
        "seed": [-1, 1.5, True, None],
        "logprobs": [-1, 1.5, True, "all"],
    }.items(),
)
def test_settings_that_cannot_be_are_refused(name, values):
    """B19. Mutants: one bound missing; NaN, which no comparison catches."""
    for value in values:
        with pytest.raises(Refused) as error:
            Sampling(**{name: value})
        assert str(error.value).startswith(f"{name} is {value!r}; supported: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["frequency_penalty", "repetition_penalty", "min_new_tokens", "logit_bias", "top_a"])
def test_what_is_not_offered_is_refused(name):
    """B23: refused, not ignored."""
    with pytest.raises(TypeError, match=name):
        Sampling(**{name: 1})
