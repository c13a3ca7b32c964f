"""Mixtral: GQA, perhaps with a window, and softmax routing over experts in every layer."""

from kernels.routing import Routing
from weights.formats import ExpertNames

from ..layers.moe import MoE, Router
from .decoder import Decoder


def _names(expert):
    return ExpertNames(gate=f"experts.{expert}.w1", up=f"experts.{expert}.w3", down=f"experts.{expert}.w2")


class Mixtral(Decoder):
    """The target. config: weights.config.MixtralConfig."""

    def mlp(self, number, source, norm, ops, tp):
        """The layer's experts."""
        c, source = self.config, source.prefixed("block_sparse_moe.")
        router = Router.declare(source, "gate", c.experts, c.hidden, Routing(c.experts_per_token, True))
        experts = self.experts_format.declare(source, _names, c.experts, c.hidden, c.expert_intermediate)
        return MoE(norm, router, experts, c.activation, ops, tp)
