"""EAGLE-3 head with latent attention (`Eagle3DeepseekV2ForCausalLM`, for Kimi and DeepSeek): everything else is as in
the Llama type."""

from ..layers.block import Block
from ..layers.mla import MLA, latent_rows
from ..layers.mlp import dense
from ..layers.norm import Norm
from .eagle3 import Eagle3


class LatentEagle3(Eagle3):
    """The drafter. config: weights.config.Eagle3Config with `latent`."""

    def rows(self, tp):
        """One latent row a position, the same on every rank."""
        return latent_rows(self.config)

    def layer(self, number, at, norm, width, cos_sin, ops, tp):
        """Latent attention and a plain MLP."""
        config = self.config
        attention = MLA(at.prefixed("self_attn."), norm, width, config, cos_sin, ops, tp)
        after = Norm(at, "post_attention_layernorm", config.hidden, config.eps, ops)
        return Block(attention, dense(at.prefixed("mlp."), after, config, ops, tp))
