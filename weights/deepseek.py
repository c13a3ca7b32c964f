"""Configs of targets with latent attention: DeepSeek-V2-Lite, -V3 and -R1, Kimi-K2, and the text model of Kimi-K2.5,
whose keys stand under `text_config`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weights.fields import Fields, architecture
from weights.keys import expert_groups, full_attention, plain_llama
from weights.latent import Latent, latent_rope
from weights.rotary import Rope
from weights.targets import choices, eos_ids

NESTED = {"KimiK25ForConditionalGeneration": "text_config"}  # architecture -> key of its language model's settings
KINDS = {  # architecture -> `model_type` of the language model
    "DeepseekV2ForCausalLM": ("deepseek_v2",),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
    "KimiK25ForConditionalGeneration": ("kimi_k2", "deepseek_v3"),
}


def language(raw: dict, where: str) -> Fields:
    """The settings of a config's language model: the config itself, or of a model with vision its text model's part."""
    fields = Fields(raw, where)
    names = raw.get("architectures")
    key = NESTED.get(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if key is None:
        return fields
    inner = fields.sub(key)
    if not inner.raw:
        raise fields.refuse(key, "the settings of the language model")
    return inner


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """A target with latent attention: dense layers first, then experts beside a shared one."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    latent: Latent
    intermediate: int  # of the dense layers
    eps: float
    rope: Rope
    vocab: int
    tied: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    dtype: torch.dtype
    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int  # width of all shared experts together, 0: none
    dense_layers: tuple[int, ...]
    score: str  # "sigmoid", with a correction of the choice (V3, Kimi), or "softmax" (V2-Lite)
    norm_topk_prob: bool
    groups: int
    top_groups: int
    scale: float  # of the routed experts' weights
    draft_layers: int  # multi-token prediction layers that the checkpoint may hold after its own
    prefix: str = ""  # of the language model's tensors
    activation: str = "silu"
    mlp_bias: bool = False

    @property
    def head_dim(self) -> int:
        """Lanes of a head that rotate."""
        return self.latent.turned

    @classmethod
    def read(cls, raw: dict, where: str, generation: dict | None = None) -> DeepseekConfig:
        """From config.json (and generation_config.json for its end ids). Refused: anything that would change the
        arithmetic."""
        name, fields = architecture(Fields(raw, where), tuple(KINDS)), language(raw, where)
        fields.choice("model_type", KINDS[name])
        full_attention(fields)
        plain_llama(fields)
        for place in (fields, Fields(raw, where)):
            place.unless("tied embeddings", tie_word_embeddings=False)
        fields.unless("a bias", attention_bias=False, mlp_bias=False)
        fields.unless("experts in some layers only", moe_layer_freq=1)
        heads, layers, latent = fields.int("num_attention_heads"), fields.int("num_hidden_layers"), Latent.read(fields)
        fields.unless("keys of fewer heads", num_key_value_heads=heads)
        width = fields.int("moe_intermediate_size")
        return cls(
            architecture=name,
            layers=layers,
            hidden=fields.int("hidden_size"),
            heads=heads,
            latent=latent,
            intermediate=fields.int("intermediate_size"),
            eps=fields.float("rms_norm_eps", 1e-6),
            rope=latent_rope(fields, latent),
            vocab=fields.int("vocab_size"),
            tied=False,
            max_positions=fields.int("max_position_embeddings"),
            eos_ids=eos_ids(fields.raw, generation, where),
            dtype=(fields if fields.has("torch_dtype") or fields.has("dtype") else Fields(raw, where)).dtype(),
            expert_intermediate=width,
            shared_intermediate=width * fields.int("n_shared_experts", 0, least=0),
            dense_layers=tuple(range(min(layers, fields.int("first_k_dense_replace", least=0)))),
            draft_layers=fields.int(fields.first("num_nextn_predict_layers", "num_mtp_layers"), 0, least=0),
            prefix="language_model." if name in NESTED else "",
            activation=fields.choice("hidden_act", ("silu",), "silu"),
            **_routing(fields, softmax=name == "DeepseekV2ForCausalLM"),
        )


def _routing(fields: Fields, softmax: bool) -> dict:
    """How experts are chosen. Refused: what the model's own loaders do not compute, or compute differently."""
    found = choices(fields, "n_routed_experts", "num_experts", "num_local_experts")
    common = {**found, "scale": fields.float("routed_scaling_factor", 1.0)}
    if softmax:
        fields.choice("scoring_func", ("softmax",), "softmax")
        fields.choice("topk_method", ("greedy",), "greedy")
        fields.unless("routing in groups", n_group=1, topk_group=1)
        fields.unless("renormalised weights of softmax routing (its loaders disagree)", norm_topk_prob=False)
        return common | {"score": "softmax", "norm_topk_prob": False, "groups": 1, "top_groups": 1}
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    groups, kept = expert_groups(fields, **found)
    norm = fields.bool("norm_topk_prob")
    return common | {"score": "sigmoid", "norm_topk_prob": norm, "groups": groups, "top_groups": kept}
