"""Grouped-query attention block: norm, projections, cache write, attention, output projection, residual."""

from weights.source import Cut

from .linear import RowParallel
from .norm import Norm


class GQA:
    """Attention of one decoder layer, heads cut over ranks.

    Args:
        source: weights.Source prefixed with the attention module's name.
        norm: layers.norm.Norm before the projections, or None where the input comes normed.
        width: columns of the projections' input.
        config: hidden (residual width), heads, kv_heads, head_dim, eps, qk_norm, attention_bias (of q, k and v).
        cos_sin: rotary table [L, R]; out_bias: the output projection has one too; window: keys seen, None: all;
        sinks: each query head has a logit that joins the softmax's denominator.
    """

    def __init__(self, source, norm, width, config, cos_sin, ops, tp, *, out_bias, window=None, sinks=False):
        self.norm, self.ops, self.cos_sin, self.eps, self.window = norm, ops, cos_sin, config.eps, window
        self.heads, self.kv_heads, self.head_dim = config.heads // tp.size, tp.share(config.kv_heads), config.head_dim
        heads = list(zip("qkv", (config.heads, config.kv_heads, config.kv_heads), strict=True))
        # whole heads to each rank; where ranks outnumber the keys' heads, several hold the same
        parts = [(f"{n}_proj", h * config.head_dim, Cut(0, h, shared=n != "q")) for n, h in heads]
        self.weight = source.concat([(f"{n}.weight", (rows, width), cut) for n, rows, cut in parts])
        self.bias = (
            source.concat([(f"{n}.bias", (rows,), cut) for n, rows, cut in parts]) if config.attention_bias else None
        )
        self.q_norm, self.k_norm = (
            Norm(source, f"{n}_norm", config.head_dim, config.eps, ops).weight if config.qk_norm else None for n in "qk"
        )
        self.sinks = source.take("sinks", (config.heads,), cut=0) if sinks else None
        rows = config.heads * config.head_dim
        self.out = RowParallel(source, "o_proj", config.hidden, rows, ops, tp, bias=out_bias)
        self.scale = config.head_dim**-0.5

    def __call__(self, x, residual, batch, planes, page_size, after):
        """x: [N, width] (the residual itself where this block norms it); residual: [N, hidden]; after: the Norm that
        follows -> [N, hidden], and what `after` makes of it or None (TP.add_and_norm); the rows batch.wanted alone
        where it names any."""
        norm_weight = None if self.norm is None else self.norm.weight
        weights = self.weight, self.bias, self.q_norm, self.k_norm, self.cos_sin
        written = batch.positions, batch.index, batch.pages, page_size, *planes
        how = self.scale, self.window, self.sinks
        if batch.wanted is None:
            y = self.ops.attend(x, norm_weight, self.eps, *weights, *written, batch.prefix, batch.tree, *how)
        else:
            q = self.ops.qkv(x, norm_weight, self.eps, *weights, *written)
            q, residual, prefix = batch.going_on(q, residual)
            y = self.ops.attention(q, *planes, batch.pages, prefix, None, page_size, *how)
        return self.out.and_norm(y, residual, after)
