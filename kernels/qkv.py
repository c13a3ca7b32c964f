"""Norm, QKV projection, q/k norm, RoPE and cache write: everything of a GQA layer that precedes attention."""

from . import cache_write, linear, norm, rope


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
