"""Rows found by what the device alone knows (a token, a prefix, how many of them are real), and rows handed on."""

import torch
import triton
import triton.language as tl

from .select import gather_rows
from .tile import begin, chained, copied, up


def embed(ids, table):
    """ids [N] int64, below zero (no proposal) as 0; table [V, D] -> [N, D]."""
    return table[ids.clamp(min=0)]


def behind(seq_lens, backlog, width):
    """Where the rows go that a drafter has yet to see: start = seq_lens - backlog [B], start + 0 … width - 1
    [B, width]."""
    start = seq_lens - backlog
    return start, start[:, None] + torch.arange(width, device=start.device)


def last(x, backlog):
    """Row max(backlog - 1, 0) of each sequence: x [B, T, D], backlog [B] -> [B, D]."""
    return gather_rows(x, (backlog - 1).clamp(min=0)[:, None])[:, 0]


def record(ids, lse, aux, target_ids, kept_lse, kept_aux):
    """A verify pass's answers into the tree: ids [B, T] or [N, 1], lse [N], aux: of every boundary that is handed out
    its [N, D], which go side by side; all rows in the order of the tree's target_ids [B, T], kept_lse [B, T] and
    kept_aux [B, T, F], F = D times as many."""
    for kept, x in ((target_ids, ids), (kept_lse, lse)):
        kept.copy_(x.view_as(kept))
    if aux:
        kept_aux.copy_(torch.cat(aux, -1).view_as(kept_aux))


@triton.jit
def _copied(source_ptr, place_ptr, columns, BC: tl.constexpr):
    """BC columns of a row, those of this program."""
    at = tl.program_id(1) * BC + tl.arange(0, BC)
    tl.store(place_ptr + at, tl.load(source_ptr + at, mask=at < columns), mask=at < columns)


@triton.jit
def _embed(ids_ptr, table_ptr, y_ptr, columns, PDL: tl.constexpr, BC: tl.constexpr):
    """Program (n, c): BC columns of row n."""
    begin(PDL)
    row, wide = tl.program_id(0), columns.to(tl.int64)
    _copied(table_ptr + tl.maximum(tl.load(ids_ptr + row), 0) * wide, y_ptr + row * wide, columns, BC)


def embed_fused(ids, table):
    """The twin of `embed`."""
    rows, columns = ids.numel(), table.shape[1]
    y, block = table.new_empty(rows, columns), copied(columns)
    grid = rows, triton.cdiv(columns, block)
    _embed[grid](ids.contiguous(), table, y, columns, BC=block, num_warps=4, **chained(table))
    return y


@triton.jit
def _behind(seq_ptr, backlog_ptr, start_ptr, at_ptr, width, PDL: tl.constexpr, BW: tl.constexpr):
    """Program b: one sequence."""
    begin(PDL)
    b, k = tl.program_id(0), tl.arange(0, BW)
    start = tl.load(seq_ptr + b) - tl.load(backlog_ptr + b)
    tl.store(start_ptr + b, start)
    tl.store(at_ptr + b * width + k, start + k, mask=k < width)


def behind_fused(seq_lens, backlog, width):
    """The twin of `behind`."""
    start, at = torch.empty_like(seq_lens), seq_lens.new_empty(seq_lens.shape[0], width)
    options = chained(seq_lens) | {"num_warps": 1}
    _behind[(seq_lens.shape[0],)](seq_lens, backlog, start, at, width, BW=up(width), **options)
    return start, at


@triton.jit
def _last(x_ptr, backlog_ptr, y_ptr, rows, columns, PDL: tl.constexpr, BC: tl.constexpr):
    """Program (b, c): BC columns of sequence b's row."""
    begin(PDL)
    b, wide = tl.program_id(0), columns.to(tl.int64)
    row = b * rows + tl.maximum(tl.load(backlog_ptr + b) - 1, 0)
    _copied(x_ptr + row * wide, y_ptr + b * wide, columns, BC)


def last_fused(x, backlog):
    """The twin of `last`."""
    (b, rows, columns), x = x.shape, x.contiguous()
    y, block = x.new_empty(b, columns), copied(columns)
    grid = b, triton.cdiv(columns, block)
    _last[grid](x, backlog, y, rows, columns, BC=block, num_warps=4, **chained(x))
    return y


TOGETHER = 4  # boundaries that one launch of `record` copies: an EAGLE-3 head has three


@triton.jit
def _record(
    ids_ptr, lse_ptr, a_ptr, b_ptr, c_ptr, d_ptr, ids_out, lse_out, aux_out, columns, features, PDL: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Program (n, c, p): BC columns of row n of boundary p; the first one the row's id and log-sum-exp."""
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(2)
    if (tl.program_id(1) == 0) & (part == 0):
        tl.store(ids_out + row, tl.load(ids_ptr + row))
        tl.store(lse_out + row, tl.load(lse_ptr + row))
    source = a_ptr
    if part == 1:
        source = b_ptr
    if part == 2:
        source = c_ptr
    if part == 3:
        source = d_ptr
    to = aux_out + row * features.to(tl.int64) + part * columns
    _copied(source + row * columns.to(tl.int64), to, columns, BC)


def record_fused(ids, lse, aux, target_ids, kept_lse, kept_aux):
    """The twin of `record`: one launch for each four boundaries; ids are written where there are none too."""
    rows, features, columns = lse.numel(), kept_aux.shape[-1], aux[0].shape[-1] if aux else 0
    block, aux = copied(columns), [part.contiguous() for part in aux]
    for at in range(0, max(1, len(aux)), TOGETHER):
        own = aux[at : at + TOGETHER]
        sources = (own + [kept_aux] * TOGETHER)[:TOGETHER]  # nobody reads what stands for those that are not there
        _record[(rows, max(1, triton.cdiv(columns, block)), max(1, len(own)))](
            ids.contiguous(), lse.contiguous(), *sources, target_ids, kept_lse, kept_aux[..., at * columns :], columns,
            features, BC=block, num_warps=4, **chained(lse),
        )  # fmt: skip


def specimens():
    """Compile specimens."""
    ints = dict.fromkeys(("seq_ptr", "backlog_ptr", "start_ptr", "at_ptr"), "*i64") | {"width": "i32"}
    kept = {"ids_ptr": "*i64", "ids_out": "*i64", "lse_ptr": "*fp32", "lse_out": "*fp32"}
    kept |= {"columns": "i32", "features": "i32"}
    options, block = {"num_warps": 4, "launch_pdl": True}, {"PDL": True, "BC": 1024}
    cases = [(_behind, ints, {"PDL": True, "BW": width}, {"num_warps": 1, "launch_pdl": True}) for width in (1, 4, 64)]
    for name in ("*bf16", "*fp16", "*fp32"):
        types = {"ids_ptr": "*i64", "table_ptr": name, "y_ptr": name, "columns": "i32"}
        cases.append((_embed, types, block, options))
        types = {"x_ptr": name, "backlog_ptr": "*i64", "y_ptr": name, "rows": "i32", "columns": "i32"}
        cases.append((_last, types, block, options))
        types = kept | dict.fromkeys(("a_ptr", "b_ptr", "c_ptr", "d_ptr", "aux_out"), name)
        cases.append((_record, types, block, options))
    return cases
