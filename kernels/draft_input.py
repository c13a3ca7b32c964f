"""The draft head's rows: norm(embedding) ‖ norm(hidden), embedding first, and the residual that the first layer adds
to. Ids are looked up, and the hidden of the beam that a row extends found, on the way."""

import torch
import triton
import triton.language as tl

from . import norm
from .select import gather_rows
from .tile import begin, chained


def reference(ids, table, embed_norm, hidden, source, hidden_norm, eps, normed):
    """Rows of a pass.

    Args:
        ids: [N] int64, below zero (no proposal) as 0, rows of `table` [V, D]; None: table [N, D] holds the embeddings.
        hidden: [M, D]; source: [B, K] int64, row k of sequence b is row source[b, k] of its M / B; None: N = M rows.
        embed_norm, hidden_norm: [D]; eps: of both; normed: the residual is norm(hidden).

    Returns:
        x [N, 2D], residual [N, D].
    """
    embedding = table if ids is None else table[ids.clamp(min=0)]
    if source is not None:
        hidden = gather_rows(hidden.view(source.shape[0], -1, hidden.shape[1]), source).flatten(0, 1)
    second = norm.reference(hidden, hidden_norm, eps)
    return torch.cat([norm.reference(embedding, embed_norm, eps), second], -1), second if normed else hidden


@triton.jit
def _draft_input(
    ids_ptr, table_ptr, e_norm_ptr, h_ptr, source_ptr, h_norm_ptr, y_ptr, residual_ptr, columns, eps, beams, k,
    IDS: tl.constexpr, SOURCE: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Program (n, half): one norm of row n into its half of the output; the second one's rows are the residual too."""
    begin(PDL)
    row, columns_ = tl.program_id(0), columns.to(tl.int64)
    y_ptr += row * 2 * columns_
    if tl.program_id(1) == 0:
        own = row.to(tl.int64)
        if IDS:
            own = tl.maximum(tl.load(ids_ptr + row), 0)
        norm.write_normed(table_ptr + own * columns_, e_norm_ptr, y_ptr, columns, eps, BC)
    else:
        own = row.to(tl.int64)
        if SOURCE:
            own = row // k * beams + tl.load(source_ptr + row)
        h_ptr += own * columns_
        residual_ptr += row * columns_
        norm.write_normed(h_ptr, h_norm_ptr, y_ptr + columns_, columns, eps, BC)
        if NORMED:
            norm.write_normed(h_ptr, h_norm_ptr, residual_ptr, columns, eps, BC)
        elif SOURCE:
            for c in range(0, columns, BC):
                at = c + tl.arange(0, BC)
                tl.store(residual_ptr + at, tl.load(h_ptr + at, mask=at < columns, other=0.0), mask=at < columns)


def fused(ids, table, embed_norm, hidden, source, hidden_norm, eps, normed):
    """The twin of `reference`: one launch."""
    hidden, (m, columns) = hidden.contiguous(), hidden.shape
    rows, b, k = (m, 1, m) if source is None else (source.numel(), *source.shape)
    y = hidden.new_empty(rows, 2 * columns)
    residual = hidden.new_empty(rows, columns) if normed or source is not None else hidden
    _draft_input[(rows, 2)](
        None if ids is None else ids.contiguous(), table.contiguous(), embed_norm, hidden,
        None if source is None else source.contiguous(), hidden_norm, y, residual, columns, eps, m // b, k,
        IDS=ids is not None, SOURCE=source is not None, NORMED=normed, BC=norm.chunk(columns), num_warps=4,
        **chained(hidden),
    )  # fmt: skip
    return y, residual


def specimens():
    """Compile specimens: a chain's or a tree's pass, the first pass, a rank's pass with a normed residual."""
    launches = ((2048, True, True, False), (2048, True, False, False), (256, False, True, True))
    pointers = ("table_ptr", "e_norm_ptr", "h_ptr", "h_norm_ptr", "y_ptr", "residual_ptr")
    ints = {"ids_ptr": "*i64", "source_ptr": "*i64", "columns": "i32", "eps": "fp32", "beams": "i32", "k": "i32"}
    return [
        (
            _draft_input,
            dict.fromkeys(pointers, name) | ints,
            {"IDS": ids, "SOURCE": source, "NORMED": normed, "PDL": True, "BC": norm.chunk(columns)},
            {"num_warps": 4, "launch_pdl": True},
        )
        for name in ("*bf16", "*fp16", "*fp32")
        for columns, ids, source, normed in launches
    ]
