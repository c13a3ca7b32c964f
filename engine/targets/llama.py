"""Llama and dense Qwen3: GQA, with q/k norms and biases as the config says, one MLP a layer."""

from ..layers.mlp import dense
from .decoder import Decoder


class Llama(Decoder):
    """The target. config: weights.config.LlamaConfig."""

    def mlp(self, number, source, norm, ops, tp):
        """The layer's MLP."""
        return dense(source.prefixed("mlp."), norm, self.config, ops, tp)
