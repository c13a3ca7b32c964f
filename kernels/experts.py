"""Grouped expert MLP: each row through its chosen experts, combined in fp32 in the order of its choices."""

import torch
import triton
import triton.language as tl

from . import dealing
from .activation import ACTIVATIONS, gated
from .mlp import halves
from .tile import ROWS, product, tile_of, up

ROWS_AN_EXPERT = 4  # from this many choices an expert the loop over all experts is cheaper than gathering weights
MANY = 1024  # pairs that one program still groups in little time
WIDE = 1 << 26  # elements of the wide MLP's activations at a time


def _pairs(x, ids, weights, gate_up, down, act, bias):
    """One product per (row, choice): weights gathered, 2*I*D + I*D elements a pair. -> [N, D] fp32."""
    products = torch.einsum("nd,nkid->nki", x.float(), gate_up[ids].float())
    gate, up = (products if bias is None else products + bias[ids].float()).chunk(2, -1)
    hidden = act(gate, up).to(x.dtype).float()
    return (torch.einsum("nki,nkdi->nkd", hidden, down[ids].float()) * weights[..., None]).sum(1)


def _all_experts(x, ids, weights, gate_up, down, act, bias):
    """All experts as one wide MLP whose unchosen columns count zero: static shapes, few launches, for many rows."""
    (e, width, _), share = gate_up.shape, weights.new_zeros(len(x), len(gate_up)).scatter_add(1, ids, weights)
    wide, tall = gate_up.float().flatten(0, 1).T, down.float().transpose(1, 2).flatten(0, 1)
    parts = []
    for rows, part in zip(x.split(WIDE // (e * width) + 1), share.split(WIDE // (e * width) + 1), strict=True):
        products = (rows.float() @ wide).view(-1, e, width)
        gate, up = (products if bias is None else products + bias.float()).chunk(2, -1)
        hidden = act(gate, up).to(x.dtype).float() * part[..., None]
        parts.append(hidden.flatten(1) @ tall)
    return torch.cat(parts)


def touched(ids, experts):
    """Which experts a pass has to unpack: (their numbers, `ids` as places among them). One a pair where these are few,
    else all; nothing waits for the device."""
    if ids.numel() < experts:
        return ids.flatten(), torch.arange(ids.numel(), device=ids.device).view_as(ids)
    return torch.arange(experts, device=ids.device), ids


def reference(x, ids, weights, gate_up, down, activation, residual=None, gate_up_bias=None, down_bias=None):
    """Mixture of experts over rows.

    Args:
        x: [N, D] normed rows; ids [N, k] int64; weights [N, k] fp32.
        gate_up: [E, 2I, D], gate rows first; down: [E, D, I]; activation: a name of ACTIVATIONS.
        residual: [N, D] or None, added in fp32 after the combination.
        gate_up_bias: [E, 2I] or None; down_bias: [E, D] or None, weighted like the expert's output.

    Returns:
        [N, D] in x's dtype.
    """
    outputs = _pairs if ids.numel() <= ROWS_AN_EXPERT * gate_up.shape[0] else _all_experts
    y = outputs(x, ids, weights, gate_up, down, ACTIVATIONS[activation], gate_up_bias)
    if down_bias is not None:
        y = y + (down_bias[ids].float() * weights[..., None]).sum(1)
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _group(
    ids_ptr,
    order_ptr,
    expert_ptr,
    rank_ptr,
    pairs,
    tiles,
    experts,
    BP: tl.constexpr,
    BE: tl.constexpr,
    BR: tl.constexpr,
):
    """One program: deal (row, choice) pairs to tiles of BR pairs of one expert.

    order [tiles * BR]: the pair in each place, -1 for none; expert [tiles]: the tile's expert, -1 for an empty tile;
    rank [pairs]: scratch, a pair's place among its expert's.
    """
    at, lane = tl.arange(0, BP), tl.arange(0, BE)
    for start in range(0, tiles * BR, BP):
        tl.store(order_ptr + start + at, tl.full([BP], -1, tl.int32), mask=start + at < tiles * BR)
    for start in range(0, tiles, BP):
        tl.store(expert_ptr + start + at, tl.full([BP], -1, tl.int32), mask=start + at < tiles)
    count = tl.zeros([BE], tl.int32)
    for start in range(0, pairs, BP):
        own = tl.load(ids_ptr + start + at, mask=start + at < pairs, other=-1).to(tl.int32)
        member = (own[:, None] == lane[None, :]).to(tl.int32)
        place = tl.sum(member * (tl.cumsum(member, 0) - 1 + count[None, :]), 1)
        tl.store(rank_ptr + start + at, place, mask=start + at < pairs)
        count += tl.sum(member, 0)
    filled = (count + BR - 1) // BR
    first = tl.cumsum(filled, 0) - filled  # each expert's first tile
    tl.debug_barrier()  # the blank tables are written by all threads before any place in them is
    for start in range(0, pairs, BP):
        inside = start + at < pairs
        own = tl.load(ids_ptr + start + at, mask=inside, other=-1).to(tl.int32)
        inside = inside & (own >= 0) & (own < experts)
        place = tl.load(rank_ptr + start + at, mask=inside, other=0)
        tile = tl.sum(tl.where(own[:, None] == lane[None, :], first[None, :], 0), 1) + place // BR
        tl.store(order_ptr + tile * BR + place % BR, start + at, mask=inside)
        tl.store(expert_ptr + tile, own, mask=inside & (place % BR == 0))


@triton.jit(do_not_specialize=["choices"])
def _gate_up(
    x_ptr, w_ptr, bias_ptr, order_ptr, expert_ptr, h_ptr, choices, width, columns,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, tile): BO/2 gated units of the tile's pairs -> h [pairs, width]."""
    expert = tl.load(expert_ptr + tl.program_id(1))
    if expert >= 0:
        half: tl.constexpr = BO // 2
        m = tl.arange(0, BO)
        unit = tl.program_id(0) * half + m % half
        pair = tl.load(order_ptr + tl.program_id(1) * BR + tl.arange(0, BR))
        start = (pair // choices).to(tl.int64) * columns
        w_ptr += expert.to(tl.int64) * 2 * width * columns
        outs = unit + m // half * width
        y = product(
            x_ptr, start, pair >= 0, start, x_ptr, w_ptr, outs, unit < width, columns, False, BO, SPLIT, BK, BR, STAGES
        )
        if BIAS:
            bias_ptr += expert.to(tl.int64) * 2 * width
            y += tl.load(bias_ptr + outs, mask=unit < width, other=0.0).to(tl.float32)[:, None]
        gate, up = halves(y, half, BR)
        unit = tl.program_id(0) * half + tl.arange(0, half)
        at = pair.to(tl.int64)[None, :] * width + unit[:, None]
        h = gated(gate, up, ACTIVATION).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, h, mask=(unit < width)[:, None] & (pair >= 0)[None, :])


@triton.jit
def _down(
    h_ptr, w_ptr, bias_ptr, order_ptr, expert_ptr, y_ptr, outputs, width, BIAS: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (o, tile): BO outputs of the tile's pairs -> y [pairs, outputs] fp32."""
    expert = tl.load(expert_ptr + tl.program_id(1))
    if expert >= 0:
        out = tl.program_id(0) * BO + tl.arange(0, BO)
        pair = tl.load(order_ptr + tl.program_id(1) * BR + tl.arange(0, BR))
        start = pair.to(tl.int64) * width
        w_ptr += expert.to(tl.int64) * outputs * width
        y = product(
            h_ptr, start, pair >= 0, start, h_ptr, w_ptr, out, out < outputs, width, False, BO, SPLIT, BK, BR, STAGES
        )
        if BIAS:
            bias_ptr += expert.to(tl.int64) * outputs
            y += tl.load(bias_ptr + out, mask=out < outputs, other=0.0).to(tl.float32)[:, None]
        at = pair.to(tl.int64)[None, :] * outputs + out[:, None]
        tl.store(y_ptr + at, y, mask=(out < outputs)[:, None] & (pair >= 0)[None, :])


@triton.jit
def _combine(part_ptr, weights_ptr, residual_ptr, y_ptr, choices, columns, RESIDUAL: tl.constexpr, BC: tl.constexpr):
    """Program (n, c): weighted sum of row n's experts in the order of its choices, then the residual."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = at < columns
    total = tl.zeros([BC], tl.float32)
    for j in range(choices):
        pair = row * choices + j
        total += tl.load(weights_ptr + pair) * tl.load(part_ptr + pair * columns + at, mask=inside, other=0.0)
    if RESIDUAL:
        total += tl.load(residual_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + at, total.to(y_ptr.dtype.element_ty), mask=inside)


def tiles(pairs, experts, rows):
    """Most tiles of `rows` places that `pairs` pairs can make: every tile but one an expert is full."""
    touched = min(pairs, experts)
    return touched + (pairs - touched) // rows


def grouping(experts, rows=ROWS):
    """Sizes of `_group`."""
    lanes = max(16, up(experts))
    return {"BP": max(16, 16384 // lanes // 2), "BE": lanes, "BR": rows}


def group(ids, experts, rows=ROWS):
    """Pairs [N, k] by expert in tiles of `rows`: order [tiles * rows] and expert [tiles], int32 (see `_group`); the
    same whatever makes them."""
    pairs = ids.numel()
    count = tiles(pairs, experts, rows)
    if pairs > MANY:
        return dealing.group(ids, experts, rows, count)
    order, expert, rank = (
        torch.empty(n, dtype=torch.int32, device=ids.device) for n in (count * rows, count, max(1, pairs))
    )
    _group[(1,)](ids.contiguous(), order, expert, rank, pairs, count, experts, **grouping(experts, rows), num_warps=8)
    return order, expert


def combine(parts, weights, residual, like):
    """parts [N*k, D] fp32, weights [N, k] -> [N, D] in the dtype of `like`, residual added last."""
    (rows, choices), columns = weights.shape, parts.shape[1]
    y, block = torch.empty_like(like), 256
    _combine[(rows, triton.cdiv(columns, block))](
        parts, weights.contiguous(), None if residual is None else residual.contiguous(), y, choices, columns,
        RESIDUAL=residual is not None, BC=block, num_warps=2,
    )  # fmt: skip
    return y


def fused(x, ids, weights, gate_up, down, activation, residual=None, gate_up_bias=None, down_bias=None):
    """The twin of `reference`: pairs by expert on the device, each tile's weights streamed once; static grid."""
    x, (experts, columns, width) = x.contiguous(), down.shape
    order, expert = group(ids, experts)
    pairs, choices, tiles = ids.numel(), ids.shape[1], expert.numel()
    h, tile = x.new_empty(pairs, width), tile_of(x.dtype, columns, outputs=32)
    _gate_up[(triton.cdiv(width, tile.outputs // 2), tiles)](
        x, gate_up, gate_up_bias, order, expert, h, choices, width, columns,
        ACTIVATION=activation, BIAS=gate_up_bias is not None, **tile.constants, **tile.options,
    )  # fmt: skip
    parts, tile = x.new_empty(pairs, columns, dtype=torch.float32), tile_of(x.dtype, width, outputs=32)
    _down[(triton.cdiv(columns, tile.outputs), tiles)](
        h, down, down_bias, order, expert, parts, columns, width,
        BIAS=down_bias is not None, **tile.constants, **tile.options,
    )  # fmt: skip
    return combine(parts, weights, residual, x)


def specimens():
    """Compile specimens: Qwen3-30B-A3B, the demo target, gpt-oss."""
    tables = {"order_ptr": "*i32", "expert_ptr": "*i32"}
    cases = []
    for experts in (128, 16):
        types = tables | {"ids_ptr": "*i64", "rank_ptr": "*i32"} | dict.fromkeys(("pairs", "tiles", "experts"), "i32")
        cases.append((_group, types, grouping(experts), {"num_warps": 8}))
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for columns, width, act in ((2048, 768, "silu"), (256, 64, "silu"), (2880, 2880, "clamped_swiglu")):
            bias, tile = {"BIAS": act != "silu"}, tile_of(dtype, columns, outputs=32)
            types = tables | dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "h_ptr"), name)
            types |= dict.fromkeys(("choices", "width", "columns"), "i32")
            cases.append((_gate_up, types, tile.constants | bias | {"ACTIVATION": act}, tile.options))
            tile = tile_of(dtype, width, outputs=32)
            types = tables | dict.fromkeys(("h_ptr", "w_ptr", "bias_ptr"), name)
            types |= {"y_ptr": "*fp32", "outputs": "i32", "width": "i32"}
            cases.append((_down, types, tile.constants | bias, tile.options))
        types = {"part_ptr": "*fp32", "weights_ptr": "*fp32", "residual_ptr": name, "y_ptr": name}
        types |= {"choices": "i32", "columns": "i32"}
        cases.append((_combine, types, {"RESIDUAL": True, "BC": 256}, {"num_warps": 2}))
    return cases
