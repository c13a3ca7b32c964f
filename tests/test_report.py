"""The numbers reported, against numbers counted by hand (B51)."""

import pytest

from engine.report import Acceptance, Run, comparison, decoded
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


def result(new):
    """A request of `new` tokens."""
    ids, shape = list(range(new)), Shape(3, 1, 4)
    return Result(
        3, ids, "", "length", None, cycles=[], shape=shape, prefill_ms=None, first_token_ms=2.0, decode_ms=None
    )


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
    assert comparison(run, run) == {
        "plain_tokens_per_second": None,
        "speculative_tokens_per_second": None,
        "speedup": None,
        "identical": True,
    }
    assert decoded(run, comparison(run, run), 0)[-1].endswith("ended by length")


def test_different_ids_are_called_different():
    one, two = Run([result(5)], [(0.0, 1.0)], 1), Run([result(6)], [(0.0, 1.0)], 1)
    assert not comparison(one, two)["identical"] and "DIFFERENT ids" in decoded(two, comparison(one, two), 0)[-1]
