"""hazards.py passes over no report whose order the machine code does not show. Needs no GPU."""

import pytest
from hazards import kernels, left, races

REPORT = """========= Error: Race reported between Write access at {kernel}+0x{write}
=========     and Read access at {kernel}+0x{read} [64 hazards]
"""
ATTEND, TILES, OTHER = "_ZN6eagle36attendILi64EEEv", "_ZN6eagle312packed_tilesILi320EEEv", "_ZN6eagle35routeILi256EEEv"
SIDES = """
        /*0000*/  @P0 BRA `(.L_x_1) ;
        /*0010*/  STS.64 [R5], R44 ;
        /*0020*/  BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/  LDS.64 R2, [R10] ;
.L_x_1:
        /*0040*/  EXIT ;
"""
RING = """
        /*0000*/  BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0010*/  @P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0020*/  @!P1 BRA `(.L_x_2) ;
        /*0030*/  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R9+URZ+0x20], R0 ;
.L_x_2:
        /*0040*/  @!P2 SYNCS.ARRIVE.TRANS64 RZ, [R11+URZ], R4 ;
        /*0050*/  {write} ;
        /*0060*/  {told} ;
        /*0070*/  @!P1 BRA `(.L_x_1) ;
        /*0080*/  EXIT ;
.L_x_3:
        /*0090*/  SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R9+URZ], R0 ;
        /*00a0*/  @!P0 BRA `(.L_x_3) ;
        /*00b0*/  LDS.128 R12, [R57] ;
        /*00c0*/  @!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R7+URZ+0x20], RZ ;
        /*00d0*/  @!P3 BRA `(.L_x_3) ;
        /*00e0*/  EXIT ;
"""
COPY = RING.format(write="UBLKCP.S.G [UR8], [UR6], UR5", told="NOP")
STORE = RING.format(write="STS.128 [R7], R8", told="@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R6+URZ+0x40], RZ")


def rest(kernel, text, write, read):
    report = REPORT.format(kernel=kernel, write=write, read=read)
    return left(report, kernels(f".text.{kernel}:\n{text}"))


def without(text, offset):
    """The code with nothing in an instruction's place."""
    before, found, after = text.partition(f"/*{offset}*/")
    assert found
    return before + found + "  NOP ;\n" + after.partition("\n")[2]


def test_orders_that_the_code_shows_are_passed_over():
    """Kills a rule that refutes nothing."""
    assert not rest(ATTEND, SIDES, "10", "30")
    assert not rest(TILES, COPY, "50", "b0") and not rest(TILES, STORE, "50", "b0")


@pytest.mark.parametrize(
    "kernel, text, write, read, broken",
    [(ATTEND, SIDES, "10", "30", "0020")]
    + [(TILES, COPY, "50", "b0", offset) for offset in ("0030", "0040", "0090", "00c0")]
    + [(TILES, STORE, "50", "b0", offset) for offset in ("0030", "0060", "0090", "00c0")],
)
def test_what_orders_them_has_to_be_there(kernel, text, write, read, broken):
    """Kills a rule that looks for less than every barrier, wait and arrival between two accesses."""
    assert rest(kernel, without(text, broken), write, read)


def test_a_way_round_the_barrier_is_found():
    """Kills a rule that goes by offsets: here some threads get to the read without the barrier."""
    assert rest(
        ATTEND,
        SIDES.replace("@P0 BRA `(.L_x_1)", "@P0 BRA `(.L_x_2)").replace(
            "        /*0030*/", ".L_x_2:\n        /*0030*/"
        ),
        "10",
        "30",
    )


def test_other_kernels_and_unknown_branches_are_reported():
    """Kills a rule that is applied to kernels it was not made for, and one that ignores branches it cannot read."""
    assert rest(OTHER, SIDES, "10", "30") and rest(OTHER, COPY, "50", "b0")
    assert rest(ATTEND, SIDES.replace("@P0 BRA `(.L_x_1)", "BRX R2 -0x10"), "10", "30")
    assert left(REPORT.format(kernel=ATTEND, write="10", read="30"), {})


def test_two_writes_are_reported():
    """Kills a rule that takes any pair of a ring's kernel for a slot."""
    assert rest(TILES, STORE, "50", "50")


def test_reports_are_read_whole():
    """Kills a reader that loses an access or the number of hazards."""
    text = (
        REPORT.format(kernel=ATTEND, write="10", read="30")
        + f"=========     and Read access at {ATTEND}+0x40 in /a/b.cuh:7 [8 hazards]\n"
    )
    (race,) = races(text)
    assert (race.first, race.others, race.hazards) == (0x10, [0x30, 0x40], 72)
