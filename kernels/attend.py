"""All of a GQA layer between the residual stream and its output projection: kernels.qkv, then kernels.attention.

One operation, because a kernel that holds the projected rows can do head norms, RoPE and the cache write on its way to
the scores.
"""


def composed(place, attend):
    """An operation from its two halves, e.g. qkv.fused and attention.fused."""

    def operation(
        x, norm_weight, eps, weight, bias, q_norm, k_norm, cos_sin, positions, index, pages, page_size,
        k_plane, v_plane, prefix, tree, scale, window=None, sinks=None,
    ):  # fmt: skip
        """Rows to attention outputs; keys and values go to the cache.

        Args:
            x … v_plane: as kernels.qkv.reference takes them; prefix, tree, scale, window, sinks: as
            kernels.attention.reference does.

        Returns:
            [N, H*Dh] in x's dtype.
        """
        q = place(
            x, norm_weight, eps, weight, bias, q_norm, k_norm, cos_sin, positions, index, pages, page_size,
            k_plane, v_plane,
        )  # fmt: skip
        return attend(q, k_plane, v_plane, pages, prefix, tree, page_size, scale, window, sinks)

    return operation
