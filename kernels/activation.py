"""Gated activations of the MLPs, by name."""

import torch.nn.functional as F
import triton
import triton.language as tl

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss; `gated` holds them too


def silu(gate, up):
    """SwiGLU: silu(gate) * up."""
    return F.silu(gate) * up


def clamped_swiglu(gate, up):
    """(up + 1) * gate * sigmoid(1.702 gate), the gate at most 7, up between -7 and 7 (gpt-oss)."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * (ALPHA * gate).sigmoid()


ACTIVATIONS = {"silu": silu, "clamped_swiglu": clamped_swiglu}


@triton.jit
def gated(gate, up, NAME: tl.constexpr):
    """The activation of that name on fp32 tiles. NaN stays NaN."""
    if NAME == "clamped_swiglu":
        gate, up = tl.where(gate > 7.0, 7.0, gate), tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        tl.static_assert(NAME == "silu")
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y
