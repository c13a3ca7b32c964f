"""The law of kernels.attention in Triton, as its kernels share it: which keys a query sees, one step of the running
softmax, and the partials of splits and their merge. A row's bits follow from its position alone (design.md, law 1).
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Sizes:
    """Law 1's constants of attention, by dtype: they may not follow the batch, the rows or the sequence's length.

    split: keys a whole split has; lanes: programs that splits are dealt to in turn; warps, stages: of a program.
    """

    split: int
    lanes: int
    warps: int
    stages: int


DEEPEST = tl.constexpr(63)  # a tree of 64 nodes is no deeper: keys this far before a query are committed


@triton.jit
def last_of(prefix, tree_ptr, at, inside, row, TREE: tl.constexpr):
    """Positions of the queries `at` (any shape): prefix + popcount(bits) - 1, or prefix + row without bitsets."""
    if TREE:
        x = tl.load(tree_ptr + at, mask=inside, other=1)
        x = x - ((x >> 1) & 0x5555555555555555)
        x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
        x = x + (x >> 8)
        x = x + (x >> 16)
        x = x + (x >> 32)
        row = (x & 127).to(tl.int32) - 1
    return prefix + row


@triton.jit
def stretch(last, SPLIT: tl.constexpr):
    """E: where the recent stretch of a query at position `last` begins, a multiple of SPLIT at least 63 keys before."""
    return tl.where(last > DEEPEST, (last - DEEPEST) // SPLIT * SPLIT, 0)


@triton.jit
def slot_of(pages_ptr, row, inside, PAGE: tl.constexpr):
    """Slots (int64) of logical rows; pages_ptr: the sequence's row of the table. Rows outside are slot 0."""
    page = tl.load(pages_ptr + row // PAGE, mask=inside, other=0).to(tl.int64)
    return page * PAGE + tl.where(inside, row % PAGE, 0)


@triton.jit
def path_key(position, prefix, member, rank, bit):
    """Logical rows [N] of a query's keys in position order: the i-th past the prefix is the row of its i-th set bit.

    bit: [64] node numbers; member: whether the bit is set; rank: set bits before it.
    """
    past = (position - prefix)[:, None]
    node = tl.sum(tl.where((rank[None, :] == past) & member[None, :], bit[None, :], 0), 1)
    return tl.where(position < prefix, position, prefix + node)


@triton.jit
def online(score, v, seen, top, norm, total):
    """Scores [M, N] and values [N, BV] of one step into the running maximum and sum [M] and total [M, BV]."""
    score = tl.where(seen, score, float("-inf"))
    high = tl.maximum(top, tl.max(score, 1))
    base = tl.where(high == float("-inf"), 0.0, high)
    weight, keep = tl.math.exp2(score - base[:, None]), tl.math.exp2(top - base)
    any_seen = tl.max(seen.to(tl.int32), 1) > 0
    added = tl.dot(weight.to(v.dtype), v, total * keep[:, None], input_precision="ieee")
    norm = tl.where(any_seen, norm * keep + tl.sum(weight, 1), norm)
    return tl.where(any_seen, high, top), norm, tl.where(any_seen[:, None], added, total)


@triton.jit
def keep_partial(total_ptr, stat_ptr, part, wanted, top, norm, total, DV: tl.constexpr, BV: tl.constexpr):
    """Write the partials `part` [M] where wanted."""
    lane_v = tl.arange(0, BV)
    tl.store(total_ptr + part[:, None] * DV + lane_v[None, :], total, mask=wanted[:, None] & (lane_v < DV)[None, :])
    tl.store(stat_ptr + part * 2, top, mask=wanted)
    tl.store(stat_ptr + part * 2 + 1, norm, mask=wanted)


@triton.jit(do_not_specialize=["t"])
def merge_partials(
    total_ptr, stat_ptr, prefix_ptr, tree_ptr, sinks_ptr, y_ptr, t, heads, DV: tl.constexpr,
    TREE: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program (row, head, v): BV columns of the lanes' partials by one fixed tree, the recent stretch last, a sink in
    the sum."""
    row, head = tl.program_id(0), tl.program_id(1)
    last = last_of(tl.load(prefix_ptr + row // t).to(tl.int32), tree_ptr, row, True, row % t, TREE)
    edge = stretch(last, SPLIT)
    lane, lane_v = tl.arange(0, LANES), tl.program_id(2) * BV + tl.arange(0, BV)
    part = (row.to(tl.int64) * heads + head) * (LANES + 1)
    used, wide = lane * SPLIT < edge, lane_v < DV
    tops = tl.load(stat_ptr + (part + lane) * 2, mask=used, other=float("-inf"))
    used = used & (tops != float("-inf"))  # a window may leave a lane without a key
    norms = tl.load(stat_ptr + (part + lane) * 2 + 1, mask=used, other=0.0)
    totals = tl.load(
        total_ptr + (part + lane)[:, None] * DV + lane_v[None, :], mask=used[:, None] & wide[None, :], other=0.0
    )
    recent_top, recent_norm = tl.load(stat_ptr + (part + LANES) * 2), tl.load(stat_ptr + (part + LANES) * 2 + 1)
    recent = tl.load(total_ptr + (part + LANES) * DV + lane_v, mask=wide, other=0.0)
    high = tl.maximum(tl.max(tops, 0), recent_top)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        high = tl.maximum(high, sink)
    high = tl.where(high == float("-inf"), 0.0, high)
    weight, recent_weight = tl.math.exp2(tops - high), tl.math.exp2(recent_top - high)
    norm = tl.sum(norms * weight, 0) + recent_norm * recent_weight
    total = tl.sum(totals * weight[:, None], 0) + recent * recent_weight
    if SINKS:
        norm += tl.math.exp2(sink - high)
    y = total / norm
    tl.store(y_ptr + (row.to(tl.int64) * heads + head) * DV + lane_v, y.to(y_ptr.dtype.element_ty), mask=wide)
