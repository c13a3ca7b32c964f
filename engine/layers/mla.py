"""Latent attention block (MLA): norm, projections, cache row, absorbed attention, output projection, residual.

A position keeps one row for all heads, latent and rotated key side by side; heads are cut over ranks, rows are on each.
"""

from weights.source import Cut

from ..cache import Rows
from .linear import RowParallel
from .norm import Norm
from .rope import sharpness


def latent_rows(config):
    """cache.Rows of a model with config.latent: one plane, one row a position."""
    return Rows(config.layers, 1, 1, config.latent.rank + config.latent.turned)


class MLA:
    """Attention of one decoder layer.

    Args:
        source: weights.Source prefixed with the attention module's name.
        norm: layers.norm.Norm before the projections, or None where the input comes normed.
        width: columns of the projections' input.
        config: hidden (residual width), heads, eps, rope, latent (weights.latent.Latent).
        cos_sin: rotary table [L, latent.turned].
    """

    def __init__(self, source, norm, width, config, cos_sin, ops, tp):
        self.norm, self.ops, self.cos_sin, self.eps = norm, ops, cos_sin, config.eps
        sizes, heads, whole = config.latent, config.heads, Cut(0, config.heads)  # whole heads to each rank
        rows = heads * (sizes.plain + sizes.turned)
        shared = ("kv_a_proj_with_mqa.weight", (sizes.rank + sizes.turned, width), None)
        if sizes.q_rank is None:
            self.down = source.concat([("q_proj.weight", (rows, width), whole), shared])
            self.q_norm = self.q_up = None
        else:
            self.down = source.concat([("q_a_proj.weight", (sizes.q_rank, width), None), shared])
            self.q_norm = Norm(source, "q_a_layernorm", sizes.q_rank, config.eps, ops).weight
            self.q_up = source.take("q_b_proj.weight", (rows, sizes.q_rank), cut=whole)
        self.kv_norm = Norm(source, "kv_a_layernorm", sizes.rank, config.eps, ops).weight
        up = source.take("kv_b_proj.weight", (heads * (sizes.plain + sizes.value), sizes.rank), cut=whole)
        up = up.view(heads // tp.size, sizes.plain + sizes.value, sizes.rank)
        self.k_up, self.v_up = up.split([sizes.plain, sizes.value], 1)
        self.out = RowParallel(source, "o_proj", config.hidden, heads * sizes.value, ops, tp)
        self.scale = (sizes.plain + sizes.turned) ** -0.5 * sharpness(config.rope)

    def __call__(self, x, residual, batch, planes, page_size, after):
        """x: [N, width] (the residual itself where this block norms it); residual: [N, hidden]; after: the Norm that
        follows -> [N, hidden], and what `after` makes of it or None (TP.add_and_norm); the rows batch.wanted alone
        where it names any."""
        norm_weight = None if self.norm is None else self.norm.weight
        q = self.ops.mla_qkv(
            x,
            norm_weight,
            self.eps,
            self.down,
            self.q_norm,
            self.q_up,
            self.kv_norm,
            self.k_up,
            self.cos_sin,
            batch.positions,
            batch.index,
            batch.pages,
            page_size,
            planes[0],
        )
        q, residual, prefix = batch.going_on(q, residual)
        y = self.ops.mla_attention(q, planes[0], self.v_up, batch.pages, prefix, batch.tree, page_size, self.scale)
        return self.out.and_norm(y, residual, after)
