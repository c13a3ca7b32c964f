"""Sums over ranks through peer memory: two processes, that share one GPU where there is one, to the bit against the
reference."""

import ctypes
import datetime
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine import spawn
from kernels import norm, peers

ROOT = Path(__file__).parents[1]
B16 = torch.bfloat16
REPLAYS, SECONDS = 10_000, 300  # of them at most
PATIENCE = 60  # seconds that a rank waits for another, which may be loading kernels


def parts_of(ranks, rows, columns, device, seed):
    """What all ranks hold, a residual and a gain."""
    draws = torch.Generator(device).manual_seed(seed)
    parts = torch.randn(ranks, rows, columns, generator=draws, device=device).to(B16)
    residual = torch.randn(rows, columns, generator=draws, device=device).to(B16)
    return parts, residual, 1 + 0.1 * torch.randn(columns, generator=draws, device=device).to(B16)


@pytest.mark.parametrize("columns", [64, 80, 2048, 7168, 8192])
def test_the_reference_is_a_norm(columns):
    """Of the rounded sum, as kernels.norm has it, to a bf16 step; a row alone has the bits that it has among others.
    Mutant: the norm of the sum before it is rounded."""
    parts, residual, gamma = parts_of(3, 5, columns, "cpu", columns)
    y, normed = peers.reference(parts, residual, gamma, 1e-6)
    torch.testing.assert_close(normed, norm.reference(y, gamma, 1e-6), rtol=2**-7, atol=0)
    for row in range(5):
        alone = peers.reference(parts[:, row : row + 1], residual[row : row + 1], gamma, 1e-6)
        assert torch.equal(alone[0][0], y[row]) and torch.equal(alone[1][0], normed[row])


def test_the_structs_are_those_of_csrc():
    """Field by field, in order. Mutant: a field added on one side."""
    source = (ROOT / "csrc" / "allreduce").glob("*.cuh")
    text = "\n".join(path.read_text() for path in source)
    for struct in (peers.Links, peers.Reduction):
        body = text[text.index(f"struct {struct.__name__} {{") :]
        lines = [line.split("//")[0].strip() for line in body[: body.index("};")].splitlines()[1:]]
        declared = [name.strip(" *") for line in lines if line for name in line.rstrip(";").split(" ", 1)[1].split(",")]
        declared = [name.split()[-1].strip("*") for name in declared]
        names = [name for name, _ in struct._fields_]
        if struct is peers.Links:
            assert declared[0] == "inbox[kMostRanks]" and names[:8] == [f"inbox{rank}" for rank in range(8)]
            declared, names = declared[1:], names[8:]
        assert declared == names, struct
    assert ctypes.sizeof(peers.Links) == 8 * 8 + 2 * 8 + 8 + 5 * 4 + 4


@pytest.mark.parametrize("size, rows, columns, norm, two", [
    (2, 4, 7168, True, False), (2, 4, 7168, False, False), (2, 16, 2048, True, False), (2, 5, 7168, True, True),
    (2, 5, 7168, False, True), (2, 17, 2048, False, True), (2, 64, 512, True, False), (2, 65, 64, False, True),
    (2, 65, 64, True, True), (8, 7, 7168, True, False), (8, 8, 7168, False, True),
])  # fmt: skip
def test_shots_of_a_sum(monkeypatch, size, rows, columns, norm, two):
    """Mutants: one shot of more elements than it was fast for, with a norm or without; two of fewer rows than ranks,
    which the kernel refuses."""
    links, launched = peers.Peers.__new__(peers.Peers), []
    links.size, links.blocks = size, 132
    monkeypatch.setattr(links, "_launch", lambda name, reduction, shots, blocks: launched.append(shots))
    x = torch.zeros(rows, columns, dtype=B16)
    links.sum(x, x, x[0] if norm else None)
    assert launched == [int(two)]


def linked(columns, rows=peers.ROWS):
    """This rank's Peers, and a barrier. A GPU each where there are as many, else they share: then a rank that waits
    spins until its turn on the GPU ends, some milliseconds, and another gets it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)

    def exchange(value):
        values = [None] * size
        dist.all_gather_object(values, value)
        return values

    links = peers.Peers(rank, size, device, columns, exchange, rows=rows)
    links.wait(PATIENCE)
    return links, lambda: exchange(None)


def every_row_count(cases, columns=8192):
    """Fused sum, residual and norm of so many rows each, one shot and two; small gathers; wrong ones by name. cases:
    {columns of rows: counts of them}."""
    links, meet = linked(columns)
    wrong = []

    def judge(name, got, want):
        torch.cuda.synchronize()
        links.check()
        if not all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            wrong.append(name)

    for width, counts in cases.items():
        for rows in counts:
            parts, residual, gamma = parts_of(links.size, rows, width, "cuda", rows)
            for extra in ((residual, gamma), (None, None), (residual, None)):
                want = peers.reference(parts, *extra, 1e-6)
                for two_shots in (False, True)[rows > peers.ONE_SHOT : 1 + (rows >= links.size)]:
                    got = links.sum(parts[links.rank], *extra, 1e-6, two_shots=two_shots)
                    judge((width, rows, two_shots, [x is not None for x in extra]), got, want)
            ids = torch.arange(rows * 3, device="cuda").view(rows, 3) * links.size
            want = torch.stack([ids + rank for rank in range(links.size)])
            judge((rows, "gather"), [links.gather(ids + links.rank)], [want])
    meet()
    links.close()
    return wrong


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_sums_are_right():
    """Bitwise the reference for 1 to 64 rows, beyond in two shots; rows that one block takes and rows cut into parts.
    Mutants: ranks added in the order of arrival, the residual added by each rank, a row's words taken before they have
    come, halves of the inbox mixed up, a part's squares left out."""
    few = [1, 2, 3, 4, 16, 17, 33, 63, 64, 65, 511]
    cases = {64: few, 80: few, 2048: [*range(1, 65), 65, 130, 512], 2880: few, 7168: few, 8192: few}
    assert spawn(every_row_count, 2, cases) == [[], []]


def replayed(replays, seconds):
    """Two dependent sums a replay, of one and two shots, in one graph, after a delay of this rank's own -> replays done
    in the time, how many of their elements were ever wrong, whether numbers stayed finite."""
    columns, rows, batch = 7168, 4, 250
    links, meet = linked(columns)
    parts, residual, gamma = parts_of(links.size, rows, columns, "cuda", 1)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def step():
        first, normed = links.sum(parts[links.rank], residual, gamma, 1e-6)
        second, _ = links.sum(normed, first, two_shots=True)
        want, want_normed = peers.reference(parts, residual, gamma, 1e-6)
        want_second, _ = peers.reference(torch.stack([want_normed] * links.size), want)
        for got, due in ((first, want), (normed, want_normed), (second, want_second)):
            wrong.add_((got != due).sum())
        parts.copy_(torch.roll(parts, 1, 2))  # other numbers next time: yesterday's words would show

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    meet()
    delays = torch.randint(0, 40_000, (replays,), generator=torch.Generator().manual_seed(links.rank)).tolist()
    began, done = time.monotonic(), 0
    # ranks stop at the same batch, by rank 0's clock: its word is the last number that all gather
    while done < replays:
        for delay in delays[done : done + batch]:
            torch.cuda._sleep(delay)
            graph.replay()
        torch.cuda.synchronize()
        links.check()
        done += batch
        spent = torch.tensor([[int(time.monotonic() - began)]], dtype=torch.int32, device="cuda")
        if int(links.gather(spent)[0]) > seconds:
            break
    meet()
    links.close()
    return done, int(wrong), bool(torch.isfinite(parts.float()).all())


@pytest.mark.gpu
@pytest.mark.timeout(420)
def test_replays_with_delays():
    """10,000 replays of a graph, ranks some ten microseconds apart: nothing hangs, nothing is wrong. Mutants: one half
    of the inbox for all calls; a call's number fixed at capture; a number that counts blocks. (Seconds on two GPUs;
    ranks that share one take turns on it, milliseconds each.)"""
    assert spawn(replayed, 2, REPLAYS, SECONDS) == [(REPLAYS, 0, True)] * 2


def abandoned():
    """Rank 1 does not come to the second sum -> what rank 0 is told, and whether it was told in time."""
    links, meet = linked(2048)
    x = torch.ones(2, 2048, dtype=B16, device="cuda")
    links.sum(x)
    torch.cuda.synchronize()
    meet()  # the first sum is through on both: the wait that is cut short is the second one's
    links.wait(0.5)
    told, began = None, time.monotonic()
    if links.rank == 0:
        for _ in range(3):  # once given up, later calls wait no more
            links.sum(x)
        torch.cuda.synchronize()
        try:
            links.check()
        except peers.GaveUp as error:
            told = str(error)
    spent = time.monotonic() - began
    meet()
    links.close()
    return told, spent < 1.4


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_wait_is_bounded():
    """Mutants: a kernel spins for ever; each later call waits again; the host is not told."""
    assert spawn(abandoned, 2) == [("waited 0.5 s for rank 1", True), (None, True)]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool):
    """No access out of bounds and no race in shared memory, on both ranks."""
    assert shutil.which("compute-sanitizer"), "compute-sanitizer is not on the PATH; it comes with CUDA"
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    command += [sys.executable, str(ROOT / "tests" / "sanitized_peers.py")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=540)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
