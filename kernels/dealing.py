"""Pairs by expert where there are many of them: the tables of kernels.experts.group, made by many programs."""

import torch
import triton
import triton.language as tl

from .tile import up


@triton.jit
def _own(ids_ptr, at, pairs, experts, lane):
    """Whether each pair is each expert's [BP, BE] int32."""
    own = tl.load(ids_ptr + at, mask=at < pairs, other=-1).to(tl.int32)
    return ((own[:, None] == lane[None, :]) & (lane < experts)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["pairs", "places"])
def _count(ids_ptr, count_ptr, order_ptr, pairs, places, experts, BP: tl.constexpr, BE: tl.constexpr):
    """Program i: how many of its BP pairs each expert has, and -1 in its share of the places."""
    block, at, lane = tl.program_id(0), tl.arange(0, BP), tl.arange(0, BE)
    tl.store(count_ptr + block * BE + lane, tl.sum(_own(ids_ptr, block * BP + at, pairs, experts, lane), 0))
    share = (places + tl.num_programs(0) - 1) // tl.num_programs(0)
    for start in range(0, share, BP):
        place = block * share + start + at
        tl.store(order_ptr + place, tl.full([BP], -1, tl.int32), mask=(start + at < share) & (place < places))


@triton.jit(do_not_specialize=["blocks", "tiles"])
def _offsets(count_ptr, first_ptr, expert_ptr, blocks, tiles, BB: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr):
    """One program: counts [blocks, BE] become the pairs that lie before; first [BE]: each expert's first place; expert
    [tiles]: whose tile it is, -1 for none."""
    at, lane = tl.arange(0, BB), tl.arange(0, BE)
    total = tl.zeros([BE], tl.int32)
    for start in range(0, blocks, BB):
        place, inside = (start + at)[:, None] * BE + lane[None, :], (start + at < blocks)[:, None]
        count = tl.load(count_ptr + place, mask=inside, other=0)
        tl.store(count_ptr + place, tl.cumsum(count, 0) - count + total[None, :], mask=inside)
        total += tl.sum(count, 0)
    filled = (total + BR - 1) // BR
    end = tl.cumsum(filled, 0)
    tl.store(first_ptr + lane, (end - filled) * BR)
    for start in range(0, tiles, BB):
        tile = start + at
        expert = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(expert_ptr + tile, tl.where(tile < tl.max(end, 0), expert, -1), mask=tile < tiles)


@triton.jit(do_not_specialize=["pairs"])
def _deal(ids_ptr, before_ptr, first_ptr, order_ptr, pairs, experts, BP: tl.constexpr, BE: tl.constexpr):
    """Program i: its BP pairs to their places."""
    block, lane = tl.program_id(0), tl.arange(0, BE)
    pair = block * BP + tl.arange(0, BP)
    member = _own(ids_ptr, pair, pairs, experts, lane)
    base = tl.load(first_ptr + lane) + tl.load(before_ptr + block * BE + lane)
    place = tl.sum(member * (tl.cumsum(member, 0) - 1 + base[None, :]), 1)
    tl.store(order_ptr + place, pair, mask=tl.sum(member, 1) > 0)


def sizes(experts):
    """Launch sizes of the three kernels."""
    lanes = max(16, up(experts))
    return {"BP": max(16, 16384 // lanes), "BB": max(16, 8192 // lanes), "BE": lanes}


def group(ids, experts, rows, tiles):
    """As kernels.experts.group: order [tiles * rows], expert [tiles], int32."""
    ids, own = ids.contiguous(), sizes(experts)
    pairs, lanes = ids.numel(), own["BE"]
    blocks = triton.cdiv(pairs, own["BP"])
    order, expert, count, first = (
        torch.empty(n, dtype=torch.int32, device=ids.device) for n in (tiles * rows, tiles, blocks * lanes, lanes)
    )
    dealt = {"BP": own["BP"], "BE": lanes, "num_warps": 8}
    _count[(blocks,)](ids, count, order, pairs, tiles * rows, experts, **dealt)
    _offsets[(1,)](count, first, expert, blocks, tiles, BB=own["BB"], BE=lanes, BR=rows, num_warps=8)
    _deal[(blocks,)](ids, count, first, order, pairs, experts, **dealt)
    return order, expert


def specimens():
    """Compile specimens: Qwen3-30B-A3B, Kimi-K2, Mixtral."""
    tables = dict.fromkeys(("count_ptr", "first_ptr", "order_ptr", "expert_ptr", "before_ptr"), "*i32")
    types = tables | {"ids_ptr": "*i64"} | dict.fromkeys(("pairs", "places", "experts", "blocks", "tiles"), "i32")

    def case(kernel, constants):
        return kernel, {n: types[n] for n in kernel.arg_names if n in types}, constants, {"num_warps": 8}

    cases = []
    for experts in (128, 384, 8):
        own = sizes(experts)
        dealt = {"BP": own["BP"], "BE": own["BE"]}
        cases += [case(_count, dealt), case(_deal, dealt)]
        cases += [case(_offsets, {"BB": own["BB"], "BE": own["BE"], "BR": rows}) for rows in (8, 128)]
    return cases
