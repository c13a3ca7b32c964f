"""Dense gated MLP with its norm and residual."""

from . import linear, norm
from .activation import ACTIVATIONS


def reference(x, norm_weight, eps, gate_up, down, activation, residual=None):
    """x [N, D], norm_weight [D], gate_up [2I, D] (gate first), down [D, I] -> [N, D] = MLP(norm(x)) (+ residual)."""
    gate, up = linear.reference(norm.reference(x, norm_weight, eps), gate_up).float().chunk(2, -1)
    return linear.reference(ACTIVATIONS[activation](gate, up).to(x.dtype), down, None, residual)
