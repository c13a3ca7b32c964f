"""Gated activations of the MLPs, by name."""

import torch.nn.functional as F
import triton
import triton.language as tl


def silu(gate, up):
    """SwiGLU: silu(gate) * up."""
    return F.silu(gate) * up


ACTIVATIONS = {"silu": silu}


@triton.jit
def gated(gate, up, NAME: tl.constexpr):
    """The activation of that name on fp32 tiles."""
    tl.static_assert(NAME == "silu")
    return gate / (1.0 + tl.exp(-gate)) * up
