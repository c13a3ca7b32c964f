"""A decoder layer: attention, then an MLP or experts, each with its norm and residual."""

from .gqa import GQA
from .norm import Norm


class Block:
    """Attention over `x` added to `residual`, then the MLP.

    attention: layers.gqa.GQA or layers.mla.MLA; mlp: any of layers.mlp or layers.moe.
    """

    def __init__(self, attention, mlp):
        self.attention, self.mlp = attention, mlp

    def __call__(self, x, residual, batch, planes, page_size):
        """x [N, width], the residual itself in a layer that norms it; residual [N, D] -> [N, D]."""
        return self.mlp(*self.attention(x, residual, batch, planes, page_size, self.mlp.norm))


def block(source, norm, width, config, cos_sin, mlp, ops, tp, *, out_bias, window=None, sinks=False):
    """The layer whose names begin with the source's prefix.

    Args:
        norm: before the projections, None where their input [N, width] comes normed.
        mlp: function(source, the MLP's norm) -> the MLP.
    """
    attention = source.prefixed("self_attn.")
    attention = GQA(attention, norm, width, config, cos_sin, ops, tp, out_bias=out_bias, window=window, sinks=sinks)
    norm = Norm(source, "post_attention_layernorm", config.hidden, config.eps, ops)
    return Block(attention, mlp(source, norm))
