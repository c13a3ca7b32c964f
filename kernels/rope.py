"""Rotary embedding, half-split (Llama, Qwen) form: lane i pairs with lane i + R/2 of the first R lanes."""

import torch


def reference(x, cos_sin, positions):
    """Rotate the first R lanes of every head.

    Args:
        x: [N, H, Dh] (any float dtype; computed in fp32, rounded once).
        cos_sin: [L, R] fp32, cosines then sines of the R/2 angles of each position.
        positions: [N] int64, 0 <= position < L.
    """
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(half, -1)  # N 1 R/2
    turned, rest = x.float()[..., : 2 * half], x[..., 2 * half :]
    a, b = turned.split(half, -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return torch.cat([turned, rest], -1)
