"""Paged attention under the one law: committed keys, then the keys named by an ancestor bitset.

Query i sees the committed rows [0, prefix) and, past them, row prefix + j for every set bit j of tree[i]; without a
bitset row i of the pass sees prefix + 0 .. prefix + i. The i-th set bit of a query is the key at position prefix + i,
so the query's own position is prefix + popcount - 1.
"""

import torch
import triton
import triton.language as tl

from .cache_write import slots
from .splits import Sizes, keep_partial, last_of, merge_partials, online, path_key, slot_of, stretch
from .tile import up


def causal_bits(t, device):
    """Bitsets of a causal pass over t <= 64 rows: row i holds bits 0..i (as int64; bit 63 is the sign)."""
    one = torch.ones(t, dtype=torch.int64, device=device)
    return torch.cumsum(one << torch.arange(t, device=device), 0)


def visible(prefix, tree, rows, t):
    """Which logical rows each query sees, and each seen row's position.

    Args:
        prefix: [B]; tree: [B, T] int64 or None; rows: L, the logical rows considered; t: T.

    Returns:
        seen [B, T, L] bool, position [B, T, L] int64 (valid where seen).
    """
    device, col = prefix.device, torch.arange(rows, device=prefix.device)
    rel = col[None] - prefix[:, None]  # B L
    if tree is None:
        seen = rel[:, None] <= torch.arange(t, device=device)[None, :, None]
        return seen, col.expand_as(seen)
    bit = (tree[:, :, None] >> rel[:, None].clamp(0, 63)) & 1
    path = (rel[:, None] >= 0) & (rel[:, None] < 64) & (bit == 1)
    depth = path.long().cumsum(-1) - 1  # rank of the bit among the query's set bits
    return path | (rel[:, None] < 0), torch.where(path, prefix[:, None, None] + depth, col)


def reference(q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window=None, sinks=None):
    """Attention of B*T query rows over their sequences' pages.

    Args:
        q: [B*T, H, Dh]; k_plane [slots, G, Dh], v_plane [slots, G, Dv]; H a multiple of G.
        pages: [B, NP] int32; prefix: [B] int64 committed rows; tree: [B, T] int64 ancestor bits or None (causal).
        scale: softmax scale; window: keys at position > own - window are seen (None: all);
        sinks: [H] logits that join the softmax's denominator only, or None.

    Returns:
        [B*T, H*Dv] in q's dtype.
    """
    b, rows = pages.shape[0], pages.shape[1] * page_size
    t, (h, g) = q.shape[0] // b, (q.shape[1], k_plane.shape[1])
    index = torch.arange(rows, device=q.device).expand(b, rows)
    slot = slots(index, pages, page_size)
    k, v = k_plane[slot].float(), v_plane[slot].float()  # B L G D
    seen, position = visible(prefix, tree, rows, t)
    if window is not None:
        own = torch.where(seen, position, -1).amax(-1, keepdim=True)
        seen = seen & (position > own - window)
    query = q.float().view(b, t, g, h // g, -1)
    scores = torch.einsum("btgrd,blgd->bgrtl", query, k) * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(1, g, h // g, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    # a row may hold NaN, and 0 * NaN is NaN: only the queries that see the row may get it
    sound = v.isfinite()
    y = torch.einsum("bgrtl,blgd->btgrd", weights, v.where(sound, 0))
    broken = (seen & ~sound.all(-1).all(-1)[:, None]).any(-1)  # B T
    return y.reshape(b, t, -1).masked_fill(broken[..., None], float("nan")).view(b * t, -1).to(q.dtype)


SIZES = {
    torch.bfloat16: Sizes(split=64, lanes=32, warps=4, stages=3),
    torch.float16: Sizes(split=64, lanes=32, warps=4, stages=3),
    torch.float32: Sizes(split=16, lanes=32, warps=4, stages=1),
}


@triton.jit
def _fold(q, k_ptr, v_ptr, slot, inside, seen, scale, top, norm, total, head, groups, DK, DV,
          BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One step of the online softmax (base 2): rows that see none of these keys keep their state to the bit.

    q [M, BK]; slot, inside [N]; seen [M, N]; top, norm [M] running maximum and sum; total [M, BV].
    """
    lane_k, lane_v = tl.arange(0, BK), tl.arange(0, BV)
    low = (slot * groups + head)[:, None]
    # keys nobody sees are not read: they may hold noise or NaN, and 0 * NaN is NaN
    k = tl.load(k_ptr + low * DK + lane_k[None, :], mask=inside[:, None] & (lane_k < DK)[None, :], other=0.0)
    v = tl.load(v_ptr + low * DV + lane_v[None, :], mask=inside[:, None] & (lane_v < DV)[None, :], other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return online(score, v, seen, top, norm, total)


@triton.jit
def _splits(
    q_ptr, k_ptr, v_ptr, pages_ptr, prefix, tree_ptr, total_ptr, stat_ptr, line0, first, lane, t, rows, head, groups,
    scale, window, PAGE: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole splits lane, lane + LANES, … for BT queries times R heads: rows m = (query, head)."""
    m, lane_k = tl.arange(0, BT * BR), tl.arange(0, BK)
    row, own = first + m // BR, m % BR
    live = (row < t) & (own < R)
    line = line0 + row
    at = line * (groups * R) + head * R + own
    last = last_of(prefix, tree_ptr, line, row < t, row, TREE)
    edge = tl.where(live, stretch(last, SPLIT), 0)
    end, begin = tl.max(edge, 0), prefix * 0
    if WINDOW:
        begin = tl.maximum(tl.min(tl.where(live, last, 1 << 30), 0) - window + 1, 0) // SPLIT
    begin += (lane - begin % LANES + LANES) % LANES  # lanes are absolute: split s belongs to lane s % LANES
    if lane * SPLIT < end:
        q = tl.load(q_ptr + at[:, None] * DK + lane_k[None, :], mask=live[:, None] & (lane_k < DK)[None, :], other=0.0)
        top = tl.full([BT * BR], float("-inf"), tl.float32)
        norm, total = tl.zeros([BT * BR], tl.float32), tl.zeros([BT * BR, BV], tl.float32)
        for s in tl.range(begin, end // SPLIT, LANES, num_stages=STAGES):
            key = s * SPLIT + tl.arange(0, SPLIT)
            inside = key < rows
            seen = live[:, None] & (key[None, :] < edge[:, None])
            if WINDOW:
                seen = seen & (key[None, :] > last[:, None] - window)
            slot = slot_of(pages_ptr, key, inside, PAGE)
            top, norm, total = _fold(
                q, k_ptr, v_ptr, slot, inside, seen, scale, top, norm, total, head, groups, DK, DV, BK, BV
            )
        wanted = live & (lane * SPLIT < edge)
        keep_partial(total_ptr, stat_ptr, at * (LANES + 1) + lane, wanted, top, norm, total, DV, BV)


@triton.jit
def _recent(
    q_ptr, k_ptr, v_ptr, pages_ptr, prefix, tree_ptr, total_ptr, stat_ptr, line, row, rows, head, groups,
    scale, window, PAGE: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, RECENT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The recent stretch of one query's R heads, gathered in position order."""
    own, lane_k, bit = tl.arange(0, RECENT), tl.arange(0, BK), tl.arange(0, 64)
    at, live = line * (groups * R) + head * R + own, own < R
    last = last_of(prefix, tree_ptr, line, True, row, TREE)
    if TREE:
        member = ((tl.load(tree_ptr + line) >> bit.to(tl.int64)) & 1) == 1
        rank = tl.cumsum(member.to(tl.int32), 0) - 1
    q = tl.load(q_ptr + at[:, None] * DK + lane_k[None, :], mask=live[:, None] & (lane_k < DK)[None, :], other=0.0)
    top = tl.full([RECENT], float("-inf"), tl.float32)
    norm, total = tl.zeros([RECENT], tl.float32), tl.zeros([RECENT, BV], tl.float32)
    for start in range(stretch(last, SPLIT), last + 1, SPLIT):
        position = start + tl.arange(0, SPLIT)
        key = position
        if TREE:
            key = path_key(position, prefix, member, rank, bit)
        inside = (position <= last) & (key < rows)
        seen = live[:, None] & inside[None, :]
        if WINDOW:
            seen = seen & (position > last - window)[None, :]
        slot = slot_of(pages_ptr, key, inside, PAGE)
        top, norm, total = _fold(
            q, k_ptr, v_ptr, slot, inside, seen, scale, top, norm, total, head, groups, DK, DV, BK, BV
        )
    keep_partial(total_ptr, stat_ptr, at * (LANES + 1) + LANES, live, top, norm, total, DV, BV)


@triton.jit(do_not_specialize=["t", "columns", "table"])
def _partials(
    q_ptr, k_ptr, v_ptr, pages_ptr, prefix_ptr, tree_ptr, total_ptr, stat_ptr, t, columns, table, groups, scale, window,
    PAGE: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, LANES: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, RECENT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (x, g, s): x < BT folds the recent stretch of query x of tile s (BT queries) for the heads of group g,
    x = BT + i the tile's splits of lane i. Each writes one partial. table: from one row of pages to the next."""
    lane, head, tiles = tl.program_id(0) - BT, tl.program_id(1), tl.cdiv(t, BT)
    b, first = tl.program_id(2) // tiles, tl.program_id(2) % tiles * BT
    prefix = tl.load(prefix_ptr + b).to(tl.int32)  # positions fit 32 bits, slots and elements need 64
    pages_ptr += b.to(tl.int64) * table
    line0 = b.to(tl.int64) * t
    if lane >= 0:
        _splits(
            q_ptr, k_ptr, v_ptr, pages_ptr, prefix, tree_ptr, total_ptr, stat_ptr, line0, first, lane, t,
            columns * PAGE, head, groups, scale, window,
            PAGE, R, DK, DV, TREE, WINDOW, SPLIT, LANES, BT, BR, BK, BV, STAGES,
        )  # fmt: skip
    else:
        row = first + lane + BT
        if row < t:
            _recent(
                q_ptr, k_ptr, v_ptr, pages_ptr, prefix, tree_ptr, total_ptr, stat_ptr, line0 + row, row,
                columns * PAGE, head, groups, scale, window,
                PAGE, R, DK, DV, TREE, WINDOW, SPLIT, LANES, RECENT, BK, BV,
            )  # fmt: skip


def _constants(dtype, heads, groups, width_k, width_v, page_size, tree, window):
    """Compile-time arguments of `_partials`, launch options."""
    sizes, ratio = SIZES[dtype], heads // groups
    padded = up(ratio)
    constants = {
        "PAGE": page_size, "R": ratio, "DK": width_k, "DV": width_v, "TREE": tree, "WINDOW": window,
        "SPLIT": sizes.split, "LANES": sizes.lanes, "BT": max(1, 16 // padded), "BR": padded,
        "RECENT": max(16, padded), "BK": max(16, up(width_k)), "BV": max(16, up(width_v)), "STAGES": sizes.stages,
    }  # fmt: skip
    return constants, {"num_warps": sizes.warps, "num_stages": sizes.stages}


def fused(q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window=None, sinks=None):
    """The twin of `reference`: whole splits of keys shared by the queries of a tile, the recent stretch by itself.

    A query at position p sees [0, E(p)) in splits and [E(p), p] gathered in position order: committed rows, then path
    nodes. All of that follows from p alone, so a row's bits do not depend on what rides along (design.md, law 1).
    """
    (rows, heads, width_k), (groups, width_v), b = q.shape, v_plane.shape[1:], pages.shape[0]
    t = rows // b
    constants, options = _constants(
        q.dtype, heads, groups, width_k, width_v, page_size, tree is not None, window is not None
    )
    lanes, tile = constants["LANES"], constants["BT"]
    reached = min(lanes, -(-pages.shape[1] * page_size // constants["SPLIT"]))  # lanes that may have a key at all
    totals = torch.empty(rows, heads, lanes + 1, width_v, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, heads, lanes + 1, 2, dtype=torch.float32, device=q.device)
    y = q.new_empty(rows, heads * width_v)
    tree = None if tree is None else tree.contiguous()
    _partials[(tile + reached, groups, b * triton.cdiv(t, tile))](
        q.contiguous(), k_plane, v_plane, pages, prefix, tree, totals, stats,
        t, pages.shape[1], pages.stride(0), groups, scale * 1.4426950408889634, window or 0, **constants, **options,
    )  # fmt: skip
    merge_partials[(rows, heads)](
        totals, stats, prefix, tree, sinks, y, t, heads, width_v, tree is not None, sinks is not None,
        constants["SPLIT"], lanes, constants["BV"], num_warps=4,
    )  # fmt: skip
    return y


def specimens():
    """Compile specimens: Qwen3-30B-A3B and the demo pair, decode trees and causal passes, windows and sinks."""
    cases = []
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for heads, groups, width in ((32, 4, 128), (4, 2, 64), (6, 2, 80)):
            for tree, window in ((True, False), (False, True)):
                constants, options = _constants(dtype, heads, groups, width, width, 16, tree, window)
                types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), name) | {"total_ptr": "*fp32", "stat_ptr": "*fp32"}
                types |= {"pages_ptr": "*i32", "prefix_ptr": "*i64", "tree_ptr": "*i64", "scale": "fp32"}
                types |= dict.fromkeys(("t", "columns", "table", "groups", "window"), "i32")
                cases.append((_partials, types, constants, options))
                types = {"total_ptr": "*fp32", "stat_ptr": "*fp32", "prefix_ptr": "*i64", "tree_ptr": "*i64"}
                types |= {"sinks_ptr": name, "y_ptr": name, "t": "i32", "heads": "i32"}
                merge = {n: constants[n] for n in ("DV", "TREE", "SPLIT", "LANES", "BV")} | {"SINKS": window}
                cases.append((merge_partials, types, merge, {"num_warps": 4}))
    return cases
