"""GLM-4.5: GQA with biases and partly rotating heads, dense layers first, then experts chosen by sigmoid and
correction beside a shared one."""

from ..layers.mlp import dense
from ..layers.moe import beside_shared
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
        return beside_shared(source, norm, c, self.experts_format, ops, tp)
