"""DeepSeek-V3, Kimi-K2 and DeepSeek-V2-Lite: latent attention, dense layers first, then experts beside a shared one."""

from kernels.routing import Routing

from ..layers.block import Block
from ..layers.mla import MLA, latent_rows
from ..layers.mlp import MLP, dense
from ..layers.moe import MoE, Router, projections
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
        return Block(attention, self._mlp(number, source.prefixed("mlp."), norm, ops, tp))

    def _mlp(self, number, source, norm, ops, tp):
        c = self.config
        if number in c.dense_layers:
            return dense(source, norm, c, ops, tp)
        correction = "e_score_correction_bias" if c.score == "sigmoid" else None
        rule = Routing(c.experts_per_token, c.norm_topk_prob, c.score, c.groups, c.top_groups, 2, c.scale)
        router = Router.declare(source, "gate", c.experts, c.hidden, rule, correction=correction)
        experts = self.experts_format.declare(source, projections, c.experts, c.hidden, c.expert_intermediate)
        shared = None
        if c.shared_intermediate:
            at = source.prefixed("shared_experts.")
            shared = MLP(at, norm, c.hidden, c.shared_intermediate, c.activation, ops, tp)
        return MoE(norm, router, experts, c.activation, ops, tp, shared)
