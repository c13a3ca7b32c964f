"""gpt-oss: GQA with sinks, biases and a window in every second layer; experts with biases, chosen by their logits and
weighted by a softmax over the chosen."""

from kernels.routing import Routing

from ..layers.moe import MoE, Router
from .decoder import Decoder


class GptOss(Decoder):
    """The target. config: weights.config.GptOssConfig."""

    def mlp(self, number, source, norm, ops, tp):
        """The layer's experts."""
        c, source = self.config, source.prefixed("mlp.")
        rule = Routing(c.experts_per_token, False, "logits")
        router = Router.declare(source, "router", c.experts, c.hidden, rule, bias=True)
        sizes = c.experts, c.hidden, c.expert_intermediate
        experts = self.experts_format.declare_woven(source.prefixed("experts."), *sizes)
        return MoE(norm, router, experts, c.activation, ops, tp)
