"""Pairs by expert where there are many of them: the tables of kernels.experts.group, made by many programs."""

import torch
import triton
import triton.language as tl

from .tile import up

LANES, BLOCKS = 16, 512  # experts, and counts of each, that a program sums at a time


@triton.jit
def _own(ids_ptr, at, pairs, experts, lane):
    """Whether each pair is each expert's [BP, BE] int32."""
    own = tl.load(ids_ptr + at, mask=at < pairs, other=-1).to(tl.int32)
    return ((own[:, None] == lane[None, :]) & (lane < experts)[None, :]).to(tl.int32)


@triton.jit
def _blank(table_ptr, entries, BP: tl.constexpr):
    """-1 in this program's share of a table."""
    share = (entries + tl.num_programs(0) - 1) // tl.num_programs(0)
    for start in range(0, share, BP):
        at = start + tl.arange(0, BP)
        place = tl.program_id(0) * share + at
        tl.store(table_ptr + place, tl.full([BP], -1, tl.int32), mask=(at < share) & (place < entries))


@triton.jit(do_not_specialize=["pairs", "places", "tiles"])
def _count(
    ids_ptr, count_ptr, order_ptr, expert_ptr, pairs, places, tiles, experts, BP: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Program i: how many of its BP pairs each expert has, and -1 in its share of places and tiles."""
    block, at, lane = tl.program_id(0), tl.arange(0, BP), tl.arange(0, BE)
    tl.store(count_ptr + block * BE + lane, tl.sum(_own(ids_ptr, block * BP + at, pairs, experts, lane), 0))
    _blank(order_ptr, places, BP)
    _blank(expert_ptr, tiles, BP)


@triton.jit(do_not_specialize=["blocks"])
def _before(count_ptr, total_ptr, blocks, BB: tl.constexpr, BE: tl.constexpr, LANES: tl.constexpr):
    """Program j, LANES experts: their counts [blocks, BE] become the pairs that lie before; total [BE]: all of them."""
    at, lane = tl.arange(0, BB), tl.program_id(0) * LANES + tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.int32)
    for start in range(0, blocks, BB):
        place, inside = (start + at)[:, None] * BE + lane[None, :], (start + at < blocks)[:, None]
        count = tl.load(count_ptr + place, mask=inside, other=0)
        tl.store(count_ptr + place, tl.cumsum(count, 0) - count + total[None, :], mask=inside)
        total += tl.sum(count, 0)
    tl.store(total_ptr + lane, total)


@triton.jit(do_not_specialize=["pairs"])
def _deal(
    ids_ptr, before_ptr, total_ptr, order_ptr, expert_ptr, pairs, experts,
    BP: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Program i: its BP pairs to their places; who has a tile's first place writes whose tile it is."""
    block, lane = tl.program_id(0), tl.arange(0, BE)
    pair = block * BP + tl.arange(0, BP)
    member = _own(ids_ptr, pair, pairs, experts, lane)
    filled = (tl.load(total_ptr + lane) + BR - 1) // BR
    base = (tl.cumsum(filled, 0) - filled) * BR + tl.load(before_ptr + block * BE + lane)  # from its first tile on
    place = tl.sum(member * (tl.cumsum(member, 0) - 1 + base[None, :]), 1)
    live = tl.sum(member, 1) > 0
    tl.store(order_ptr + place, pair, mask=live)
    tl.store(expert_ptr + place // BR, tl.sum(member * lane[None, :], 1), mask=live & (place % BR == 0))


def sizes(experts):
    """Launch sizes of the kernels."""
    lanes = max(16, up(experts))
    return {"BP": max(16, 16384 // lanes), "BE": lanes}


def group(ids, experts, rows, tiles):
    """As kernels.experts.group: order [tiles * rows], expert [tiles], int32."""
    ids, own = ids.contiguous(), sizes(experts)
    pairs, lanes = ids.numel(), own["BE"]
    blocks = triton.cdiv(pairs, own["BP"])
    order, expert, count, total = (
        torch.empty(n, dtype=torch.int32, device=ids.device) for n in (tiles * rows, tiles, blocks * lanes, lanes)
    )
    dealt = own | {"num_warps": 8}
    _count[(blocks,)](ids, count, order, expert, pairs, tiles * rows, tiles, experts, **dealt)
    _before[(lanes // LANES,)](count, total, blocks, BB=BLOCKS, BE=lanes, LANES=LANES, num_warps=8)
    _deal[(blocks,)](ids, count, total, order, expert, pairs, experts, BR=rows, **dealt)
    return order, expert


def specimens():
    """Compile specimens: Qwen3-30B-A3B, Kimi-K2, Mixtral."""
    tables = dict.fromkeys(("count_ptr", "total_ptr", "order_ptr", "expert_ptr", "before_ptr"), "*i32")
    types = tables | {"ids_ptr": "*i64"} | dict.fromkeys(("pairs", "places", "experts", "blocks", "tiles"), "i32")

    def case(kernel, constants):
        return kernel, {n: types[n] for n in kernel.arg_names if n in types}, constants, {"num_warps": 8}

    cases = []
    for experts in (128, 384, 8):
        own = sizes(experts)
        cases += [case(_count, own), case(_before, {"BB": BLOCKS, "BE": own["BE"], "LANES": LANES})]
        cases += [case(_deal, own | {"BR": rows}) for rows in (8, 32, 64, 128)]
    return cases
