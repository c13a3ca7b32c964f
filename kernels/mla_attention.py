"""Latent attention over the paged cache: absorbed queries against rows of latent and rotated key, one read of a row for
all heads, then each head's values out of the latents' mean. The law of kernels.attention; so are the splits, the recent
stretch and the merge, so that a row's bits follow from its position alone (design.md, law 1).
"""

import torch
import triton
import triton.language as tl

from . import attention
from .splits import Sizes, keep_partial, last_of, merge_partials, online, path_key, slot_of, stretch
from .tile import groups, product, tile_of, up


def reference(q, plane, v_up, pages, prefix, tree, page_size, scale):
    """Attention of B*T query rows over their sequences' pages.

    Args:
        q: [B*T, H, R + turned] absorbed queries (kernels.mla); plane: [slots, 1, R + turned].
        v_up: [H, Dv, R] values of a head from a latent, a head's rows contiguous.
        pages, prefix, tree, scale: as kernels.attention.reference.

    Returns:
        [B*T, H*Dv] in q's dtype.
    """
    heads, _, latent = v_up.shape
    y = attention.reference(q, plane, plane[..., :latent], pages, prefix, tree, page_size, scale)
    y = torch.einsum("nhr,hvr->nhv", y.view(-1, heads, latent).float(), v_up.float())
    return y.flatten(1).to(q.dtype)


SIZES = {  # law 1's constants, as in kernels.attention: a latent row is four times as wide as a key of 128
    torch.bfloat16: Sizes(split=32, lanes=64, warps=8, stages=3),
    torch.float16: Sizes(split=32, lanes=64, warps=8, stages=3),
    torch.float32: Sizes(split=16, lanes=32, warps=4, stages=1),
}
TILE = 32  # (query, head) rows that share one read of the cache
MERGED = 128  # columns that a program merges


@triton.jit
def parts(row_ptr, at, inside, LATENT: tl.constexpr, TURNED: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr):
    """Latent [N, BL] and rotated part [N, BT] of the rows `at` [N] (cache rows, or queries), read once."""
    lane, lane_t = tl.arange(0, BL), tl.arange(0, BT)
    low = (at * (LATENT + TURNED))[:, None]
    # keys nobody sees are not read: they may hold noise or NaN, and 0 * NaN is NaN
    c = tl.load(row_ptr + low + lane[None, :], mask=inside[:, None] & (lane < LATENT)[None, :], other=0.0)
    turned = tl.load(
        row_ptr + low + LATENT + lane_t[None, :], mask=inside[:, None] & (lane_t < TURNED)[None, :], other=0.0
    )
    return c, turned


@triton.jit
def fold(
    q, q_turned, plane_ptr, slot, inside, seen, scale, top, norm, total, LATENT: tl.constexpr, TURNED: tl.constexpr,
    BL: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over rows `slot` [N]; a latent is key and value at once.

    q [M, BL], q_turned [M, BT]; the rest as kernels.attention has it.
    """
    c, turned = parts(plane_ptr, slot, inside, LATENT, TURNED, BL, BT)
    score = tl.dot(q_turned, tl.trans(turned), input_precision="ieee")
    score = tl.dot(q, tl.trans(c), score, input_precision="ieee") * scale
    return online(score, c, seen, top, norm, total)


@triton.jit
def _splits(
    q_ptr, plane_ptr, pages_ptr, prefix, tree_ptr, total_ptr, stat_ptr, line0, first, lane, t, rows, head0, heads,
    scale, PAGE: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr, TREE: tl.constexpr, SPLIT: tl.constexpr,
    LANES: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole splits lane, lane + LANES, … for BQ queries times BH heads: rows m = (query, head)."""
    m = tl.arange(0, BQ * BH)
    row, head = first + m // BH, head0 + m % BH
    live = (row < t) & (head < heads)
    line = line0 + row
    at = line * heads + head
    last = last_of(prefix, tree_ptr, line, row < t, row, TREE)
    edge = tl.where(live, stretch(last, SPLIT), 0)
    end = tl.max(edge, 0)
    if lane * SPLIT < end:
        q, q_turned = parts(q_ptr, at, live, LATENT, TURNED, BL, BT)
        top = tl.full([BQ * BH], float("-inf"), tl.float32)
        norm, total = tl.zeros([BQ * BH], tl.float32), tl.zeros([BQ * BH, BL], tl.float32)
        for s in tl.range(lane, end // SPLIT, LANES, num_stages=STAGES):
            key = s * SPLIT + tl.arange(0, SPLIT)
            inside = key < rows
            seen = live[:, None] & (key[None, :] < edge[:, None])
            slot = slot_of(pages_ptr, key, inside, PAGE)
            top, norm, total = fold(
                q, q_turned, plane_ptr, slot, inside, seen, scale, top, norm, total, LATENT, TURNED, BL, BT
            )
        wanted = live & (lane * SPLIT < edge)
        keep_partial(total_ptr, stat_ptr, at * (LANES + 1) + lane, wanted, top, norm, total, LATENT, BL)


@triton.jit
def _recent(
    q_ptr, plane_ptr, pages_ptr, prefix, tree_ptr, total_ptr, stat_ptr, line, row, rows, head0, heads,
    scale, PAGE: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr, TREE: tl.constexpr, SPLIT: tl.constexpr,
    LANES: tl.constexpr, RECENT: tl.constexpr, BH: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The recent stretch of one query's BH heads, gathered in position order."""
    own, bit = tl.arange(0, RECENT), tl.arange(0, 64)
    at, live = line * heads + head0 + own, (own < BH) & (head0 + own < heads)
    last = last_of(prefix, tree_ptr, line, True, row, TREE)
    if TREE:
        member = ((tl.load(tree_ptr + line) >> bit.to(tl.int64)) & 1) == 1
        rank = tl.cumsum(member.to(tl.int32), 0) - 1
    q, q_turned = parts(q_ptr, at, live, LATENT, TURNED, BL, BT)
    top = tl.full([RECENT], float("-inf"), tl.float32)
    norm, total = tl.zeros([RECENT], tl.float32), tl.zeros([RECENT, BL], tl.float32)
    for start in range(stretch(last, SPLIT), last + 1, SPLIT):
        position = start + tl.arange(0, SPLIT)
        key = position
        if TREE:
            key = path_key(position, prefix, member, rank, bit)
        inside = (position <= last) & (key < rows)
        slot = slot_of(pages_ptr, key, inside, PAGE)
        top, norm, total = fold(
            q, q_turned, plane_ptr, slot, inside, live[:, None] & inside[None, :], scale, top, norm, total,
            LATENT, TURNED, BL, BT,
        )  # fmt: skip
    keep_partial(total_ptr, stat_ptr, at * (LANES + 1) + LANES, live, top, norm, total, LATENT, BL)


@triton.jit(do_not_specialize=["t", "columns", "table"])
def _partials(
    q_ptr, plane_ptr, pages_ptr, prefix_ptr, tree_ptr, total_ptr, stat_ptr, t, columns, table, heads, scale,
    PAGE: tl.constexpr, LATENT: tl.constexpr, TURNED: tl.constexpr, TREE: tl.constexpr, SPLIT: tl.constexpr,
    LANES: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr, RECENT: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (x, h, s): x < BQ folds the recent stretch of query x of tile s (BQ queries) for block h of BH heads,
    x = BQ + i the tile's splits of lane i. Each writes one partial. table: from one row of pages to the next."""
    lane, head0, tiles = tl.program_id(0) - BQ, tl.program_id(1) * BH, tl.cdiv(t, BQ)
    b, first = tl.program_id(2) // tiles, tl.program_id(2) % tiles * BQ
    prefix = tl.load(prefix_ptr + b).to(tl.int32)  # positions fit 32 bits, slots and elements need 64
    pages_ptr += b.to(tl.int64) * table
    line0 = b.to(tl.int64) * t
    if lane >= 0:
        _splits(
            q_ptr, plane_ptr, pages_ptr, prefix, tree_ptr, total_ptr, stat_ptr, line0, first, lane, t, columns * PAGE,
            head0, heads, scale, PAGE, LATENT, TURNED, TREE, SPLIT, LANES, BQ, BH, BL, BT, STAGES,
        )  # fmt: skip
    else:
        row = first + lane + BQ
        if row < t:
            _recent(
                q_ptr, plane_ptr, pages_ptr, prefix, tree_ptr, total_ptr, stat_ptr, line0 + row, row, columns * PAGE,
                head0, heads, scale, PAGE, LATENT, TURNED, TREE, SPLIT, LANES, RECENT, BH, BL, BT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _values(
    x_ptr, up_ptr, y_ptr, rows, heads, outputs, up_head, columns,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (o, h, r): BO values of head h of row tile r from its mean latent x [rows, heads, columns]."""
    head, row = tl.program_id(1), tl.program_id(2) * BR + tl.arange(0, BR)
    out = tl.program_id(0) * BO + tl.arange(0, BO)
    ok, live, line = out < outputs, row < rows, row.to(tl.int64) * heads + head
    y = product(
        x_ptr, line * columns, live, line, x_ptr, up_ptr + head.to(tl.int64) * up_head, out, ok, columns,
        False, BO, SPLIT, BK, BR, STAGES,
    )  # fmt: skip
    place = y_ptr + line[None, :] * outputs + out[:, None]
    tl.store(place, y.to(y_ptr.dtype.element_ty), mask=ok[:, None] & live[None, :])


def values(x, v_up):
    """Mean latents [N, H*R] -> [N, H*Dv]."""
    heads, outputs, latent = v_up.shape
    y, tile = x.new_empty(x.shape[0], heads * outputs), tile_of(x.dtype, latent)
    _values[(triton.cdiv(outputs, tile.outputs), heads, groups(x.shape[0]))](
        x, v_up, y, x.shape[0], heads, outputs, v_up.stride(0), latent, **tile.constants, **tile.options
    )
    return y


def _constants(dtype, heads, latent, turned, page_size, tree):
    """Compile-time arguments of `_partials`, launch options: a function of the model."""
    sizes = SIZES[dtype]
    tile = TILE // 2 if dtype == torch.float32 else TILE
    block = min(tile, up(heads))
    constants = {
        "PAGE": page_size, "LATENT": latent, "TURNED": turned, "TREE": tree, "SPLIT": sizes.split,
        "LANES": sizes.lanes, "BQ": tile // block, "BH": block, "RECENT": max(16, block), "BL": max(16, up(latent)),
        "BT": max(16, up(turned)), "STAGES": sizes.stages,
    }  # fmt: skip
    return constants, {"num_warps": sizes.warps, "num_stages": sizes.stages}


def fused(q, plane, v_up, pages, prefix, tree, page_size, scale):
    """The twin of `reference`: partials over splits and recent stretches, their merge, values of each head."""
    rows, heads, width = q.shape
    latent, b, t = v_up.shape[2], pages.shape[0], rows // pages.shape[0]
    constants, options = _constants(q.dtype, heads, latent, width - latent, page_size, tree is not None)
    split, lanes, tile, block = (constants[n] for n in ("SPLIT", "LANES", "BQ", "BH"))
    reached = min(lanes, -(-pages.shape[1] * page_size // split))  # lanes that may have a key at all
    totals = torch.empty(rows, heads, lanes + 1, latent, dtype=torch.float32, device=q.device)
    stats = torch.empty(rows, heads, lanes + 1, 2, dtype=torch.float32, device=q.device)
    y = q.new_empty(rows, heads * latent)
    tree = None if tree is None else tree.contiguous()
    _partials[(tile + reached, triton.cdiv(heads, block), b * triton.cdiv(t, tile))](
        q.contiguous(), plane, pages, prefix, tree, totals, stats, t, pages.shape[1], pages.stride(0), heads,
        scale * 1.4426950408889634, **constants, **options,
    )  # fmt: skip
    merged = min(MERGED, constants["BL"])
    merge_partials[(rows, heads, triton.cdiv(latent, merged))](
        totals, stats, prefix, tree, None, y, t, heads, latent, tree is not None, False, split, lanes, merged,
        num_warps=4,
    )  # fmt: skip
    return values(y, v_up)


def specimens():
    """Compile specimens: a rank's 8 and all 64 heads of Kimi-K2, and a toy; decode trees and causal passes."""
    cases = []
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for heads, latent, turned in ((8, 512, 64), (64, 512, 64), (3, 40, 8)):
            for tree in (True, False):
                constants, options = _constants(dtype, heads, latent, turned, 16, tree)
                types = {"q_ptr": name, "plane_ptr": name, "pages_ptr": "*i32", "prefix_ptr": "*i64"}
                types |= {"tree_ptr": "*i64", "total_ptr": "*fp32", "stat_ptr": "*fp32", "scale": "fp32"}
                types |= dict.fromkeys(("t", "columns", "table", "heads"), "i32")
                cases.append((_partials, types, constants, options))
            merged = {n: constants[n] for n in ("SPLIT", "LANES")} | {"DV": latent, "TREE": True, "SINKS": False}
            merged["BV"] = min(MERGED, constants["BL"])
            types = {"total_ptr": "*fp32", "stat_ptr": "*fp32", "prefix_ptr": "*i64", "tree_ptr": "*i64"}
            types |= {"sinks_ptr": name, "y_ptr": name, "t": "i32", "heads": "i32"}
            cases.append((merge_partials, types, merged, {"num_warps": 4}))
        tile = tile_of(dtype, 512)
        types = dict.fromkeys(("x_ptr", "up_ptr", "y_ptr"), name)
        types |= dict.fromkeys(("rows", "heads", "outputs", "up_head", "columns"), "i32")
        cases.append((_values, types, tile.constants, tile.options))
    return cases
