"""Qwen3-MoE: GQA with q/k norms, softmax routing over experts, optional dense layers."""

import torch

from kernels.routing import Routing

from ..cache import Rows
from ..layers import rope
from ..layers.embedding import Embedding, Head
from ..layers.gqa import GQA
from ..layers.mlp import MLP
from ..layers.moe import MoE
from ..layers.norm import Norm


class Layer:
    """One decoder layer."""

    def __init__(self, source, number, config, cos_sin, experts_format, ops, tp):
        at = source.prefixed(f"model.layers.{number}.")
        self.attention = GQA(
            at.prefixed("self_attn."),
            Norm(at, "input_layernorm", config.hidden, config.eps, ops),
            config.hidden,
            config.hidden,
            config,
            cos_sin,
            ops,
            tp,
            qk_norm=True,
            bias=config.attention_bias,
        )
        norm = Norm(at, "post_attention_layernorm", config.hidden, config.eps, ops)
        mlp = at.prefixed("mlp.")
        if number in config.dense_layers:
            self.mlp = MLP(mlp, norm, config.hidden, config.intermediate, config.activation, ops, tp)
        else:
            routing = Routing(config.experts_per_token, config.norm_topk_prob)
            sizes = (config.experts, config.expert_intermediate, routing, config.activation)
            self.mlp = MoE(mlp, norm, config.hidden, *sizes, experts_format, ops, tp)

    def __call__(self, x, batch, planes, page_size):
        return self.mlp(self.attention(x, x, batch, planes, page_size))


class Qwen3MoE:
    """The target.

    Args:
        config: weights.config.Qwen3MoeConfig; source: weights.Source; boundaries: B_k captured, ascending.
        length: positions the rotary table covers; experts_format: a class of weights.formats.
    """

    def __init__(self, config, source, boundaries, length, experts_format, ops, tp):
        self.config, self.boundaries = config, boundaries
        self.features = len(boundaries) * config.hidden
        self.cache_rows = Rows(config.layers, 2, config.kv_heads // tp.size, config.head_dim)
        self.embedding = Embedding(source, "model.embed_tokens", config.vocab, config.hidden, tp)
        cos_sin = rope.table(config.rope, config.head_dim, config.max_positions, length, source.device)
        self.layers = [Layer(source, i, config, cos_sin, experts_format, ops, tp) for i in range(config.layers)]
        norm = Norm(source, "model.norm", config.hidden, config.eps, ops)
        if config.tied:
            source.alias("lm_head.weight")
            weight = self.embedding.weight
        else:
            weight = source.take("lm_head.weight", (config.vocab, config.hidden), cut=0)
        self.head = Head(norm, weight, ops, tp)

    def forward(self, batch, cache):
        """-> residual stream after the last layer [B*T, D], features [B*T, F] in ascending order of boundary."""
        x = self.embedding(batch.tokens.reshape(-1))
        aux = [x] if 0 in self.boundaries else []
        for i, layer in enumerate(self.layers):
            x = layer(x, batch, cache.layer("target", i), cache.page_size)
            if i + 1 in self.boundaries:
                aux.append(x)
        return x, torch.cat(aux, -1) if aux else x[:, :0]
