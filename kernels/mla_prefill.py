"""Latent attention of prompts: absorbed like decoding, in wide tiles for many rows. `OPERATIONS` joins
kernels.prefill's; what is said there of a prompt's bits holds here."""

import torch
import triton
import triton.language as tl

from . import mla, mla_attention, norm
from .prefill import linear
from .splits import slot_of
from .tile import up


def project(x, norm_weight, eps, weight):
    """norm(x) W^T, or x W^T without a norm."""
    return linear(x if norm_weight is None else norm.fused(x, norm_weight, eps), weight)


@triton.jit(do_not_specialize=["t", "columns", "table"])
def _flash(
    q_ptr, plane_ptr, pages_ptr, prefix_ptr, y_ptr, t, columns, table, heads, scale, PAGE: tl.constexpr,
    LATENT: tl.constexpr, TURNED: tl.constexpr, BQ: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Program (s, h, b): BQ queries of sequence b, from its s-th tile, and block h of BH heads, over all they see."""
    b, m, lane = tl.program_id(2), tl.arange(0, BQ * BH), tl.arange(0, BL)
    row, head = tl.program_id(0) * BQ + m // BH, tl.program_id(1) * BH + m % BH
    live = (row < t) & (head < heads)
    prefix = tl.load(prefix_ptr + b).to(tl.int32)
    last = prefix + row
    pages_ptr += b.to(tl.int64) * table
    at = (b.to(tl.int64) * t + row) * heads + head
    q, q_turned = mla_attention.parts(q_ptr, at, live, LATENT, TURNED, BL, BT)
    top = tl.full([BQ * BH], float("-inf"), tl.float32)
    sum_, total = tl.zeros([BQ * BH], tl.float32), tl.zeros([BQ * BH, BL], tl.float32)
    end = tl.max(tl.where(live, last, -1), 0) + 1
    for start in range(0, end, BN):
        key = start + tl.arange(0, BN)
        inside = (key < end) & (key < columns * PAGE)
        slot = slot_of(pages_ptr, key, inside, PAGE)
        seen = live[:, None] & (key[None, :] <= last[:, None])
        top, sum_, total = mla_attention.fold(
            q, q_turned, plane_ptr, slot, inside, seen, scale, top, sum_, total, LATENT, TURNED, BL, BT
        )
    y = (total / sum_[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at[:, None] * LATENT + lane[None, :], y, mask=live[:, None] & (lane < LATENT)[None, :])


def _sizes(dtype, heads, latent, turned):
    """Constants and launch options: 64 (query, head) rows a program, 16 in fp32."""
    narrow = dtype == torch.float32
    tile = 16 if narrow else 64
    block = min(tile, up(heads))
    constants = {"LATENT": latent, "TURNED": turned, "BQ": tile // block, "BH": block, "BN": 16 if narrow else 32}
    constants |= {"BL": max(16, up(latent)), "BT": max(16, up(turned))}
    return constants, {"num_warps": 8, "num_stages": 1 if narrow else 2}


def attention(q, plane, v_up, pages, prefix, tree, page_size, scale):
    """As kernels.mla_attention.reference, of a causal pass. Raises ValueError for a tree."""
    if tree is not None:
        raise ValueError("prefill attention is causal; a tree takes kernels.mla_attention.fused")
    (rows, heads, width), latent, b = q.shape, v_up.shape[2], pages.shape[0]
    constants, options = _sizes(q.dtype, heads, latent, width - latent)
    t, y = rows // b, q.new_empty(rows, heads * latent)
    _flash[(triton.cdiv(t, constants["BQ"]), triton.cdiv(heads, constants["BH"]), b)](
        q.contiguous(), plane, pages, prefix, y, t, pages.shape[1], pages.stride(0), heads, scale * 1.4426950408889634,
        PAGE=page_size, **constants, **options,
    )  # fmt: skip
    return mla_attention.values(y, v_up)


OPERATIONS = {"mla_qkv": mla.composed(project), "mla_attention": attention}


def specimens():
    """Compile specimens: a rank's 8 and all 64 heads of Kimi-K2, and a toy."""
    cases = []
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float16, "*fp16"), (torch.float32, "*fp32")):
        for heads, latent, turned in ((8, 512, 64), (64, 512, 64), (3, 40, 8)):
            constants, options = _sizes(dtype, heads, latent, turned)
            types = {"q_ptr": name, "plane_ptr": name, "y_ptr": name, "pages_ptr": "*i32", "prefix_ptr": "*i64"}
            types |= {"scale": "fp32"} | dict.fromkeys(("t", "columns", "table", "heads"), "i32")
            cases.append((_flash, types, constants | {"PAGE": 16}, options))
    return cases
