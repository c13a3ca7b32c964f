"""Pairs grouped by many programs: the tables that one program makes."""

import pytest
import torch

from kernels import dealing, experts, nibbles
from kernels.experts import _group, grouping, tiles

RUNS = [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", RUNS)
@pytest.mark.parametrize("rows, experts, k, tile", [(300, 20, 4, 8), (41, 6, 2, 64), (5, 40, 3, 8), (600, 128, 8, 128)])
def test_many_programs_make_the_same_tables(device, rows, experts, k, tile):
    """Mutants: ranks that begin anew in every program; an expert without pairs that takes a tile; places left as they
    were; ids that are nobody's dealt."""
    ids = torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows)).topk(k, 1).indices
    ids[ids == 3] = 4
    ids[0, 0] = -1
    ids, count = ids.to(device), tiles(ids.numel(), experts, tile)
    want = [torch.empty(n, dtype=torch.int32, device=device) for n in (count * tile, count, ids.numel())]
    _group[(1,)](ids, *want, ids.numel(), count, experts, **grouping(experts, tile), num_warps=8)
    got = dealing.group(ids, experts, tile, count)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("device", RUNS)
def test_packed_experts_take_them(device, monkeypatch):
    """Mutants: tables written over by the launch that brings rows into place; rows left where they were."""
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(device)
    ids = torch.rand(9, 12, generator=torch.Generator().manual_seed(2)).topk(3, 1).indices.to(device)
    want = nibbles.prepare(x, ids, 12)
    monkeypatch.setattr(experts, "MANY", 20)
    assert all(torch.equal(a, b) for a, b in zip(nibbles.prepare(x, ids, 12), want, strict=True))
