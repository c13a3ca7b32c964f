"""DeepSeek-V3, Kimi-K2 and DeepSeek-V2-Lite: latent attention, dense layers first, then experts beside a shared one."""

from ..layers.block import Block
from ..layers.mla import MLA, latent_rows
from ..layers.mlp import dense
from ..layers.moe import beside_shared
from ..layers.norm import Norm
from .decoder import Decoder


class DeepseekV3(Decoder):
    """The target. config: weights.config.DeepseekConfig."""

    def __init__(self, config, source, *rest):
        for part in ("vision_tower.*", "mm_projector.*"):  # of a model that sees, its language model is served
            if config.prefix:
                source.ignore(part)
        source = source.prefixed(config.prefix)
        source.ignore("model.layers.*.self_attn.rotary_emb.inv_freq")
        for number in range(config.draft_layers):  # for multi-token prediction: not part of the model itself
            source.ignore(f"model.layers.{config.layers + number}.*")
        super().__init__(config, source, *rest)

    def rows(self, tp):
        """One latent row a position, the same on every rank."""
        return latent_rows(self.config)

    def layer(self, number, source, norm, cos_sin, ops, tp):
        """Latent attention, then experts or the one MLP of a dense layer."""
        c = self.config
        attention = MLA(source.prefixed("self_attn."), norm, c.hidden, c, cos_sin, ops, tp)
        norm = Norm(source, "post_attention_layernorm", c.hidden, c.eps, ops)
        source = source.prefixed("mlp.")
        if number in c.dense_layers:
            return Block(attention, dense(source, norm, c, ops, tp))
        return Block(attention, beside_shared(source, norm, c, self.experts_format, ops, tp))
