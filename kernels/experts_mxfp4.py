"""Grouped expert MLP with biases over MXFP4 weights (weights.formats.mxfp4): gpt-oss.

A word holds eight codes of e2m1 in four pairs, the even column in the lower half. Sign and magnitude of a pair lie
where a pair of bf16 has its signs and the last bits of its exponents: the first pair's in the word itself, the next
ones' in the word shifted, in the word turned, and in the exclusive or of two shifts (shifts of those eight bits alone
do not fill a word). So one to three operations make a pair of codes, and a multiplication by the group's power weights.
"""

import torch

from . import experts, nibbles

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MASK = -0x7E3F7E40  # bits 6-8 of each half: magnitudes; its bit 15: signs


def paired(words):
    """int32 [...] -> [..., 4]: a pair of codes in each, the bits of MASK."""
    shifted = words, words << 6, words << 12 | words >> 20 & 0xFFF, words << 2 ^ words >> 6
    return torch.stack(shifted, -1) & MASK


def dequantise(packed, scale):
    """int32 [..., words], scale uint8 [..., groups] -> [..., 8 * words] fp32: code * 2^(scale - 127) of its group."""
    values = torch.tensor(CODES + tuple(-c for c in CODES), device=packed.device)
    halves = paired(packed)[..., None] >> torch.tensor((0, 16), device=packed.device, dtype=torch.int32)
    codes = (halves >> 6 & 7) + 8 * (halves >> 15 & 1)
    codes = codes.flatten(-3).unflatten(-1, (scale.shape[-1], -1))
    return torch.ldexp(values[codes], scale.int()[..., None] - 127).flatten(-2)


def reference(
    x, ids, weights, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, activation, residual=None
):
    """As kernels.experts.reference, for packed weights.

    Args:
        gate_up: [E, 2I, D / 8] int32, rows gate 0, up 0, gate 1, up 1 …; gate_up_scale: [E, 2I, D / 32] uint8;
        gate_up_bias: [E, 2I], like the rows.
        down: [E, D, I / 8] int32; down_scale: [E, D, I / 32] uint8; down_bias: [E, D] or None.
    """
    own, chosen = experts.touched(ids, len(down))
    wide, tall = dequantise(gate_up[own], gate_up_scale[own]), dequantise(down[own], down_scale[own])
    wide, bias = (torch.cat([m[:, ::2], m[:, 1::2]], 1) for m in (wide, gate_up_bias[own]))
    last = None if down_bias is None else down_bias[own]
    return experts.reference(x, chosen, weights, wide, tall, activation, residual, bias, last)


def fused(
    x, ids, weights, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, activation, residual=None
):
    """The twin of `reference`: weights are unpacked in registers; bf16 holds them without rounding."""
    wide, tall = (gate_up, gate_up_scale, gate_up_bias), (down, down_scale, down_bias)
    return nibbles.run("fp4", x, ids, weights, wide, tall, activation, residual, woven=True)


def specimens():
    """Compile specimens: gpt-oss and a toy."""
    sizes, names = ((2880, 2880, 128), (64, 32, 8)), ("*bf16", "*fp16", "*fp32")
    return nibbles.samples("fp4", sizes, names, "*u8", "clamped_swiglu", bias=True)
