"""Packed experts of prompts beyond what their twins' cases reach: all tile sizes, ragged and unchosen experts, several
tiles an expert; a row's bits depend on the row alone."""

import pytest
import torch
from packed_cases import laid_out, stacked, uneven
from test_law import same
from test_twins import RUNS, compare
from twin_cases import Make

import kernels
from kernels import prefill_packed
from weights.formats import fp8, int4, mxfp4

PACKED = ("experts_int4", "experts_fp8", "experts_mxfp4")
HALVES = [run for run in RUNS if run.values[1] != torch.float32]


def ragged(make, rows, experts, top_k):
    """Ids [N, k] of which the last expert is nobody's, the first everybody's and the one before the last a row's."""
    ids = torch.rand(rows, experts - 2, generator=make.generator).topk(top_k, 1).indices
    ids[:, 0] = 0
    ids[:, 1:] = ids[:, 1:].clamp(min=1)
    ids[rows // 2, 1] = experts - 2
    return ids.to(make.device), torch.rand(rows, top_k, generator=make.generator).to(make.device)


def packed(op, make, experts, columns, width):
    """Weights of `op` and what follows its rows."""
    wide, tall = make.weight(experts, 2 * width, columns), make.weight(experts, columns, width)
    if op == "experts_fp8":
        parts = [stacked(fp8.quantise, uneven(make, m, 128, 128)) for m in (*wide.chunk(2, 1), tall)]
        first = [torch.cat(pair, 1) for pair in zip(*parts[:2], strict=True)]
        return *first, *parts[2], "silu"
    wide, tall = uneven(make, wide, 1, 32), uneven(make, tall, 1, 32)
    if op == "experts_int4":
        return *(t for m in (wide, tall) for t in stacked(lambda m: int4.pack(m, 32, make.dtype), m)), "silu"
    (a, a_scale), (b, b_scale) = stacked(mxfp4.pack, wide), stacked(mxfp4.pack, tall)
    biases = make.floats(experts, 2 * width), make.floats(experts, columns)
    return laid_out(a), a_scale, biases[0], laid_out(b), b_scale, biases[1], "clamped_swiglu"


@pytest.mark.parametrize("device, dtype", HALVES)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("op", PACKED)
def test_every_tile(op, device, dtype, many, monkeypatch):
    """Kills: tables made for other tiles; turns of words past a row's last; units stored in another order than their
    weights; programs of units past the last that leave their places as they were; scales a turn late."""
    monkeypatch.setattr(prefill_packed, "PAIRS", 0 if many else 1000)
    make = Make(dtype, device, 43)
    for rows, columns, width in ((150, 160, 96), (5, 416, 32)):
        given = make.floats(rows, columns), *ragged(make, rows, 5, 2), *packed(op, make, 5, columns, width)
        compare(kernels.PREFILL, op, f"{rows}x{columns}-{width}", (*given, given[0]), dtype)


@pytest.mark.parametrize("device, dtype", HALVES)
@pytest.mark.parametrize("op", PACKED)
def test_a_row_is_alone(op, device, dtype):
    """Kills: sums whose order follows the tile (on a GPU: a product in the interpreter has no order of its own); NaN of
    one row that reaches its tile."""
    make = Make(dtype, device, 47)
    own = make.floats(70, 160), *ragged(make, 70, 5, 2)
    rest, run = packed(op, make, 5, 160, 96), getattr(kernels.PREFILL, op)
    whole = run(*own, *rest)
    assert torch.isfinite(whole).all()
    for sizes in prefill_packed.SIZES:
        few, many = (prefill_packed.of_experts(sizes, dtype, 2 * n, 5) for n in (30, 70))
        assert few.rows < many.rows
    fewer = run(*(x[40:] for x in own), *rest)
    assert same(fewer, whole[40:]) if device == "cuda" else torch.allclose(fewer, whole[40:], atol=4e-3, rtol=1e-2)
    spoilt = own[0].clone()
    spoilt[::2] = float("nan")
    assert same(run(spoilt, *own[1:], *rest)[1::2], whole[1::2])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 100, 700])
@pytest.mark.parametrize("op, columns, width", [("int4", 7168, 256), ("fp8", 7168, 256), ("mxfp4", 2880, 2880)])
def test_whole_sizes(op, columns, width, rows):
    """Matrices of Kimi-K2.5 and DeepSeek-V3, one rank of eight, and of gpt-oss, few experts of them; 20 launches with
    the same bits. Kills: weights of a turn written over while the tensor cores still read them."""
    make = Make(torch.bfloat16, "cuda", 53)
    op = f"experts_{op}"
    given = make.floats(rows, columns), *ragged(make, rows, 5, 2), *packed(op, make, 5, columns, width)
    compare(kernels.PREFILL, op, f"{rows}x{columns}-{width}", (*given, given[0]), torch.bfloat16)
    run = getattr(kernels.PREFILL, op)
    first = run(*given)
    assert all(same(run(*given), first) for _ in range(20))
