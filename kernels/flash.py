"""Causal attention of many rows over paged keys: what passes over a prompt take for kernels.attention."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .splits import slot_of
from .tile import up


@triton.jit
def _page(pages_ptr, start, columns, PAGE: tl.constexpr):
    """Number of the page that holds logical row `start`. Asked for a block ahead: the addresses of keys hang on it."""
    return tl.load(pages_ptr + tl.minimum(start // PAGE, columns - 1))


@triton.jit
def _slots(pages_ptr, page, start, inside, PAGE: tl.constexpr, BN: tl.constexpr):
    """Slots [BN] of logical rows start + 0 …, a multiple of BN, which lie in `page` where BN divides a page."""
    if PAGE % BN == 0:
        return page.to(tl.int64) * PAGE + start % PAGE + tl.arange(0, BN)
    return slot_of(pages_ptr, start + tl.arange(0, BN), inside, PAGE)


@triton.jit
def _fold(q, k, v, seen, scale, top, sum_, total, MASKED: tl.constexpr):
    """Fold a block of keys into the rows' running softmax. One expression for blocks with a mask and without: which of
    them a row has depends on its tile."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    high = tl.maximum(top, tl.max(score, 1) * scale)
    base = tl.where(high == float("-inf"), 0.0, high)
    weight, keep = tl.math.exp2(score * scale - base[:, None]), tl.math.exp2(top - base)
    total = tl.dot(weight.to(v.dtype), v, total * keep[:, None], input_precision="ieee")
    return high, sum_ * keep + tl.sum(weight, 1), total


@triton.jit(do_not_specialize=["t", "columns", "table"])
def _flash(
    q_ptr, k_ptr, v_ptr, k_tiles, v_tiles, pages_ptr, prefix_ptr, sinks_ptr, y_ptr,
    t, columns, table, groups, scale, window, PAGE: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, TILES: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Program (s, g, b): BT queries of sequence b and their R heads of group g over all keys up to their own; tiles
    with the most keys begin first. TILES: k_tiles and v_tiles describe the planes [slots, groups * width], of which one
    block of BN keys is one copy; the last blocks go by k_ptr and v_ptr, since rows past the keys may hold anything."""
    head, b, m = tl.program_id(1), tl.program_id(2), tl.arange(0, BT * BR)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * BT
    row, own = tile + m // BR, m % BR
    live, lane_k, lane_v = (row < t) & (own < R), tl.arange(0, BK), tl.arange(0, BV)
    prefix = tl.load(prefix_ptr + b).to(tl.int32)
    last = prefix + row
    at = (b.to(tl.int64) * t + row) * (groups * R) + head * R + own
    q = tl.load(q_ptr + at[:, None] * DK + lane_k[None, :], mask=live[:, None] & (lane_k < DK)[None, :], other=0.0)
    end = tl.minimum(tl.minimum(prefix + t, prefix + tile + BT), columns * PAGE)
    begin = prefix * 0
    plain = tl.minimum(prefix + tile + 1, end) // BN * BN  # before it are blocks that all rows see whole
    if WINDOW:
        begin = tl.maximum(prefix + tile - window + 1, 0) // BN * BN
        plain = begin
    pages_ptr += b.to(tl.int64) * table
    top, sum_ = tl.full([BT * BR], float("-inf"), tl.float32), tl.zeros([BT * BR], tl.float32)
    total, page = tl.zeros([BT * BR, BV], tl.float32), _page(pages_ptr, begin, columns, PAGE)
    for start in range(begin, plain, BN):
        if TILES:
            low = page * PAGE + start % PAGE
            k, v = k_tiles.load([low, head * DK]), v_tiles.load([low, head * DV])
        else:
            inside = start + tl.arange(0, BN) < end
            low = (_slots(pages_ptr, page, start, inside, PAGE, BN) * groups + head)[:, None]
            k = tl.load(k_ptr + low * DK + lane_k[None, :], mask=(lane_k < DK)[None, :], other=0.0)
            v = tl.load(v_ptr + low * DV + lane_v[None, :], mask=(lane_v < DV)[None, :], other=0.0)
        page = _page(pages_ptr, start + BN, columns, PAGE)
        top, sum_, total = _fold(q, k, v, live, scale, top, sum_, total, False)
    for start in tl.range(plain, end, BN, num_stages=LAST):
        key = start + tl.arange(0, BN)
        inside = key < end
        low = (_slots(pages_ptr, page, start, inside, PAGE, BN) * groups + head)[:, None]
        k = tl.load(k_ptr + low * DK + lane_k[None, :], mask=inside[:, None] & (lane_k < DK)[None, :], other=0.0)
        v = tl.load(v_ptr + low * DV + lane_v[None, :], mask=inside[:, None] & (lane_v < DV)[None, :], other=0.0)
        page = _page(pages_ptr, start + BN, columns, PAGE)
        seen = live[:, None] & (key[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > last[:, None] - window)
        top, sum_, total = _fold(q, k, v, seen, scale, top, sum_, total, True)
    if SINKS:
        sink = tl.load(sinks_ptr + head * R + own, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        high = tl.maximum(top, sink)
        keep = tl.math.exp2(top - high)
        sum_, total = sum_ * keep + tl.math.exp2(sink - high), total * keep[:, None]
    y = (total / sum_[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at[:, None] * DV + lane_v[None, :], y, mask=live[:, None] & (lane_v < DV)[None, :])


def sizes(dtype, ratio, width_k, width_v):
    """Constants and launch options: 64 (query, head) rows a program, of which a multiprocessor runs two, one in its
    products while the other is in its softmax; one of 128 rows where heads are wide; 16 rows in fp32. LAST: blocks in
    flight among the last ones, so few that both programs fit."""
    padded, narrow, wide = up(ratio), dtype == torch.float32, max(width_k, width_v) > 128
    rows, warps, stages = (16, 4, 1) if narrow else (128, 8, 2) if wide else (64, 4, 3)
    constants = {"R": ratio, "DK": width_k, "DV": width_v, "BT": max(1, rows // padded), "BR": padded}
    constants |= {"BN": min(rows, 64), "BK": max(16, up(width_k)), "BV": max(16, up(width_v)), "LAST": min(stages, 2)}
    return constants, {"num_warps": warps, "num_stages": stages}


def tiled(dtype, page_size, constants):
    """Whether a block of keys is a tile that hardware copies (TMA): in one page, and no lane of it masked."""
    whole = constants["DK"] == constants["BK"] and constants["DV"] == constants["BV"]
    return dtype != torch.float32 and whole and page_size % constants["BN"] == 0


def attention(q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window=None, sinks=None):
    """As kernels.attention.reference, of a causal pass. Raises ValueError for a tree."""
    if tree is not None:
        raise ValueError("prefill attention is causal; a tree takes kernels.attention.fused")
    (rows, heads, width_k), (groups, width_v), b = q.shape, v_plane.shape[1:], pages.shape[0]
    constants, options = sizes(q.dtype, heads // groups, width_k, width_v)
    tiles, described = window is None and tiled(q.dtype, page_size, constants), (None, None)
    if tiles:
        planes = k_plane.flatten(1), v_plane.flatten(1)
        described = [TensorDescriptor.from_tensor(x, [constants["BN"], x.shape[1] // groups]) for x in planes]
    t, y = rows // b, q.new_empty(rows, heads * width_v)
    _flash[(triton.cdiv(t, constants["BT"]), groups, b)](
        q.contiguous(), k_plane, v_plane, *described, pages, prefix, sinks, y, t, pages.shape[1], pages.stride(0),
        groups, scale * 1.4426950408889634, window or 0, PAGE=page_size, WINDOW=window is not None,
        SINKS=sinks is not None, TILES=tiles, **constants, **options,
    )  # fmt: skip
    return y


def specimens():
    """Compile specimens: Qwen3-30B-A3B, gpt-oss, the latter's other layers, an odd one; pages of one block of keys and
    of less."""
    cases = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for ratio, width, window, sinks, page in (
            (8, 128, False, False, 64),
            (8, 64, True, True, 64),
            (8, 64, False, True, 64),
            (4, 256, False, False, 64),
            (3, 80, False, False, 16),
        ):
            constants, options = sizes(dtype, ratio, width, width)
            types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "sinks_ptr", "y_ptr"), f"*{name}")
            types |= {"pages_ptr": "*i32", "prefix_ptr": "*i64", "scale": "fp32"}
            types |= dict.fromkeys(("t", "columns", "table", "groups", "window"), "i32")
            tiles = not window and tiled(dtype, page, constants)
            if tiles:
                types |= dict.fromkeys(("k_tiles", "v_tiles"), f"tensordesc<{name}[{constants['BN']}, {width}]>")
            else:
                constants |= {"k_tiles": None, "v_tiles": None}
            given = {"PAGE": page, "WINDOW": window, "SINKS": sinks, "TILES": tiles}
            cases.append((_flash, types, constants | given, options))
    return cases
