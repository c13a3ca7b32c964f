"""The numbers reported, against numbers counted by hand (B51)."""

import pytest

from engine.compare import Taken, comparison, turns
from engine.report import Acceptance, Run, changes, decoded
from engine.request import Result
from engine.shape import Shape

SCRIPT = [(accepted + 1, accepted, 3) for accepted in (3, 0, 1, 2)]  # steps 3; each cycle's bonus token comes on top


def test_a_scripted_pattern():
    counts = Acceptance.of(SCRIPT)
    assert (counts.accepted, counts.drafted, counts.rate) == (6, 12, 0.5)
    assert (counts.length_drafts, counts.length) == (1.5, 2.5)
    assert counts.by_position == [3 / 4, 2 / 4, 1 / 4]


@pytest.mark.parametrize("cut", range(5))
def test_two_half_runs_are_one_run(cut):
    assert Acceptance.of(SCRIPT[:cut]) + Acceptance.of(SCRIPT[cut:]) == Acceptance.of(SCRIPT)


def test_nothing_drafted_is_not_measured():
    plain = Acceptance.of([(1, 0, 0)] * 5)
    assert (plain.length, plain.length_drafts, plain.rate, plain.by_position) == (1.0, None, None, [])
    assert Acceptance.of([]).report() == {
        "accept_length": None,
        "accept_length_drafts": None,
        "accept_rate": None,
        "accept_rate_by_position": [],
    }


def test_a_cut_cycle_counts_what_it_emitted():
    """A cap of two tokens on a cycle that agreed with three drafts: both emitted tokens were drafted."""
    counts = Acceptance.of([(2, 2, 3)])
    assert (counts.length, counts.rate, counts.by_position) == (2.0, 2 / 3, [1.0, 1.0, 0.0])


def test_positions_count_the_cycles_that_drafted_that_far():
    counts = Acceptance.of([(2, 1, 1), (4, 3, 3), (1, 0, 0), (1, 0, 3)])
    assert counts.by_position == [2 / 3, 1 / 2, 1 / 2]
    assert counts.rate == 4 / 7


def result(new, shapes=()):
    """A request of `new` tokens; shapes: of its cycles."""
    ids, shape = list(range(new)), Shape(3, 1, 4)
    none = dict(prefill_ms=None, first_token_ms=2.0, decode_ms=None)
    return Result(3, ids, "", "length", None, cycles=[], shape=shape, shapes=list(shapes), **none)


def taken(*speeds, tokens=100, same=True):
    """100 tokens a round at these speeds."""
    ms = [1e3 * tokens / speed if speed else 0.0 for speed in speeds]
    return Taken([tokens] * len(ms), [tokens] * len(ms), ms, same=same)


def test_requests_that_overlap_share_their_time():
    """Seconds 0-2 and 1-4 overlap, 6-7 stands alone: decoding took 5 seconds, not 6."""
    run = Run([result(11), result(6), result(6)], [(0.0, 2.0), (1.0, 4.0), (6.0, 7.0)], launches=10)
    assert (run.decode_seconds, run.tokens_per_second) == (5.0, 20 / 5.0)
    assert run.milliseconds(load=1.0, capture=0.0) == {
        "load": 1.0,
        "capture": None,
        "prefill": None,
        "first_token": 2.0,
        "decode": 5000.0,
        "cycle": 500.0,
        **dict.fromkeys(("draft", "verify", "accept", "commit")),
    }
    inside = Run([result(6), result(6)], [(0.0, 4.0), (1.0, 2.0)], launches=5)
    assert inside.decode_seconds == 4.0


@pytest.mark.parametrize("new", [0, 1])
def test_a_run_without_a_second_token_has_no_speed(new):
    run = Run([result(new)], [(1.0, 1.0)], launches=0)
    assert run.tokens_per_second is None and run.milliseconds(1.0, 0.0)["cycle"] is None
    way = taken(0.0, tokens=max(0, new - 1))
    assert comparison(way, way) == {
        "plain_tokens_per_second": None,
        "speculative_tokens_per_second": None,
        "speedup": None,
        "speedup_by_round": [],
        "identical": True,
    }
    assert decoded(run, comparison(way, way), 0)[-1].endswith("ended by length")


def test_different_ids_are_called_different():
    two = Run([result(6)], [(0.0, 1.0)], 1)
    compare = comparison(taken(10.0), taken(12.0, same=False))
    assert compare["identical"] is False and "DIFFERENT ids" in decoded(two, compare, 0)[-1]
    assert comparison(taken(10.0), taken(12.0, same=False), drawn=True)["identical"] is None


def test_a_comparison_keeps_its_rounds():
    """Mutants: the mean; the best round; a speed-up of medians only, whose spread nobody sees."""
    compare = comparison(taken(10.0, 20.0, 30.0), taken(15.0, 20.0, 60.0))
    assert (compare["plain_tokens_per_second"], compare["speculative_tokens_per_second"]) == (20.0, 20.0)
    assert compare["speedup"] == 1.0 and compare["speedup_by_round"] == pytest.approx([1.5, 1.0, 2.0])
    assert "(1.00 to 2.00 by round)" in decoded(Run([result(6)], [(0.0, 1.0)], 1), compare, 0)[-1]


def test_ways_take_turns():
    """Fault B52: what the machine does meanwhile falls on all. Mutants: all of one way first; one way always first."""
    order = list(turns("abc", 2, 2))
    assert [way for _, _, way in order] == list("abcbcacababc")
    assert [(turn, unit) for turn, unit, _ in order[::3]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    way = Taken()
    for turn, expected in ((0, [[0, 1, 2]]), (0, [[0, 1, 2]]), (1, [[0, 1]])):
        way.add(turn, [result(3)], 10.0, expected)
    assert (way.tokens, way.ms, way.speed, way.same) == ([4, 2], [20.0, 10.0], [200.0, 200.0], False)


def test_where_a_shape_changed():
    """Mutants: every cycle listed; cycles counted over all requests; requests not told apart."""
    a, b = Shape(3, 1, 4), Shape(0, 1, 1)
    assert changes([result(5, [a, a, b, b, a])]) == [
        {"cycle": 0, "shape": "3-1-4"},
        {"cycle": 2, "shape": "0-1-1"},
        {"cycle": 4, "shape": "3-1-4"},
    ]
    several = changes([result(2, [a]), result(3, [b, b])])
    assert several == [{"request": 0, "cycle": 0, "shape": "3-1-4"}, {"request": 1, "cycle": 0, "shape": "0-1-1"}]
