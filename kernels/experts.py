"""Grouped expert MLP: each row through its chosen experts, combined in fp32 in the order of its choices."""

import torch

from .activation import ACTIVATIONS

ROWS_AN_EXPERT = 4  # from this many choices an expert the loop over all experts is cheaper than gathering weights


def _pairs(x, ids, gate_up, down, act):
    """One product per (row, choice): weights gathered, 2*I*D + I*D elements a pair. -> [N, k, D] fp32."""
    gate, up = torch.einsum("nd,nkid->nki", x.float(), gate_up[ids].float()).chunk(2, -1)
    hidden = act(gate, up).to(x.dtype).float()
    return torch.einsum("nki,nkdi->nkd", hidden, down[ids].float())


def _all_experts(x, ids, gate_up, down, act):
    """Every row through every expert, the chosen outputs kept: static shapes and no host, for many rows."""
    out = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
    for e in range(gate_up.shape[0]):
        gate, up = (x.float() @ gate_up[e].float().T).chunk(2, -1)
        y = act(gate, up).to(x.dtype).float() @ down[e].float().T
        out = torch.where((ids == e)[..., None], y[:, None], out)
    return out


def reference(x, ids, weights, gate_up, down, activation, residual=None):
    """Mixture of experts over rows.

    Args:
        x: [N, D] normed rows; ids [N, k] int64; weights [N, k] fp32.
        gate_up: [E, 2I, D], gate rows first; down: [E, D, I]; activation: a name of ACTIVATIONS.
        residual: [N, D] or None, added in fp32 after the combination.

    Returns:
        [N, D] in x's dtype.
    """
    outputs = _pairs if ids.numel() <= ROWS_AN_EXPERT * gate_up.shape[0] else _all_experts
    y = (outputs(x, ids, gate_up, down, ACTIVATIONS[activation]) * weights[..., None]).sum(1)
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)
