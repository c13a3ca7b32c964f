"""Qwen3-MoE: GQA with q/k norms, softmax routing over experts, optional dense layers."""

from kernels.routing import Routing

from ..layers.mlp import dense
from ..layers.moe import MoE, Router, projections
from .decoder import Decoder


class Qwen3MoE(Decoder):
    """The target. config: weights.config.Qwen3MoeConfig."""

    def mlp(self, number, source, norm, ops, tp):
        """Experts, or the one MLP of a dense layer."""
        c, source = self.config, source.prefixed("mlp.")
        if number in c.dense_layers:
            return dense(source, norm, c, ops, tp)
        router = Router.declare(source, "gate", c.experts, c.hidden, Routing(c.experts_per_token, c.norm_topk_prob))
        experts = self.experts_format.declare(source, projections, c.experts, c.hidden, c.expert_intermediate)
        return MoE(norm, router, experts, c.activation, ops, tp)
