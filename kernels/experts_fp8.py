"""Grouped expert MLP over FP8 weights with a scale for each block of 128 x 128 (weights.formats.fp8)."""

import torch
import triton
import triton.language as tl

from . import experts
from .activation import gated
from .mlp import halves
from .tile import Tile, up

BLOCK = 128


def dequantise(weight, scale, parts=1):
    """[..., out, in] e4m3, scale [..., parts * blocks, blocks] -> fp32; the rows are `parts` matrices one below the
    other, whose blocks begin anew."""
    out, columns = weight.shape[-2:]
    row = torch.arange(out // parts, device=weight.device) // BLOCK
    rows = torch.cat([row + p * (scale.shape[-2] // parts) for p in range(parts)])
    return weight.float() * scale[..., rows, :].repeat_interleave(BLOCK, -1)[..., :columns]


def reference(x, ids, weights, gate_up, gate_up_scale, down, down_scale, activation, residual=None):
    """As kernels.experts.reference, for packed weights.

    Args:
        gate_up: [E, 2I, D] float8_e4m3fn, gate rows first; gate_up_scale: [E, 2 * blocks(I), blocks(D)] fp32.
        down: [E, D, I]; down_scale: [E, blocks(D), blocks(I)]; blocks(n): n / 128, rounded up.
    """
    own, chosen = experts.touched(ids, len(down))
    bytes_ = gate_up.view(torch.uint8)[own], down.view(torch.uint8)[own]  # float8 cannot be gathered everywhere
    wide, tall = (b.view(torch.float8_e4m3fn) for b in bytes_)
    wide, tall = dequantise(wide, gate_up_scale[own], parts=2), dequantise(tall, down_scale[own])
    return experts.reference(x, chosen, weights, wide, tall, activation, residual)


def tile_of(dtype, columns):
    """Tile for rows of `columns` columns: a function of the matrix, as law 1 asks; a warp takes a block at a time."""
    split = min(4, up(-(-columns // BLOCK)))
    return Tile(16, split, BLOCK, 2) if dtype == torch.float32 else Tile(32, split, BLOCK, 3)


@triton.jit
def product(
    x_ptr, start, live, w_ptr, s_ptr, outs, row_blocks, ok, columns,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """FP8 rows `outs` [BO], of the blocks `row_blocks` [BO], times a tile of BR rows of x -> [BO, BR] fp32.

    start: [BR] int64, element of x where each row begins; live: [BR], dead rows count as zeros; ok: [BO] likewise. The
    sum over a block is scaled in fp32: weights are not rounded again. BK is the block.
    """
    piece, at = tl.arange(0, SPLIT), tl.arange(0, BK)
    low, across = outs.to(tl.int64) * columns, (columns + BK - 1) // BK
    total = tl.zeros([SPLIT, BO, BR], tl.float32)
    for c in tl.range(0, columns, SPLIT * BK, num_stages=STAGES):
        column = c + piece[:, None] * BK + at[None, :]
        inside = column < columns
        w = tl.load(
            w_ptr + low[None, :, None] + column[:, None, :], mask=ok[None, :, None] & inside[:, None, :], other=0.0
        )
        x = tl.load(
            x_ptr + start[None, None, :] + column[:, :, None], mask=live[None, None, :] & inside[:, :, None], other=0.0
        )
        block = c // BK + piece
        s = tl.load(
            s_ptr + row_blocks[None, :] * across + block[:, None],
            mask=ok[None, :] & (block < across)[:, None],
            other=0.0,
        )
        total += tl.dot(w.to(x.dtype), x, input_precision="ieee") * s[:, :, None]
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["choices"])
def _gate_up(
    x_ptr, w_ptr, s_ptr, order_ptr, expert_ptr, h_ptr, choices, width, columns, ACTIVATION: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, tile): BO/2 gated units of the tile's pairs -> h [pairs, width]."""
    expert = tl.load(expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        half: tl.constexpr = BO // 2
        m, tall, across = tl.arange(0, BO), (width + BK - 1) // BK, (columns + BK - 1) // BK
        unit = tl.program_id(0) * half + m % half
        pair = tl.load(order_ptr + tl.program_id(1) * BR + tl.arange(0, BR))
        start = (pair // choices).to(tl.int64) * columns
        w_ptr += expert * 2 * width * columns
        s_ptr += expert * 2 * tall * across
        y = product(
            x_ptr, start, pair >= 0, w_ptr, s_ptr, unit + m // half * width, unit // BK + m // half * tall,
            unit < width, columns, BO, SPLIT, BK, BR, STAGES,
        )  # fmt: skip
        gate, up = halves(y, half, BR)
        unit = tl.program_id(0) * half + tl.arange(0, half)
        at = pair.to(tl.int64)[None, :] * width + unit[:, None]
        h = gated(gate, up, ACTIVATION).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, h, mask=(unit < width)[:, None] & (pair >= 0)[None, :])


@triton.jit
def _down(
    h_ptr, w_ptr, s_ptr, order_ptr, expert_ptr, y_ptr, outputs, width,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (o, tile): BO outputs of the tile's pairs -> y [pairs, outputs] fp32."""
    expert = tl.load(expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        out = tl.program_id(0) * BO + tl.arange(0, BO)
        pair = tl.load(order_ptr + tl.program_id(1) * BR + tl.arange(0, BR))
        start = pair.to(tl.int64) * width
        w_ptr += expert * outputs * width
        s_ptr += expert * ((outputs + BK - 1) // BK) * ((width + BK - 1) // BK)
        y = product(
            h_ptr, start, pair >= 0, w_ptr, s_ptr, out, out // BK, out < outputs, width, BO, SPLIT, BK, BR, STAGES
        )
        at = pair.to(tl.int64)[None, :] * outputs + out[:, None]
        tl.store(y_ptr + at, y, mask=(out < outputs)[:, None] & (pair >= 0)[None, :])


def fused(x, ids, weights, gate_up, gate_up_scale, down, down_scale, activation, residual=None):
    """The twin of `reference`: bytes become bf16 in registers, sums of a block are scaled in fp32."""
    x, (count, columns, width) = x.contiguous(), down.shape
    order, expert = experts.group(ids, count)
    pairs, choices, tiles = ids.numel(), ids.shape[1], expert.numel()
    h, tile = x.new_empty(pairs, width), tile_of(x.dtype, columns)
    _gate_up[(triton.cdiv(width, tile.outputs // 2), tiles)](
        x, gate_up, gate_up_scale, order, expert, h, choices, width, columns,
        ACTIVATION=activation, **tile.constants, **tile.options,
    )  # fmt: skip
    parts, tile = x.new_empty(pairs, columns, dtype=torch.float32), tile_of(x.dtype, width)
    _down[(triton.cdiv(columns, tile.outputs), tiles)](
        h, down, down_scale, order, expert, parts, columns, width, **tile.constants, **tile.options
    )
    return experts.combine(parts, weights, residual, x)


def specimens():
    """Compile specimens: DeepSeek-V3 whole, one of eight ranks of it, and a toy."""
    tables, cases = {"w_ptr": "*fp8e4nv", "s_ptr": "*fp32", "order_ptr": "*i32", "expert_ptr": "*i32"}, []
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for columns, width in ((7168, 2048), (7168, 256), (64, 32)):
            tile = tile_of(dtype, columns)
            types = tables | dict.fromkeys(("x_ptr", "h_ptr"), name)
            types |= dict.fromkeys(("choices", "width", "columns"), "i32")
            cases.append((_gate_up, types, tile.constants | {"ACTIVATION": "silu"}, tile.options))
            tile = tile_of(dtype, width)
            types = tables | {"h_ptr": name, "y_ptr": "*fp32", "outputs": "i32", "width": "i32"}
            cases.append((_down, types, tile.constants, tile.options))
    return cases
