"""What carries sums over ranks, and what is chosen by its cost: the library's sums are those of the reference whatever
the row count, peer memory is left where it cannot serve, and a draft is cut where that is faster. No GPU."""

import inspect
from dataclasses import dataclass

import pytest
import torch
from toys import V as VOCABULARY
from toys import pair

from engine import links, loading, plan, spawn
from engine.slice import Apart
from engine.tp import TP, Library, join
from kernels import REFERENCE, allreduce, peers

CUDA, B16 = torch.device("cuda"), torch.bfloat16


@pytest.mark.parametrize("kind", [Apart, links.Linked])
def test_all_links_are_called_alike(kind):
    """Mutant: a method that one kind of links lacks, or whose arguments have other names there."""

    def calls(kind):
        own = inspect.getmembers(kind, inspect.isfunction)
        return {name: str(inspect.signature(function)) for name, function in own if not name.startswith("_")}

    assert calls(kind) == calls(Library) and {"sum", "sum_and_norm", "gather", "check"} <= set(calls(Library))


def rows_of(rank, rows, dtype):
    """What a rank holds of some rows of 48 columns."""
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(100 * rows + rank)).to(dtype)


def summed(size):
    """On a rank: sums of few rows and many, with a residual and without."""
    tp = join(size, torch.device("cpu"), REFERENCE.total)
    found = []
    for rows in (1, 63, 64, 65, 130):
        for dtype in (torch.float32, B16):
            x, residual = rows_of(tp.rank, rows, dtype), rows_of(99, rows, dtype)
            found += [tp.links.sum(x), tp.links.sum(x, residual), tp.add(residual, lambda carried, x=x: x)]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_the_library(size):
    """In rank order in fp32, rounded once, the same bits on all ranks for up to 64 rows and beyond. Mutants: sums in
    the order of arrival; rounded in between; the residual added by each rank; the last rank's rows lost where the count
    does not divide."""
    want = []
    for rows in (1, 63, 64, 65, 130):
        for dtype in (torch.float32, B16):
            parts = torch.stack([rows_of(rank, rows, dtype) for rank in range(size)])
            both = allreduce.reference(parts, rows_of(99, rows, dtype))
            want += [allreduce.reference(parts), both, both]
    for found in spawn(summed, size, size):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


class Alone(TP):
    """A rank of several without the others, who say what it says."""

    def together(self, make):
        return make()

    def every(self, value):
        return [value] * self.size


@dataclass
class Memory:
    """Peer memory of one rank that holds all parts; `rows` at once."""

    rows: int
    most: int = 0

    def fits(self, x):
        return x.dtype == B16 and len(x) <= self.rows

    def sum(self, x, residual=None, weight=None, eps=0.0):
        assert len(x) <= self.rows
        self.most = max(self.most, len(x))
        return peers.reference(torch.stack([x, x]), residual, weight, eps)


def test_a_norm_of_any_number_of_rows():
    """Comes with the sum, in turns where there are many, and every row has the bits it has alone; what peer memory does
    not serve has a sum and no norm. Mutants: rows beyond the most normed otherwise; a turn's rows left out."""
    library = Library(2, torch.device("cpu"), REFERENCE.total)
    library.gather = lambda x: torch.stack([x, x])
    memory, weight = Memory(4), 1 + 0.1 * rows_of(5, 1, B16)[0]
    linked = links.Linked(library, memory)
    x, residual = rows_of(0, 11, B16), rows_of(1, 11, B16)
    y, normed = linked.sum_and_norm(x, residual, weight, 1e-6)
    assert memory.most == 4 and y.shape == normed.shape == x.shape
    for row in range(11):
        alone = peers.reference(x[row : row + 1].expand(2, 1, -1), residual[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0][0], y[row]) and torch.equal(alone[1][0], normed[row])
    y, normed = linked.sum_and_norm(x.float(), residual.float(), weight.float(), 1e-6)
    assert normed is None and torch.equal(y, x.float() * 2 + residual.float())


@pytest.mark.parametrize(
    "dtype, proof, how, said",
    [
        (B16, [True, True], "auto", "one-shot over peer memory, two-shot above 64 rows"),
        (B16, [True, False], "auto", "no peer memory: its sums were wrong on ranks [1]"),
        (torch.float32, [True, True], "auto", "no peer memory: it serves bfloat16, this is torch.float32"),
        (B16, None, "auto", "no peer memory: rank 1: nvcc is not on the PATH"),
        (B16, [True, True], "library", "NCCL, all_gather and a sum in rank order"),
    ],
)
def test_what_carries_sums_is_stated(monkeypatch, dtype, proof, how, said):
    """And why, where it is not peer memory. Mutants: wrong sums are used all the same; the reason is not said; one rank
    goes another way."""

    class Peers:
        rows = 512

        def __init__(self, *_, **__):
            if proof is None:
                raise peers.Unavailable("rank 1: nvcc is not on the PATH")

        def wait(self, seconds):
            """As the real one's."""

    tp = Alone(0, 2, Library.__new__(Library))
    tp.links.name, tp.links.facts = "NCCL, all_gather and a sum in rank order", {}
    monkeypatch.setattr(peers, "Peers", Peers)
    monkeypatch.setattr(links, "_proof", lambda *_: None)
    monkeypatch.setattr(Alone, "every", lambda self, value: proof)
    found = links.fastened(tp, CUDA, dtype, 64, how)
    assert said in found.links.name and isinstance(found.links, links.Linked) == said.startswith("one-shot")


def proved(size):
    """On a rank: whether right sums over peer memory pass for such, and wrong ones."""
    tp = join(size, torch.device("cpu"), REFERENCE.total)

    class Peers(Memory):
        """Rows above ONE_SHOT are added up by the ranks in turn, each with its own residual, as csrc/allreduce does."""

        def sum(self, x, residual, weight, eps):
            parts, residuals = tp.links.gather(x), tp.links.gather(residual)
            owner = torch.arange(len(x)) % size if len(x) > peers.ONE_SHOT else torch.full((len(x),), tp.rank)
            y, normed = peers.reference(parts, residuals[owner, torch.arange(len(x))], weight, eps)
            return (y, normed) if self.rows else (y, normed * 1.1) if self.most else (y.nextafter(y + 1), normed)

        def wait(self, seconds):
            """As the real one's."""

        check = Library.check

    torch.cuda.synchronize = lambda device: None
    return [links._proof(tp, Peers(*how), 64, torch.device("cpu")) for how in ((512, 0), (0, 1), (0, 0))]


def test_sums_are_proved_at_start_up():
    """Against the library's: right ones are used, wrong ones or a wrong norm are not. Mutants: everything passes; each
    rank has another residual, so that nothing does."""
    assert spawn(proved, 2, 2) == [[True, False, False]] * 2


@pytest.mark.parametrize("collective, way", [(1.0, "replicated"), (0.0, "cut")])
def test_a_draft_is_cut_where_that_is_faster(toys, monkeypatch, collective, way):
    """By the time of a collective and the bytes that a pass reads. Mutants: always cut; the collectives left out; the
    cheaper way taken and the other one built."""
    monkeypatch.setattr(loading, "join", lambda size, device, total: Alone(0, size))
    monkeypatch.setattr(plan, "_measure", lambda *_: (collective, 1e9))
    engine = pair(toys.history(), toys.random_draft(), tp=2)
    assert engine.parts.draft_tp.startswith(f"{way}: ") and "us a pass" in engine.parts.draft_tp
    assert engine.drafter.head.weight.shape[0] == VOCABULARY // 2 // (1 if way == "replicated" else 2)
