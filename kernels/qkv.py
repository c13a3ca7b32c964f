"""Norm, QKV projection, q/k norm, RoPE and cache write: everything of a GQA layer that precedes attention."""

import triton
import triton.language as tl

from . import cache_write, linear, norm, rope
from .tile import up


def reference(
    x, norm_weight, eps, weight, bias, q_norm, k_norm, cos_sin, positions, index, pages, page_size, k_plane, v_plane
):
    """Project rows to queries and write their keys and values.

    Args:
        x: [N, D] residual stream, N = B*T (already normed where norm_weight is None).
        norm_weight: [D] or None; eps: for it and for the q/k norms.
        weight: [(H + 2G)*Dh, D] rows ordered q, k, v; bias: [(H + 2G)*Dh] or None.
        q_norm, k_norm: [Dh] per-head RMS norm weights before RoPE, or None.
        cos_sin: [L, R] fp32 (kernels.rope); positions, index: [B, T] int64, RoPE position and logical row.
        pages: [B, NP] int32; k_plane, v_plane: [slots, G, Dh], written in place.

    Returns:
        q [N, H, Dh].
    """
    n, (_, g, dh) = x.shape[0], k_plane.shape
    if norm_weight is not None:
        x = norm.reference(x, norm_weight, eps)
    y = linear.reference(x, weight, bias).view(n, -1, dh)
    q, k, v = y.split([y.shape[1] - 2 * g, g, g], 1)
    if q_norm is not None:
        q, k = norm.reference(q, q_norm, eps), norm.reference(k, k_norm, eps)
    at = positions.view(-1)
    cache_write.reference(k_plane, rope.reference(k, cos_sin, at), index, pages, page_size)
    cache_write.reference(v_plane, v, index, pages, page_size)
    return rope.reference(q, cos_sin, at)


@triton.jit(do_not_specialize=["t", "columns", "table"])
def _place(
    y_ptr, q_norm_ptr, k_norm_ptr, eps, cos_sin_ptr, position_ptr, index_ptr, pages_ptr, q_ptr, k_ptr, v_ptr,
    t, columns, table, heads, groups, NORM: tl.constexpr, PAGE: tl.constexpr, DH: tl.constexpr, TURNED: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Program (n, b): BH heads of row n's projections (queries, then keys, then values): q/k norm, RoPE, store."""
    row, head, lane = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BD)
    half: tl.constexpr = TURNED // 2
    partner = tl.where(lane < half, lane + half, tl.where(lane < TURNED, lane - half, lane))
    inside = (head < heads + 2 * groups)[:, None] & (lane < DH)[None, :]
    source = y_ptr + (row.to(tl.int64) * (heads + 2 * groups) + head)[:, None] * DH
    own = tl.load(source + lane[None, :], mask=inside, other=0.0)
    other = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    x, query = own.to(tl.float32), (head < heads)[:, None]
    if NORM:
        scale = tl.math.rsqrt(tl.sum(x * x, 1) / DH + eps)[:, None]
        gain = tl.where(query, _gain(q_norm_ptr, lane, DH), _gain(k_norm_ptr, lane, DH))
        x = (x * scale * gain).to(own.dtype).to(tl.float32)
        gain = tl.where(query, _gain(q_norm_ptr, partner, DH), _gain(k_norm_ptr, partner, DH))
        other = (other * scale * gain).to(own.dtype).to(tl.float32)
    turned = lane < TURNED
    cos_ptr = cos_sin_ptr + tl.load(position_ptr + row) * TURNED + lane % half
    cos, sin = tl.load(cos_ptr, mask=turned, other=1.0), tl.load(cos_ptr + half, mask=turned, other=0.0)
    across = tl.where((lane < half)[None, :], -other, other) * sin[None, :]
    x = tl.where(turned[None, :], x * cos[None, :] + across, x)
    index = tl.load(index_ptr + row)
    written = (index >= 0) & (index < columns.to(tl.int64) * PAGE)
    page = tl.load(pages_ptr + (row // t).to(tl.int64) * table + index // PAGE, mask=written, other=0)
    slot = tl.where(written, page.to(tl.int64) * PAGE + index % PAGE, 0) * groups
    at = (row.to(tl.int64) * heads + head)[:, None] * DH + lane[None, :]
    tl.store(q_ptr + at, x.to(q_ptr.dtype.element_ty), mask=inside & query)
    at, key = (slot + head - heads)[:, None] * DH + lane[None, :], (head < heads + groups)[:, None]
    tl.store(k_ptr + at, x.to(own.dtype).to(k_ptr.dtype.element_ty), mask=inside & key & (head >= heads)[:, None])
    at = (slot + head - heads - groups)[:, None] * DH + lane[None, :]
    tl.store(v_ptr + at, own.to(v_ptr.dtype.element_ty), mask=inside & (head >= heads + groups)[:, None])


@triton.jit
def _gain(norm_ptr, lane, DH: tl.constexpr):
    """[1, BD] fp32."""
    return tl.load(norm_ptr + lane, mask=lane < DH, other=0.0).to(tl.float32)[None, :]


def fused(
    x, norm_weight, eps, weight, bias, q_norm, k_norm, cos_sin, positions, index, pages, page_size, k_plane, v_plane
):
    """The twin of `reference`: norm and projection in one launch; head norms, RoPE and cache write in another."""
    y = linear.project(x, norm_weight, eps, weight, bias)
    return place(y, eps, q_norm, k_norm, cos_sin, positions, index, pages, page_size, k_plane, v_plane)


def place(y, eps, q_norm, k_norm, cos_sin, positions, index, pages, page_size, k_plane, v_plane, together=1):
    """Projected rows y [N, (H + 2G)*Dh] -> q [N, H, Dh]; keys and values go to the cache. together: heads of a row that
    one program takes: several where there are many rows."""
    (groups, width), rows = k_plane.shape[1:], y.shape[0]
    heads = y.shape[1] // width - 2 * groups
    q = y.new_empty(rows, heads, width)
    _place[(rows, triton.cdiv(heads + 2 * groups, together))](
        y, q_norm, k_norm, eps, cos_sin, positions.contiguous(), index.contiguous(), pages, q, k_plane, v_plane,
        positions.shape[1], pages.shape[1], pages.stride(0), heads, groups, NORM=q_norm is not None, PAGE=page_size,
        DH=width, TURNED=cos_sin.shape[1], BH=together, BD=max(32, up(width)), num_warps=min(4, together),
    )  # fmt: skip
    return q


def specimens():
    """Compile specimens; the projection's are kernels.linear's."""
    cases = []
    for name in ("*bf16", "*fp16", "*fp32"):
        for width, turned, normed in ((128, 128, True), (64, 64, False), (80, 40, True)):
            types = dict.fromkeys(("y_ptr", "q_norm_ptr", "k_norm_ptr", "q_ptr", "k_ptr", "v_ptr"), name)
            types |= {"eps": "fp32", "cos_sin_ptr": "*fp32", "position_ptr": "*i64", "index_ptr": "*i64"}
            types |= {"pages_ptr": "*i32"} | dict.fromkeys(("t", "columns", "table", "heads", "groups"), "i32")
            constants = {"NORM": normed, "PAGE": 16, "DH": width, "TURNED": turned, "BD": up(width)}
            for together in (1, 8):
                cases.append((_place, types, constants | {"BH": together}, {"num_warps": min(4, together)}))
    return cases
