"""Latent attention (MLA: DeepSeek, Kimi), all that precedes attention: norm, projections, RoPE, the cache row, and
queries absorbed into the space of the latents.

A position keeps one row for all heads: its normed latent of R elements, then the shared key's `turned` rotated lanes.
A head's key is k_up times the latent, so its score is (k_up^T q) . latent + q_turned . row_turned: queries meet the
rows as they are stored, and no key or value is ever expanded.
"""

import torch
import triton
import triton.language as tl

from . import cache_write, linear, norm, rope
from .tile import ROWS, groups, up


def reference(
    x, norm_weight, eps, down, q_norm, q_up, kv_norm, k_up, cos_sin, positions, index, pages, page_size, plane
):
    """Project rows to absorbed queries and write their cache rows.

    Args:
        x: [N, D] residual stream, N = B*T (already normed where norm_weight is None).
        norm_weight: [D] or None; eps: for it and for q_norm and kv_norm.
        down: [A + R + turned, D]: rows of the query part, of the latent and of the shared key.
        q_norm, q_up: [A] and [H*(nope + turned), A]; both None where the query part is the queries themselves.
        kv_norm: [R], of the latent; k_up: [H, nope, R], a head's rows contiguous.
        cos_sin: [L, turned] fp32 (kernels.rope), of interleaved pairs; positions, index: [B, T] int64.
        pages: [B, NP] int32; plane: [slots, 1, R + turned], written in place.

    Returns:
        q [N, H, R + turned].
    """
    heads, nope, latent = k_up.shape
    n, turned, at = x.shape[0], plane.shape[2] - latent, positions.view(-1)
    if norm_weight is not None:
        x = norm.reference(x, norm_weight, eps)
    q, row, shared = linear.reference(x, down).split([down.shape[0] - latent - turned, latent, turned], 1)
    if q_up is not None:
        q = linear.reference(norm.reference(q, q_norm, eps), q_up)
    plain, own = q.view(n, heads, nope + turned).split([nope, turned], -1)
    shared = rope.pairs(shared[:, None], cos_sin, at)
    row = torch.cat([norm.reference(row, kv_norm, eps)[:, None], shared], -1)
    cache_write.reference(plane, row, index, pages, page_size)
    absorbed = torch.einsum("nhd,hdr->nhr", plain.float(), k_up.float()).to(x.dtype)
    return torch.cat([absorbed, rope.pairs(own, cos_sin, at)], -1)


@triton.jit
def _turn(x_ptr, element, inside, cos_sin_ptr, position, lane, TURNED: tl.constexpr):
    """Rotated lanes [M, BT] fp32 of rows that begin at `element` [M]; lane i pairs with lane i ^ 1."""
    own = tl.load(x_ptr + element[:, None] + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + element[:, None] + (lane ^ 1)[None, :], mask=inside, other=0.0).to(tl.float32)
    angle = cos_sin_ptr + position[:, None] * TURNED + (lane // 2)[None, :]
    cos, sin = tl.load(angle, mask=inside, other=1.0), tl.load(angle + TURNED // 2, mask=inside, other=0.0)
    return own * cos + tl.where((lane % 2 == 0)[None, :], -other, other) * sin


@triton.jit
def _absorb(
    own_ptr, up_ptr, q_ptr, source, target, live, latent, NOPE: tl.constexpr, LATENT: tl.constexpr, BN: tl.constexpr
):
    """Latent lanes `latent` [BO] of one head's absorbed queries; source, target: [BR] elements where rows begin."""
    lane = tl.arange(0, BN)
    w = tl.load(
        up_ptr + lane[:, None] * LATENT + latent[None, :],
        mask=(lane < NOPE)[:, None] & (latent < LATENT)[None, :], other=0.0,
    )  # fmt: skip
    x = tl.load(own_ptr + source[None, :] + lane[:, None], mask=live[None, :] & (lane < NOPE)[:, None], other=0.0)
    y = tl.dot(tl.trans(w), x, input_precision="ieee")
    inside = live[None, :] & (latent < LATENT)[:, None]
    tl.store(q_ptr + target[None, :] + latent[:, None], y.to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write(
    y_ptr, source, kv_norm_ptr, eps, cos_sin_ptr, position, plane_ptr, slot, live,
    TURNED: tl.constexpr, LATENT: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Cache rows of BR rows whose latents begin at `source`: latent normed, shared key rotated."""
    lane, lane_t, target = tl.arange(0, BL), tl.arange(0, BT), (slot * (LATENT + TURNED))[:, None]
    inside, turned = live[:, None] & (lane < LATENT)[None, :], live[:, None] & (lane_t < TURNED)[None, :]
    x = tl.load(y_ptr + source[:, None] + lane[None, :], mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, 1) / LATENT + eps)
    gain = tl.load(kv_norm_ptr + lane, mask=lane < LATENT, other=0.0).to(tl.float32)
    wide = (wide * scale[:, None] * gain[None, :]).to(x.dtype)
    tl.store(plane_ptr + target + lane[None, :], wide.to(plane_ptr.dtype.element_ty), mask=inside)
    shared = _turn(y_ptr, source + LATENT, turned, cos_sin_ptr, position, lane_t, TURNED).to(x.dtype)
    tl.store(plane_ptr + target + LATENT + lane_t[None, :], shared.to(plane_ptr.dtype.element_ty), mask=turned)


@triton.jit(do_not_specialize=["rows", "t", "columns", "table"])
def _place(
    y_ptr, own_ptr, up_ptr, kv_norm_ptr, eps, cos_sin_ptr, position_ptr, index_ptr, pages_ptr, q_ptr, plane_ptr,
    rows, t, columns, table, heads, y_width, own_width, up_head, PAGE: tl.constexpr, NOPE: tl.constexpr,
    TURNED: tl.constexpr, LATENT: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Program (o, h, r): block o of head h's absorbed queries, row tile r; past the blocks, the head's rotated lanes,
    and of the first head the cache rows. y_width, own_width: from row to row of y and of the queries in own."""
    head, row = tl.program_id(1), tl.program_id(2) * BR + tl.arange(0, BR)
    live, row = row < rows, row.to(tl.int64)
    source, target = row * own_width + head * (NOPE + TURNED), (row * heads + head) * (LATENT + TURNED)
    if tl.program_id(0) * BO < LATENT:
        latent = tl.program_id(0) * BO + tl.arange(0, BO)
        _absorb(own_ptr, up_ptr + head.to(tl.int64) * up_head, q_ptr, source, target, live, latent, NOPE, LATENT, BN)
    else:
        lane = tl.arange(0, BT)
        turned = live[:, None] & (lane < TURNED)[None, :]
        position = tl.load(position_ptr + row, mask=live, other=0)
        y = _turn(own_ptr, source + NOPE, turned, cos_sin_ptr, position, lane, TURNED)
        tl.store(q_ptr + target[:, None] + LATENT + lane[None, :], y.to(q_ptr.dtype.element_ty), mask=turned)
        if head == 0:
            index = tl.load(index_ptr + row, mask=live, other=-1)
            written = (index >= 0) & (index < columns.to(tl.int64) * PAGE)
            page = tl.load(pages_ptr + (row // t) * table + index // PAGE, mask=written, other=0).to(tl.int64)
            slot = tl.where(written, page * PAGE + index % PAGE, 0)
            low = row * y_width + y_width - LATENT - TURNED
            _write(y_ptr, low, kv_norm_ptr, eps, cos_sin_ptr, position, plane_ptr, slot, live, TURNED, LATENT, BT, BL)


def _sizes(nope, turned, latent, page_size):
    """Compile-time arguments of `_place`."""
    return {
        "PAGE": page_size, "NOPE": nope, "TURNED": turned, "LATENT": latent, "BO": min(64, max(16, up(latent))),
        "BN": max(16, up(nope)), "BT": max(16, up(turned)), "BL": up(latent), "BR": ROWS,
    }  # fmt: skip


def place(y, own, eps, kv_norm, k_up, cos_sin, positions, index, pages, page_size, plane):
    """Rows y [N, A + R + turned] of the down projection, queries own [N, H*(nope + turned)] (columns of a wider tensor
    perhaps) -> q [N, H, R + turned]; the rows go to the cache."""
    (heads, nope, latent), rows = k_up.shape, y.shape[0]
    turned = plane.shape[2] - latent
    q, sizes = y.new_empty(rows, heads, latent + turned), _sizes(nope, turned, latent, page_size)
    _place[(triton.cdiv(latent, sizes["BO"]) + 1, heads, groups(rows))](
        y, own, k_up, kv_norm, eps, cos_sin, positions.contiguous(), index.contiguous(), pages, q, plane,
        rows, positions.shape[1], pages.shape[1], pages.stride(0), heads, y.stride(0), own.stride(0), k_up.stride(0),
        **sizes, num_warps=4,
    )  # fmt: skip
    return q


def composed(project):
    """The operation from a projection with a norm before it: project(x, norm_weight or None, eps, weight)."""

    def operation(x, norm_weight, eps, down, q_norm, q_up, kv_norm, k_up, *rest):
        """The twin of `reference`: down projection; queries; absorption, RoPE and cache rows."""
        y = project(x, norm_weight, eps, down)
        own = y if q_up is None else project(y[:, : q_up.shape[1]], q_norm, eps, q_up)
        return place(y, own, eps, kv_norm, k_up, *rest)

    return operation


def specimens():
    """Compile specimens: Kimi-K2 and DeepSeek-V3, and a toy; the projections' are kernels.linear's."""
    cases = []
    for name in ("*bf16", "*fp16", "*fp32"):
        for sizes in ((128, 64, 512), (24, 8, 40)):
            types = dict.fromkeys(("y_ptr", "own_ptr", "up_ptr", "kv_norm_ptr", "q_ptr", "plane_ptr"), name)
            types |= {"eps": "fp32", "cos_sin_ptr": "*fp32", "position_ptr": "*i64", "index_ptr": "*i64"}
            types |= {"pages_ptr": "*i32"} | dict.fromkeys(("rows", "t", "columns", "table", "heads"), "i32")
            types |= dict.fromkeys(("y_width", "own_width", "up_head"), "i32")
            cases.append((_place, types, _sizes(*sizes, 16), {"num_warps": 4}))
    return cases
