"""Final norm, output head and the best k of the vocabulary."""

import torch
import triton
import triton.language as tl

from . import norm
from .select import largest
from .tile import SMALLEST, Tile, begin, chained, groups, index_of, inverse_rms, ordered, product, tile_of, up, value_of


def reference(x, norm_weight, eps, weight, k, logits=None):
    """Best k entries of every row's logits.

    Args:
        x: [N, D] residual stream; norm_weight [D]; weight [V, D].
        k: entries wanted; logits: [N, V] fp32 written in place, or None where nobody asked for them.

    Returns:
        values [N, k] fp32 logits by (value, lowest id), ids [N, k] int64, lse [N] fp32 log-sum-exp over the row.
        A row with a NaN or +inf, or of -inf only, has a non-finite lse; its ids stay inside the vocabulary.
    """
    y = norm.reference(x, norm_weight, eps).float() @ weight.float().T
    if logits is not None:
        logits.copy_(y)
    lse = y.logsumexp(-1)
    values, ids = largest(y.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")), k)
    return values, ids, lse


LOWEST = tl.constexpr(-3.0e38)  # stands for -inf where differences are taken
HELD = 4096  # candidates that the last stage holds at once


@triton.jit(do_not_specialize=["rows"])
def _vocabulary(
    x_ptr, norm_ptr, eps, w_ptr, logits_ptr, key_ptr, top_ptr, sum_ptr, rows, vocabulary, columns,
    LOGITS: tl.constexpr, KEPT: tl.constexpr,
    BO: tl.constexpr, SPLIT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (v, r): BO logits of row tile r; their best KEPT as ordered keys, their maximum and sum of exps."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    out = block * BO + tl.arange(0, BO)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    ok, live = out < vocabulary, row < rows
    start = row.to(tl.int64) * columns
    scale = inverse_rms(x_ptr, start, live, columns, eps, BR, 64 * SPLIT)
    y = product(x_ptr, start, live, scale, norm_ptr, w_ptr, out, ok, columns, True, BO, SPLIT, BK, BR, STAGES)
    if LOGITS:
        at = row.to(tl.int64)[None, :] * vocabulary + out[:, None]
        tl.store(logits_ptr + at, y, mask=ok[:, None] & live[None, :])
    clean = tl.where(y == y, y, float("-inf"))  # NaN never wins, but it does spoil the sum below
    keys = tl.where(ok[:, None], ordered(clean, out[:, None]), SMALLEST)
    place = row.to(tl.int64) * blocks + block
    top = tl.maximum(tl.max(tl.where(ok[:, None], clean, float("-inf")), 0), LOWEST)
    total = tl.sum(tl.where(ok[:, None], tl.exp(y - top[None, :]), 0.0), 0)
    tl.store(top_ptr + place, top, mask=live)
    tl.store(sum_ptr + place, total, mask=live)
    for j in range(KEPT):
        best = tl.max(keys, 0)
        tl.store(key_ptr + place * KEPT + j, best, mask=live)
        keys = tl.where(keys == best[None, :], SMALLEST, keys)


@triton.jit
def _reduce(key_ptr, kept_ptr, candidates, KEPT: tl.constexpr, BC: tl.constexpr):
    """Program (n, c): the best KEPT of BC of row n's candidates."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    keys = tl.load(key_ptr + row * candidates + at, mask=at < candidates, other=SMALLEST)
    kept_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * KEPT
    for j in range(KEPT):
        best = tl.max(keys, 0)
        tl.store(kept_ptr + j, best)
        keys = tl.where(keys == best, SMALLEST, keys)


@triton.jit
def _finish(
    key_ptr, top_ptr, sum_ptr, values_ptr, ids_ptr, lse_ptr, candidates, blocks, k,
    PDL: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Program n: the best k of row n's candidates, and log-sum-exp from its blocks' maxima and sums."""
    begin(PDL)
    row, at, block = tl.program_id(0).to(tl.int64), tl.arange(0, BC), tl.arange(0, BB)
    high = tl.full([BB], LOWEST, tl.float32)
    for b in range(0, blocks, BB):
        high = tl.maximum(high, tl.load(top_ptr + row * blocks + b + block, mask=b + block < blocks, other=LOWEST))
    top = tl.max(high, 0)
    total = tl.zeros([BB], tl.float32)
    for b in range(0, blocks, BB):
        inside = b + block < blocks
        share = tl.load(sum_ptr + row * blocks + b + block, mask=inside, other=0.0)
        total += share * tl.exp(tl.load(top_ptr + row * blocks + b + block, mask=inside, other=LOWEST) - top)
    tl.store(lse_ptr + row, tl.log(tl.sum(total, 0)) + top)
    keys = tl.load(key_ptr + row * candidates + at, mask=at < candidates, other=SMALLEST)
    for j in range(k):
        best = tl.max(keys, 0)
        tl.store(values_ptr + row * k + j, value_of(best))
        tl.store(ids_ptr + row * k + j, index_of(best))
        keys = tl.where(keys == best, SMALLEST, keys)


def _tile(dtype, columns):
    """Tile of the vocabulary's product: wider, so that fewer candidates reach the second stage."""
    base = tile_of(dtype, columns)
    return Tile(16 if dtype == torch.float32 else 64, min(4, base.split), base.depth, min(3, base.stages))


def fused(x, norm_weight, eps, weight, k, logits=None):
    """The twin of `reference`: logits stay in registers unless asked for; blocks of the vocabulary, then their bests.

    Raises ValueError for k above a quarter of what the last stage holds.
    """
    if k > HELD // 4:
        raise ValueError(f"head: k is {k}; at most {HELD // 4}")
    (rows, columns), vocabulary, x = x.shape, weight.shape[0], x.contiguous()
    tile = _tile(x.dtype, columns)
    blocks, kept = triton.cdiv(vocabulary, tile.outputs), min(k, tile.outputs)
    keys = torch.empty(rows, blocks * kept, dtype=torch.int64, device=x.device)
    top, total = (torch.empty(rows, blocks, dtype=torch.float32, device=x.device) for _ in range(2))
    _vocabulary[(blocks, groups(rows))](
        x, norm_weight, eps, weight, logits, keys, top, total, rows, vocabulary, columns,
        LOGITS=logits is not None, KEPT=kept, **tile.constants, **tile.options,
    )  # fmt: skip
    return finish(keys, top, total, k)


def finish(keys, top, total, k):
    """The best k of every row's candidates [N, C] (ordered keys), and log-sum-exp of its blocks' maxima and sums of
    exponentials [N, blocks] -> values, ids [N, k], lse [N]."""
    rows, blocks = top.shape
    while keys.shape[1] > HELD:
        parts, kept = triton.cdiv(keys.shape[1], HELD), min(k, HELD)
        best = keys.new_empty(rows, parts * kept)
        _reduce[(rows, parts)](keys, best, keys.shape[1], KEPT=kept, BC=HELD, num_warps=8)
        keys = best
    values = top.new_empty(rows, k)
    ids, lse = keys.new_empty(rows, k), top.new_empty(rows)
    _finish[(rows,)](
        keys, top, total, values, ids, lse, keys.shape[1], blocks, k,
        BC=max(16, up(keys.shape[1])), BB=1024, num_warps=8, **chained(top),
    )  # fmt: skip
    return values, ids, lse


def specimens():
    """Compile specimens: Qwen3-30B-A3B, its draft head and the demo pair."""
    cases = []
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for columns, kept, asked in ((2048, 1, False), (2048, 8, True), (256, 4, False)):
            tile = _tile(dtype, columns)
            types = dict.fromkeys(("x_ptr", "norm_ptr", "w_ptr"), name) | {"eps": "fp32", "logits_ptr": "*fp32"}
            types |= {"key_ptr": "*i64", "top_ptr": "*fp32", "sum_ptr": "*fp32"}
            types |= dict.fromkeys(("rows", "vocabulary", "columns"), "i32")
            cases.append((_vocabulary, types, {"LOGITS": asked, "KEPT": kept} | tile.constants, tile.options))
    types = {"key_ptr": "*i64", "kept_ptr": "*i64", "candidates": "i32"}
    cases.append((_reduce, types, {"KEPT": 8, "BC": HELD}, {"num_warps": 8}))
    types = {"key_ptr": "*i64", "top_ptr": "*fp32", "sum_ptr": "*fp32", "values_ptr": "*fp32", "ids_ptr": "*i64"}
    types |= {"lse_ptr": "*fp32"} | dict.fromkeys(("candidates", "blocks", "k"), "i32")
    return [*cases, (_finish, types, {"PDL": True, "BC": HELD, "BB": 1024}, {"num_warps": 8, "launch_pdl": True})]
