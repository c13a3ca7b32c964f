"""Configs of the supported targets, read from config.json: a key that changes the arithmetic is either understood or
named in a `Refused`, never skipped. What the keys mean follows the loaders of the models' own authors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weights.fields import REQUIRED, Fields, architecture
from weights.keys import full_attention, head_dim, kv_heads, plain_llama, rotary
from weights.rotary import Rope


def eos_ids(config: dict, generation: dict | None, where: str) -> tuple[int, ...]:
    """Ids that end a text: the union of config.json's and generation_config.json's `eos_token_id` (an id or a list),
    config first."""
    ids = Fields(config, where).ints("eos_token_id", ()) + Fields(generation or {}, where).ints("eos_token_id", ())
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What every target of grouped-query attention has."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int | None  # of plain MLPs; None when there are none and the file does not say
    eps: float
    rope: Rope
    vocab: int
    tied: bool
    max_positions: int
    attention_bias: bool  # of q, k and v
    out_bias: bool  # of o
    windows: tuple[int | None, ...]  # keys that each layer sees, None: all
    sinks: bool = False  # each head has a logit in the softmax's denominator
    mlp_bias: bool
    qk_norm: bool  # an RMS norm per head before rotary positions
    eos_ids: tuple[int, ...]
    dtype: torch.dtype
    activation: str = "silu"


def decoder(
    fields: Fields, raw: dict, generation: dict | None, *, eps: float = 1e-6, partial: float = 1.0
) -> dict[str, object]:
    """The keys that all targets write alike; `eps` and `partial` (share of a head that rotates) are what the model's
    own class takes where the file does not say."""
    plain_llama(fields)
    heads, hidden = fields.int("num_attention_heads"), fields.int("hidden_size")
    size = head_dim(fields, hidden, heads)
    return dict(
        layers=fields.int("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads(fields, heads),
        head_dim=size,
        eps=fields.float("rms_norm_eps", eps),
        rope=rotary(fields, size, partial=partial),
        vocab=fields.int("vocab_size"),
        tied=fields.bool("tie_word_embeddings", False),
        eos_ids=eos_ids(raw, generation, fields.where),
        dtype=fields.dtype(),
        activation=fields.choice("hidden_act", ("silu",), "silu"),
    )


@dataclass(frozen=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """What every mixture of experts has."""

    experts: int
    experts_per_token: int
    expert_intermediate: int
    dense_layers: tuple[int, ...]  # numbers of the layers that have one plain MLP in place of experts


def choices(fields: Fields, *names: str) -> dict[str, int]:
    """How many experts there are (under one of `names`) and how many a row chooses. Refused: more than there are."""
    experts, chosen = (
        fields.int(fields.first(*names)),
        fields.int(fields.first("num_experts_per_tok", "experts_per_token")),
    )
    if chosen > experts:
        raise fields.refuse("num_experts_per_tok", f"at most the {experts} experts")
    return dict(experts=experts, experts_per_token=chosen)


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MoeConfig):
    """A Qwen3-MoE target: attention with a norm per head, softmax top-k routing, no shared expert."""

    norm_topk_prob: bool

    @classmethod
    def read(cls, raw: dict, where: str, generation: dict | None = None) -> Qwen3MoeConfig:
        """From config.json (and generation_config.json for its end ids). Refused: anything that would change the
        arithmetic."""
        fields = Fields(raw, where)
        name = architecture(fields, ("Qwen3MoeForCausalLM",))
        fields.choice("model_type", ("qwen3_moe",))
        fields.unless("a bias", attention_bias=False, mlp_bias=False)
        fields.unless("a shared expert", n_shared_experts=0, num_shared_experts=0, shared_expert_intermediate_size=0)
        fields.unless(
            "grouped or scaled routing", n_group=1, topk_group=1, routed_scaling_factor=1.0, scoring_func="softmax"
        )
        full_attention(fields)
        common = decoder(fields, raw, generation)
        dense = _dense_layers(fields, common["layers"])
        return cls(
            architecture=name,
            **common,
            **choices(fields, "num_experts", "num_local_experts"),
            expert_intermediate=fields.int("moe_intermediate_size"),
            intermediate=fields.int("intermediate_size", REQUIRED if dense else None),
            dense_layers=dense,
            norm_topk_prob=fields.bool("norm_topk_prob", False),
            max_positions=fields.int("max_position_embeddings", 32768),
            attention_bias=False,
            out_bias=False,
            windows=(None,) * common["layers"],
            mlp_bias=False,
            qk_norm=True,
        )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A dense target: Llama, or Qwen3 with its norm per head."""

    @classmethod
    def read(cls, raw: dict, where: str, generation: dict | None = None) -> LlamaConfig:
        """From config.json (and generation_config.json for its end ids). Refused: anything that would change the
        arithmetic, and a draft head in a target's place."""
        fields = Fields(raw, where)
        name = architecture(fields, ("LlamaForCausalLM", "Qwen3ForCausalLM"))
        fields.choice("model_type", {"LlamaForCausalLM": ("llama",), "Qwen3ForCausalLM": ("qwen3",)}[name])
        fields.unless("a draft head in the place of a target", draft_vocab_size=None, eagle_config=None)
        qwen = name == "Qwen3ForCausalLM"
        full_attention(fields)
        common, bias = decoder(fields, raw, generation), fields.bool("attention_bias", False)
        if common["rope"].partial != 1:
            raise fields.refuse("partial_rotary_factor", f"1.0 or no such key (not supported for {name})")
        if qwen:
            fields.unless("an MLP bias", mlp_bias=False)
        return cls(
            architecture=name,
            **common,
            intermediate=fields.int("intermediate_size"),
            max_positions=fields.int("max_position_embeddings", 32768 if qwen else 2048),
            attention_bias=bias,
            out_bias=bias,
            windows=(None,) * common["layers"],
            mlp_bias=fields.bool("mlp_bias", False),
            qk_norm=qwen,
        )


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    listed, step = fields.ints("mlp_only_layers", ()), fields.int("decoder_sparse_step", 1)
    if any(not 0 <= i < layers for i in listed):
        raise fields.refuse("mlp_only_layers", f"layer numbers below num_hidden_layers {layers}")
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)
