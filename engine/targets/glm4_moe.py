"""GLM-4.5: GQA with biases and partly rotating heads, dense layers first, then experts chosen by sigmoid and
correction beside a shared one."""

from kernels.routing import Routing

from ..layers.mlp import MLP, dense
from ..layers.moe import MoE, Router, projections
from .decoder import Decoder


class Glm4MoE(Decoder):
    """The target. config: weights.config.Glm4MoeConfig."""

    def __init__(self, config, source, *rest):
        super().__init__(config, source, *rest)
        for number in range(config.draft_layers):  # for multi-token prediction: not part of the model itself
            source.ignore(f"model.layers.{config.layers + number}.*")

    def mlp(self, number, source, norm, ops, tp):
        """Experts, or the one MLP of a dense layer."""
        c, source = self.config, source.prefixed("mlp.")
        if number in c.dense_layers:
            return dense(source, norm, c, ops, tp)
        rule = Routing(c.experts_per_token, c.norm_topk_prob, "sigmoid", c.groups, c.top_groups, 2, c.scale)
        router = Router.declare(source, "gate", c.experts, c.hidden, rule, correction="e_score_correction_bias")
        experts = self.experts_format.declare(source, projections, c.experts, c.hidden, c.expert_intermediate)
        shared = None
        if c.shared_intermediate:
            at = source.prefixed("shared_experts.")
            shared = MLP(at, norm, c.hidden, c.shared_intermediate, c.activation, ops, tp)
        return MoE(norm, router, experts, c.activation, ops, tp, shared)
