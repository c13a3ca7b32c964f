"""The draft head's input: norm(embedding) ‖ norm(hidden), embedding first."""

import torch

from . import norm


def reference(embedding, embed_norm, hidden, hidden_norm, eps):
    """embedding [N, D], hidden [N, D], two norm weights [D] -> [N, 2D]."""
    return torch.cat([norm.reference(embedding, embed_norm, eps), norm.reference(hidden, hidden_norm, eps)], -1)
