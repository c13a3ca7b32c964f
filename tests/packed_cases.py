"""Arguments for the grouped experts of packed weights, as tests/twin_cases.py has them for the others.

Scales differ a hundredfold between neighbouring groups, so that one taken from the wrong group is loud.
"""

import torch
from cycle_cases import CASES as CYCLE
from twin_cases import CASES as PLAIN
from twin_cases import Make

from kernels.routing import Routing
from weights.formats import fp8, int4, mxfp4


def choices(make, rows, experts, top_k):
    """Ids [N, k], one expert shared by most rows, and weights [N, k]."""
    scores = torch.rand(rows, experts, generator=make.generator)
    scores[:, 0] += 0.5
    weights = torch.rand(rows, top_k, generator=make.generator)
    return scores.topk(top_k, 1).indices.to(make.device), weights.to(make.device)


def uneven(make, matrix, block, across):
    """The matrix with each block of `block` rows and `across` columns 0.01 to 1 times as large."""
    out, columns = matrix.shape[-2:]
    size = 10 ** -(
        2 * torch.rand(*matrix.shape[:-2], -(-out // block), -(-columns // across), generator=make.generator)
    )
    size = size.to(matrix.device).repeat_interleave(block, -2)[..., :out, :].repeat_interleave(across, -1)
    return matrix.float() * size[..., :columns]


def stacked(pack, matrix):
    """(packed, scale) of each expert's matrix, stacked."""
    return tuple(torch.stack(part) for part in zip(*(pack(m) for m in matrix), strict=True))


def exact(words, scale):
    """The same codes with scales of 5 significant bits: a weight, which has 8 then, is what the reference takes it for.
    Twins in bf16 round weights, and what they lose passes the tolerance where many large ones are added."""
    fraction, exponent = torch.frexp(scale.float())
    return words, torch.ldexp((fraction * 32).round() / 32, exponent).to(scale.dtype)


def experts_int4(dtype, device):
    make = Make(dtype, device)
    for n, d, e, i, k, group, residual in (
        (1, 64, 16, 96, 4, 32, True),
        (9, 128, 6, 64, 2, 64, False),
        (21, 128, 10, 32, 6, 32, True),
        (2, 1088, 3, 64, 2, 32, False),
    ):
        ids, weights = choices(make, n, e, k)

        def pack(matrix, group=group):
            return int4.pack(matrix, group, dtype)

        wide, tall = uneven(make, make.weight(e, 2 * i, d), 1, group), uneven(make, make.weight(e, d, i), 1, group)
        extra = make.floats(n, d) if residual else None
        packed = *stacked(pack, wide), *stacked(pack, tall)
        given = make.floats(n, d), ids, weights, *packed, "silu", extra
        yield f"{n}x{d}-{e}", given
        if n == 21:
            yield f"{n}x{d}-{e}-shared", (*given, make.floats(n, 48), make.weight(d, 48))


def moe_int4(dtype, device, cases=((1, 64, 16, 32, 4, 0, True), (9, 96, 6, 64, 2, 48, False))):
    """cases: (rows, D, experts, width, choices, width of a shared expert or 0, whether there are a correction and a
    residual). The best scores are far apart, and weights exact: rounding decides no choice, and is no error."""
    make = Make(dtype, device)
    for n, d, e, i, k, beside, both in cases:
        x, gain = make.routed(n, d)
        correction = make.floats(e, scale=0.3, dtype=torch.float32) if both else None
        rule = Routing(k, both, "sigmoid", scale=1.5) if both else Routing(k, True)
        matrices = make.weight(e, 2 * i, d), make.weight(e, d, i)
        packed = [t for m in matrices for t in exact(*stacked(lambda m: int4.pack(m, 32, dtype), m))]
        shared = (make.weight(2 * beside, d), make.weight(d, beside)) if beside else (None, None)
        choice = make.weight(e, d), rule, None, correction
        for gamma in (gain, None)[: 2 if n > 8 else 1]:
            name = f"{n}x{d}-{e}-{i}-{beside}{'' if gamma is not None else '-normed'}"
            yield name, (x, gamma, 1e-6, *choice, *packed, "silu", x if both else None, *shared)


def experts_fp8(dtype, device):
    make = Make(dtype, device)
    for n, d, e, i, k, residual in (
        (1, 64, 16, 80, 4, True),
        (9, 256, 6, 128, 2, False),
        (21, 192, 10, 32, 6, True),
        (2, 1088, 3, 144, 2, False),
    ):
        ids, weights = choices(make, n, e, k)
        gate, up, tall = make.weight(e, i, d), make.weight(e, i, d), make.weight(e, d, i)
        parts = [stacked(fp8.quantise, uneven(make, m, 128, 128)) for m in (gate, up, tall)]
        wide, wide_scale = (torch.cat(pair, 1) for pair in zip(*parts[:2], strict=True))
        extra = make.floats(n, d) if residual else None
        yield f"{n}x{d}-{e}", (make.floats(n, d), ids, weights, wide, wide_scale, *parts[2], "silu", extra)


def laid_out(blocks):
    """Words of kernels.experts_mxfp4."""
    mxfp4.lay_out(blocks)
    return blocks.flatten(-2).view(torch.int32)


def experts_mxfp4(dtype, device):
    make = Make(dtype, device)
    for n, d, e, i, k, residual, last in (
        (1, 64, 16, 96, 4, True, True),
        (9, 128, 6, 64, 2, False, True),
        (21, 96, 10, 32, 6, True, False),
    ):
        ids, weights = choices(make, n, e, k)
        wide, wide_scale = stacked(mxfp4.pack, uneven(make, make.weight(e, 2 * i, d), 1, 32))
        tall, tall_scale = stacked(mxfp4.pack, uneven(make, make.weight(e, d, i), 1, 32))
        wide, tall = (laid_out(words) for words in (wide, tall))
        biases, extra = (make.floats(e, 2 * i), make.floats(e, d)), make.floats(n, d) if residual else None
        packed = wide, wide_scale, biases[0], tall, tall_scale, biases[1] if last else None
        yield f"{n}x{d}-{e}", (make.floats(n, d), ids, weights, *packed, "clamped_swiglu", extra)


CASES = PLAIN | CYCLE | {f.__name__: f for f in (experts_int4, moe_int4, experts_fp8, experts_mxfp4)}
