"""Grouped expert MLP over INT4 weights in groups, packed as compressed-tensors packs them (weights.formats.int4)."""

import torch

from . import experts, linear, nibbles


def dequantise(packed, scale):
    """int32 [..., words], scale [..., groups] -> [..., 8 * words] fp32: (code - 8) * scale of its group."""
    shifts = 4 * torch.arange(8, device=packed.device, dtype=torch.int32)
    q = (packed[..., None] >> shifts & 15).flatten(-2) - 8
    return (q.unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]).flatten(-2)


def reference(
    x, ids, weights, gate_up, gate_up_scale, down, down_scale, activation, residual=None, hidden=None, shared=None
):
    """As kernels.experts.reference, for packed weights; beside them, perhaps, a shared expert.

    Args:
        gate_up: [E, 2I, D / 8] int32, gate rows first; gate_up_scale: [E, 2I, D / group].
        down: [E, D, I / 8] int32; down_scale: [E, D, I / group].
        hidden: [N, S] of the shared expert (kernels.routing) or None; shared: its [D, S], added last.
    """
    own, chosen = experts.touched(ids, len(down))
    wide, tall = dequantise(gate_up[own], gate_up_scale[own]), dequantise(down[own], down_scale[own])
    y = experts.reference(x, chosen, weights, wide, tall, activation, residual)
    return y if hidden is None else linear.reference(hidden, shared, None, y)


def fused(
    x, ids, weights, gate_up, gate_up_scale, down, down_scale, activation, residual=None, hidden=None, shared=None
):
    """The twin of `reference`: weights are unpacked in registers; in bf16 each is rounded once."""
    wide, tall = (gate_up, gate_up_scale, None), (down, down_scale, None)
    y = nibbles.run("int4", x, ids, weights, wide, tall, activation, residual)
    return y if hidden is None else linear.fused(hidden, shared, None, y)


def specimens():
    """Compile specimens: Kimi-K2.5 whole and one of eight ranks of it, and a toy."""
    sizes = ((7168, 2048, 384), (7168, 256, 384), (64, 32, 8))
    return nibbles.samples("int4", sizes, ("*bf16", "*fp16", "*fp32"), None, "silu")
