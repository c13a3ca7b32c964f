"""Rotary tables: cosines and sines of every position, for all kinds of position scaling.

Formulas follow the public definitions of each kind (linear and dynamic NTK scaling, Llama 3, YaRN).
"""

import math

import torch


def _yarn(rope, dim, inverse, original):
    """Blend of interpolated and plain frequencies by wavelength (YaRN, arXiv 2309.00071, section 3.2)."""

    def lane_of(turns):  # the (fractional) lane whose wavelength makes `turns` turns over the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = lane_of(rope.beta_fast), lane_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def _llama3(rope, inverse, original):
    """Long wavelengths interpolated, short ones kept, a linear blend between (Llama 3.1)."""
    wavelength = 2 * math.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inverse / rope.factor + blend * inverse


def _term(rope, mscale):
    return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def magnitude(rope):
    """Factor on cosines and sines: given, or YaRN's ratio of its two mscale terms (DeepSeek), or 1."""
    if rope.attention_factor is not None or rope.kind != "yarn":
        return 1.0 if rope.attention_factor is None else rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _term(rope, rope.mscale) / _term(rope, rope.mscale_all_dim)
    return _term(rope, 1.0)


def sharpness(rope):
    """Factor on the softmax scale of latent attention: the square of YaRN's all-dim mscale term (DeepSeek), or 1."""
    return _term(rope, rope.mscale_all_dim) ** 2 if rope.kind == "yarn" and rope.mscale_all_dim else 1.0


def table(rope, head_dim, max_positions, length, device):
    """Rotary table of positions 0..length-1.

    Dynamic NTK scaling changes nothing inside the model's own context, which is all that the engine serves.

    Args:
        rope: weights.config.Rope; head_dim: lanes of a head, rope.partial of them rotate;
        max_positions: the context the config states, the original one where the rope settings name none.

    Returns:
        [length, R] fp32, cosines then sines.
    """
    dim = int(head_dim * rope.partial)
    original = rope.original_max_positions or max_positions
    inverse = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(rope, inverse, original)
    elif rope.kind == "yarn":
        inverse = _yarn(rope, dim, inverse, original)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse
    return (torch.cat([angles.cos(), angles.sin()], 1) * magnitude(rope)).float().to(device)
