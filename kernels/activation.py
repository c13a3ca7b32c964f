"""Gated activations of the MLPs, by name."""

import torch.nn.functional as F


def silu(gate, up):
    """SwiGLU: silu(gate) * up."""
    return F.silu(gate) * up


ACTIVATIONS = {"silu": silu}
