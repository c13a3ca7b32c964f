"""Dense gated MLP with its norm and residual."""

import torch
import triton
import triton.language as tl

from . import linear, norm
from .activation import ACTIVATIONS, gated
from .tile import groups, inverse_rms, product, tile_of


def reference(x, norm_weight, eps, gate_up, down, activation, residual=None):
    """x [N, D], norm_weight [D] or None (x comes normed), gate_up [2I, D] (gate first), down [D, I] -> [N, D] =
    MLP(norm(x)) (+ residual)."""
    return linear.reference(widened(norm.reference(x, norm_weight, eps), gate_up, activation), down, None, residual)


def widened(x, gate_up, activation):
    """x [N, D] -> act(gate) * up [N, I]."""
    gate, up = (x.float() @ gate_up.float().T).chunk(2, -1)
    return ACTIVATIONS[activation](gate, up).to(x.dtype)


@triton.jit
def halves(y, BO: tl.constexpr, BR: tl.constexpr):
    """[2*BO, BR] -> its first and last BO rows."""
    return tl.split(tl.permute(tl.reshape(y, [2, BO, BR]), (1, 2, 0)))


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    x_ptr, norm_ptr, eps, w_ptr, h_ptr, rows, width, columns, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, r): BO/2 gated units of row tile r: h = act(gate) * up of norm(x)."""
    half: tl.constexpr = BO // 2
    m = tl.arange(0, BO)
    unit = tl.program_id(0) * half + m % half
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    live = row < rows
    start = row.to(tl.int64) * columns
    scale = tl.zeros([BR], tl.float32)
    if NORM:
        scale = inverse_rms(x_ptr, start, live, columns, eps, BR, 64 * SPLIT)
    outs = unit + m // half * width
    y = product(
        x_ptr, start, live, scale, norm_ptr, w_ptr, outs, unit < width, columns, NORM, BO, SPLIT, BK, BR, STAGES
    )
    gate, up = halves(y, half, BR)
    unit = tl.program_id(0) * half + tl.arange(0, half)
    at = row.to(tl.int64)[None, :] * width + unit[:, None]
    h = gated(gate, up, ACTIVATION).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + at, h, mask=(unit < width)[:, None] & live[None, :])


def fused(x, norm_weight, eps, gate_up, down, activation, residual=None):
    """The twin of `reference`: norm, gate, up and activation in one launch, down and residual in another."""
    return linear.fused(widened_fused(x, norm_weight, eps, gate_up, activation), down, None, residual)


def widened_fused(x, norm_weight, eps, gate_up, activation):
    """The twin of `widened`, of normed rows."""
    (rows, columns), width, x = x.shape, gate_up.shape[0] // 2, x.contiguous()
    h, tile = x.new_empty(rows, width), tile_of(x.dtype, columns, outputs=32)
    _gate_up[(triton.cdiv(width, tile.outputs // 2), groups(rows))](
        x, norm_weight, eps, gate_up, h, rows, width, columns, ACTIVATION=activation, NORM=norm_weight is not None,
        **tile.constants, **tile.options,
    )  # fmt: skip
    return h


def specimens():
    """Compile specimens."""
    cases = []
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for columns in (2048, 256):
            tile = tile_of(dtype, columns, outputs=32)
            types = dict.fromkeys(("x_ptr", "norm_ptr", "w_ptr", "h_ptr"), name) | {"eps": "fp32"}
            types |= dict.fromkeys(("rows", "width", "columns"), "i32")
            for given in (True, False):
                constants = tile.constants | {"ACTIVATION": "silu", "NORM": given}
                cases.append((_gate_up, types, constants, tile.options))
    return cases
