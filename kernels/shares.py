"""What ranks exchange where a vocabulary is cut: their shares of embedded rows, and the bests of their logits."""

import torch
import triton
import triton.language as tl

from .select import largest
from .tile import SMALLEST, begin, chained, copied, index_of, ordered, up, value_of


def embed_share(ids, table, first):
    """This rank's part of embedded rows, to be summed over ranks: ids [N] int64, below zero (no proposal) as 0; table
    [V/size, D], whose row 0 is id `first` -> [N, D], zero for ids of other ranks."""
    local = ids.clamp(min=0) - first
    mine = (local >= 0) & (local < table.shape[0])
    return table[local.clamp(0, table.shape[0] - 1)].masked_fill(~mine[:, None], 0)


def pack_bests(values, ids, lse, first):
    """One rank's bests [N, k] and log-sum-exp [N] as one block, so that ranks exchange them at once: [N, 2k + 1] int32,
    fp32 by their bits, ids moved by `first`."""
    return torch.cat([values.view(torch.int32), (ids + first).to(torch.int32), lse[:, None].view(torch.int32)], 1)


def merge_bests(found, k):
    """Blocks of all ranks [R, N, 2c + 1] in rank order -> the best k of all: values [N, k], ids [N, k] int64, and lse
    [N] of all shares."""
    c, blocks = found.shape[2] // 2, found.transpose(0, 1)
    values, ids, lse = (
        part.contiguous() for part in (blocks[..., :c].flatten(1), blocks[..., c:-1].flatten(1), blocks[..., -1])
    )
    best, at = largest(values.view(torch.float32), k)  # shares ascend with rank: the lowest place is the lowest id
    return best, ids.gather(1, at).long(), torch.logsumexp(lse.view(torch.float32), 1)


@triton.jit
def _embed_share(ids_ptr, table_ptr, y_ptr, first, rows, columns, PDL: tl.constexpr, BC: tl.constexpr):
    """Program (n, c): BC columns of row n."""
    begin(PDL)
    row, at, wide = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC), columns.to(tl.int64)
    local = tl.maximum(tl.load(ids_ptr + row), 0) - first + tl.zeros([BC], tl.int64)
    mine = (local >= 0) & (local < rows) & (at < columns)
    x = tl.load(table_ptr + tl.where(mine, local, 0) * wide + at, mask=mine, other=0.0)
    tl.store(y_ptr + row * wide + at, x, mask=at < columns)


def embed_share_fused(ids, table, first):
    """The twin of `embed_share`."""
    n, (rows, columns) = ids.numel(), table.shape
    y, block = table.new_empty(n, columns), copied(columns)
    grid = n, triton.cdiv(columns, block)
    _embed_share[grid](ids.contiguous(), table, y, first, rows, columns, BC=block, num_warps=4, **chained(table))
    return y


@triton.jit
def _pack_bests(values_ptr, ids_ptr, lse_ptr, y_ptr, first, k, PDL: tl.constexpr, BK: tl.constexpr):
    """Program n: row n."""
    begin(PDL)
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, BK)
    y_ptr += row * (2 * k + 1)
    inside = j < k
    tl.store(y_ptr + j, tl.load(values_ptr + row * k + j, mask=inside).to(tl.int32, bitcast=True), mask=inside)
    tl.store(y_ptr + k + j, (tl.load(ids_ptr + row * k + j, mask=inside) + first).to(tl.int32), mask=inside)
    tl.store(y_ptr + 2 * k, tl.load(lse_ptr + row).to(tl.int32, bitcast=True))


def pack_bests_fused(values, ids, lse, first):
    """The twin of `pack_bests`: one launch."""
    (rows, k), values, ids, lse = ids.shape, values.contiguous(), ids.contiguous(), lse.contiguous()
    y = torch.empty(rows, 2 * k + 1, dtype=torch.int32, device=ids.device)
    _pack_bests[(rows,)](values, ids, lse, y, first, k, BK=up(k), num_warps=1, **chained(ids))
    return y


@triton.jit(do_not_specialize=["rows"])
def _merge_bests(
    found_ptr, values_ptr, ids_ptr, lse_ptr, rows, ranks, c, k, PDL: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Program n: row n's candidates of all ranks in rank order."""
    begin(PDL)
    row, at, rank = tl.program_id(0).to(tl.int64), tl.arange(0, BC), tl.arange(0, BR)
    width = 2 * c + 1
    start = (at // c * rows.to(tl.int64) + row) * width + at % c
    value = tl.load(found_ptr + start, mask=at < ranks * c, other=0).to(tl.float32, bitcast=True)
    ids = tl.load(found_ptr + start + c, mask=at < ranks * c, other=0).to(tl.int64)
    keys = tl.where(at < ranks * c, ordered(value, at), SMALLEST)
    for j in range(k):
        best = tl.max(keys, 0)
        tl.store(values_ptr + row * k + j, value_of(best))
        tl.store(ids_ptr + row * k + j, tl.sum(tl.where(at == index_of(best), ids, 0), 0))
        keys = tl.where(keys == best, SMALLEST, keys)
    place = (rank * rows.to(tl.int64) + row) * width + 2 * c
    lse = tl.load(found_ptr + place, mask=rank < ranks, other=0).to(tl.float32, bitcast=True)
    lse = tl.where(rank < ranks, lse, float("-inf"))
    top = tl.max(lse, 0)
    tl.store(lse_ptr + row, tl.log(tl.sum(tl.exp(lse - top), 0)) + top)


def merge_bests_fused(found, k):
    """The twin of `merge_bests`: one launch."""
    (ranks, rows, width), found = found.shape, found.contiguous()
    ids = torch.empty(rows, k, dtype=torch.int64, device=found.device)
    values, lse = (torch.empty(*size, dtype=torch.float32, device=found.device) for size in ((rows, k), (rows,)))
    c = width // 2
    _merge_bests[(rows,)](
        found, values, ids, lse, rows, ranks, c, k, BC=up(ranks * c), BR=up(ranks), num_warps=1, **chained(found)
    )
    return values, ids, lse


def specimens():
    """Compile specimens."""
    chain = {"num_warps": 1, "launch_pdl": True}
    types = {"values_ptr": "*fp32", "ids_ptr": "*i64", "lse_ptr": "*fp32"}
    pack = types | {"y_ptr": "*i32", "first": "i32", "k": "i32"}
    merge = types | {"found_ptr": "*i32"} | dict.fromkeys(("rows", "ranks", "c", "k"), "i32")
    cases = []
    for k in (1, 8):
        cases.append((_pack_bests, pack, {"PDL": True, "BK": k}, chain))
        cases.append((_merge_bests, merge, {"PDL": True, "BC": 8 * k, "BR": 8}, chain))
    for name in ("*bf16", "*fp16", "*fp32"):
        types = {"ids_ptr": "*i64", "table_ptr": name, "y_ptr": name}
        types |= dict.fromkeys(("first", "rows", "columns"), "i32")
        cases.append((_embed_share, types, {"PDL": True, "BC": 1024}, {"num_warps": 4, "launch_pdl": True}))
    return cases
