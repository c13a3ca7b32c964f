"""Law 1 of the packed experts: a row's bits depend on the row alone (as tests/test_law.py has it for the other ops)."""

import pytest
import torch
from packed_cases import choices, laid_out, stacked
from test_law import same
from test_twins import RUNS
from twin_cases import Make

import kernels
from weights.formats import fp8, int4, mxfp4

ROWS, WIDTH, UNITS, EXPERTS = 11, 160, 64, 3


def run_of(op, make):
    """(rows' own arguments, function of them)."""
    ids, weights = choices(make, ROWS, EXPERTS, 2)
    own = make.floats(ROWS, WIDTH), ids, weights, make.floats(ROWS, WIDTH)
    wide, tall, ops = make.weight(EXPERTS, 2 * UNITS, WIDTH), make.weight(EXPERTS, WIDTH, UNITS), kernels.FUSED
    if op == "experts_mxfp4":
        (a, a_scale), (b, b_scale) = stacked(mxfp4.pack, wide), stacked(mxfp4.pack, tall)
        a, b = (laid_out(words) for words in (a, b))
        packed = a, a_scale, make.floats(EXPERTS, 2 * UNITS), b, b_scale, make.floats(EXPERTS, WIDTH)
        return own, lambda x, i, w, r: ops.experts_mxfp4(x, i, w, *packed, "clamped_swiglu", r)
    if op == "experts_fp8":  # gate and up each begin a block of their own
        halves = [stacked(fp8.quantise, half) for half in wide.chunk(2, 1)]
        first = [torch.cat(part, 1) for part in zip(*halves, strict=True)]
        packed = *first, *stacked(fp8.quantise, tall)
    else:
        packed = [t for m in (wide, tall) for t in stacked(lambda m: int4.pack(m, 32, make.dtype), m)]
    return own, lambda x, i, w, r: getattr(ops, op)(x, i, w, *packed, "silu", r)


@pytest.mark.parametrize("device, dtype", [p for p in RUNS if p.id != "cpu-float16"])
@pytest.mark.parametrize("op", ["experts_int4", "experts_fp8", "experts_mxfp4"])
def test_a_row_is_alone(op, device, dtype):
    """Kills: sums whose order follows the number of rows; NaN of one row that reaches its tile."""
    make = Make(dtype, device, 3)
    own, run = run_of(op, make)
    whole = run(*own)
    assert torch.isfinite(whole).all()
    order = torch.randperm(ROWS, generator=make.generator).to(device)
    assert same(run(*(x[order] for x in own)), whole[order])
    for n in (1, 8):
        assert same(run(*(x[ROWS - n :] for x in own)), whole[ROWS - n :]), n
    spoilt = own[0].clone()
    spoilt[::2] = float("nan")
    assert same(run(spoilt, *own[1:])[1::2], whole[1::2])
