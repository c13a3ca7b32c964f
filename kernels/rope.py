"""Rotary embedding. Half-split (Llama, Qwen): lane i pairs with lane i + R/2 of the first R lanes; or interleaved."""

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


def pairs(x, cos_sin, positions):
    """The same for interleaved pairs (DeepSeek): lane 2i with lane 2i + 1 of all R lanes."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)  # N 1 R/2
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
