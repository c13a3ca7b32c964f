"""Qwen3-MoE: GQA with q/k norms, softmax routing over experts, optional dense layers."""

from kernels.routing import Routing

from ..layers.mlp import dense
from ..layers.moe import MoE
from .decoder import Decoder


class Qwen3MoE(Decoder):
    """The target. config: weights.config.Qwen3MoeConfig."""

    def mlp(self, number, source, norm, ops, tp):
        """Experts, or the one MLP of a dense layer."""
        c = self.config
        if number in c.dense_layers:
            return dense(source, norm, c, ops, tp)
        routing = Routing(c.experts_per_token, c.norm_topk_prob)
        sizes = (c.experts, c.expert_intermediate, routing, c.activation)
        return MoE(source, norm, c.hidden, *sizes, self.experts_format, ops, tp)
