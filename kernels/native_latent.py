"""Latent attention in CUDA C++ (csrc/fewrows/latent.cuh): twins of mla.reference and mla_attention.reference whose
first argument is the kernels.native.Library that holds them. Other sizes keep their Triton twin."""

import torch

from . import mla
from . import mla_attention as latent
from .structs import structure

PLAIN, TURNED, LATENT, VALUES = 128, 64, 512, 128  # of latent.cuh: Kimi, DeepSeek-V2 and V3
QUERIES = 1536  # columns of the rows that heads' queries are made of, where one launch makes and absorbs them
TILE, LANES, HEADS = 32, 64, 8  # positions of a tile, lanes that tiles are dealt to, heads of a block

LatentQueries = structure(
    "LatentQueries",
    p="projected own gamma weight k_up gain cos_sin positions index pages q plane",
    f="eps",
    i="rows t heads stride own_stride up_stride columns table page",
)
LatentAttention = structure(
    "LatentAttention",
    p="q plane pages prefix tree v_up totals stats y",
    f="scale",
    i="rows t heads lanes up_stride columns table page",
)


def _fits(up, inner, plane):
    """Whether a kernel is built for matrices [H, inner, latent] and these cache rows."""
    return up.shape[1:] == (inner, LATENT) and plane.shape[2] == LATENT + TURNED and up.stride(1) == LATENT


def mla_qkv(
    library, x, norm_weight, eps, down, q_norm, q_up, kv_norm, k_up, cos_sin, positions, index, pages, page_size, plane
):
    """The twin of mla.reference."""
    rows, heads = x.shape[0], k_up.shape[0]
    if not _fits(k_up, PLAIN, plane):
        rest = kv_norm, k_up, cos_sin, positions, index, pages, page_size, plane
        return mla.composed(library.normed)(x, norm_weight, eps, down, q_norm, q_up, *rest)
    y = library.normed(x, norm_weight, eps, down)
    inside = q_up is not None and q_up.shape[1] == QUERIES and y.stride(0) % 8 == 0  # heads in the same launch
    if inside:
        heads_of = dict(own=None, gamma=q_norm, weight=q_up, own_stride=0)
    else:
        own = y if q_up is None else library.normed(y[:, : q_up.shape[1]], q_norm, eps, q_up)
        heads_of = dict(own=own, gamma=None, weight=None, own_stride=own.stride(0))
    q = x.new_empty(rows, heads, LATENT + TURNED)
    library.call(
        "eagle3_latent_queries", LatentQueries, projected=y, k_up=k_up, gain=kv_norm, cos_sin=cos_sin,
        positions=positions.contiguous(), index=index.contiguous(), pages=pages, q=q, plane=plane, eps=eps, rows=rows,
        t=positions.shape[1], heads=heads, stride=y.stride(0), up_stride=k_up.stride(0), columns=pages.shape[1],
        table=pages.stride(0), page=page_size, **heads_of,
    )  # fmt: skip
    return q


def mla_attention(library, q, plane, v_up, pages, prefix, tree, page_size, scale):
    """The twin of mla_attention.reference."""
    (rows, heads, _), b = q.shape, pages.shape[0]
    if heads % HEADS or not _fits(v_up, VALUES, plane):
        return latent.fused(q, plane, v_up, pages, prefix, tree, page_size, scale)
    lanes = min(LANES, -(-pages.shape[1] * page_size // TILE))  # that may have a key at all
    totals, stats = (torch.empty(rows, heads, lanes, n, dtype=torch.float32, device=q.device) for n in (LATENT, 2))
    y = q.new_empty(rows, heads * VALUES)
    library.call(
        "eagle3_latent", LatentAttention, b, q=q.contiguous(), plane=plane, pages=pages, prefix=prefix.contiguous(),
        tree=None if tree is None else tree.contiguous(), v_up=v_up, totals=totals, stats=stats, y=y,
        scale=scale * 1.4426950408889634, rows=rows, t=rows // b, heads=heads, lanes=lanes, up_stride=v_up.stride(0),
        columns=pages.shape[1], table=pages.stride(0), page=page_size,
    )  # fmt: skip
    return y
