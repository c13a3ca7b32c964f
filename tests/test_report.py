"""The numbers reported, against numbers counted by hand (B51)."""

import pytest

from engine.report import Acceptance

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
