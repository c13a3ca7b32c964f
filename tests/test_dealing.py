"""Pairs grouped by many programs: the tables that one program makes."""

import pytest
import torch

from kernels import dealing
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
