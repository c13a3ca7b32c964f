"""Configs of mixtures of experts with grouped-query attention besides Qwen's: Mixtral, GLM-4.5 and gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from weights.fields import Fields, architecture
from weights.keys import expert_groups, full_attention, windows
from weights.targets import MoeConfig, choices, decoder


def opened(raw: dict, where: str, name: str, kind: str) -> Fields:
    """The fields of a config of architecture `name` and model_type `kind`. Refused: another one."""
    fields = Fields(raw, where)
    architecture(fields, (name,))
    fields.choice("model_type", (kind,))
    return fields


def routed_by_logits(fields: Fields) -> None:
    """Refused: experts in groups, scaled or scored otherwise, or beside a shared one."""
    fields.unless("a shared expert", n_shared_experts=0)
    fields.unless("another routing", n_group=1, routed_scaling_factor=1.0, scoring_func="softmax")


def rotated_whole(fields: Fields, common: dict, name: str) -> None:
    """Refused: RoPE for some of a head's lanes only."""
    if common["rope"].partial != 1:
        raise fields.refuse("partial_rotary_factor", f"1.0 or no such key (not supported for {name})")


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoeConfig):
    """A Mixtral target: experts in every layer, softmax over all, the chosen weights renormalised; perhaps one window
    for all layers."""

    @classmethod
    def read(cls, raw: dict, where: str, generation: dict | None = None) -> MixtralConfig:
        """From config.json (and generation_config.json for its end ids). Refused: anything that would change the
        arithmetic."""
        name = "MixtralForCausalLM"
        fields = opened(raw, where, name, "mixtral")
        fields.unless("a bias", attention_bias=False, mlp_bias=False)
        routed_by_logits(fields)
        fields.unless("another routing", norm_topk_prob=True)
        fields.unless("layers of several kinds", layer_types=None, use_sliding_window=None, attention_chunk_size=None)
        common = decoder(fields, raw, generation, eps=1e-5)
        rotated_whole(fields, common, name)
        return cls(
            architecture=name,
            **common,
            **choices(fields, "num_local_experts", "num_experts"),
            expert_intermediate=fields.int("intermediate_size"),
            intermediate=None,
            dense_layers=(),
            max_positions=fields.int("max_position_embeddings", 131072),
            attention_bias=False,
            out_bias=False,
            windows=(fields.int("sliding_window", None),) * common["layers"],
            mlp_bias=False,
            qk_norm=False,
        )


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(MoeConfig):
    """A GLM-4.5 target: dense layers first, then experts chosen by sigmoid and correction, with a shared one."""

    score: str  # "sigmoid", corrected for the choice
    shared_intermediate: int  # width of all shared experts together, 0: none
    groups: int
    top_groups: int
    norm_topk_prob: bool
    scale: float  # of the routed experts' weights
    draft_layers: int  # multi-token prediction layers that the checkpoint may hold after its own

    @classmethod
    def read(cls, raw: dict, where: str, generation: dict | None = None) -> Glm4MoeConfig:
        """From config.json (and generation_config.json for its end ids). Refused: anything that would change the
        arithmetic."""
        name = "Glm4MoeForCausalLM"
        fields = opened(raw, where, name, "glm4_moe")
        fields.unless("an MLP bias", mlp_bias=False)
        fields.unless("interleaved rotary lanes", rope_interleave=False)
        fields.unless("experts in some layers only", moe_layer_freq=1)
        fields.unless("another routing", scoring_func="sigmoid", topk_method="noaux_tc")
        full_attention(fields)
        common = decoder(fields, raw, generation, eps=1e-5, partial=0.5)
        layers, width = common["layers"], fields.int("moe_intermediate_size")
        experts = choices(fields, "n_routed_experts", "num_experts", "num_local_experts")
        groups, top_groups = expert_groups(fields, **experts, default=1)
        return cls(
            architecture=name,
            **common,
            **experts,
            score="sigmoid",
            groups=groups,
            top_groups=top_groups,
            expert_intermediate=width,
            shared_intermediate=width * fields.int("n_shared_experts", 1, least=0),
            intermediate=fields.int("intermediate_size"),
            dense_layers=tuple(range(min(layers, fields.int("first_k_dense_replace", 1, least=0)))),
            norm_topk_prob=fields.bool("norm_topk_prob", True),
            scale=fields.float("routed_scaling_factor", 1.0),
            draft_layers=fields.int(fields.first("num_nextn_predict_layers", "num_mtp_layers"), 1, least=0),
            max_positions=fields.int("max_position_embeddings", 131072),
            attention_bias=fields.bool("attention_bias", False),
            out_bias=False,
            windows=(None,) * layers,
            mlp_bias=False,
            qk_norm=fields.bool("use_qk_norm", False),
        )


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoeConfig):
    """A gpt-oss target: sinks, a window in every second layer, biases everywhere, experts with a clamped activation."""

    @classmethod
    def read(cls, raw: dict, where: str, generation: dict | None = None) -> GptOssConfig:
        """From config.json (and generation_config.json for its end ids). Refused: anything that would change the
        arithmetic."""
        name = "GptOssForCausalLM"
        fields = opened(raw, where, name, "gpt_oss")
        routed_by_logits(fields)
        fields.choice("swiglu_limit", (7.0,), 7.0)
        fields.choice("swiglu_alpha", (1.702,), 1.702)
        common = decoder(fields, raw, generation, eps=1e-5)
        layers, bias = common["layers"], fields.bool("attention_bias", True)
        rotated_whole(fields, common, name)
        if not fields.has("layer_types"):  # the model's own default
            turns = ("sliding_attention", "full_attention")
            fields = Fields({**raw, "layer_types": [turns[i % 2] for i in range(layers)]}, where)
        return cls(
            architecture=name,
            **{**common, "activation": "clamped_swiglu"},
            **choices(fields, "num_local_experts", "num_experts"),
            expert_intermediate=fields.int("intermediate_size"),
            intermediate=None,
            dense_layers=(),
            max_positions=fields.int("max_position_embeddings", 131072),
            attention_bias=bias,
            out_bias=bias,
            windows=windows(fields, layers),
            sinks=True,
            mlp_bias=False,
            qk_norm=False,
        )
