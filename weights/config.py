"""Configs of the supported models, read from config.json: a key that changes the arithmetic is either understood or
named in a `Refused`, never skipped. What the keys mean follows the loaders of the models' own authors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weights.fields import REQUIRED, Fields, Refused, architecture, named, shown
from weights.rotary import Rope, rope

__all__ = ["Eagle3Config", "Fields", "Qwen3MoeConfig", "Refused", "Rope", "eos_ids", "named", "rope"]

EAGLE_KEYS = (
    "eagle_aux_hidden_state_layer_ids use_aux_hidden_state use_input_layernorm_in_first_layer use_last_layernorm "
    "use_mtp_layernorm next_layer_regular parallel_draft_step parallel_draft_heads_num_layers parallel_draft_heads "
    "norm_before_residual norm_before_fc fc_norm norm_output use_aux_norm return_hidden_post_norm eh_proj_before_attn"
).split()  # all that eagle_config may hold


def eos_ids(config: dict, generation: dict | None, where: str) -> tuple[int, ...]:
    """Ids that end a text: the union of config.json's and generation_config.json's `eos_token_id` (an id or a list),
    config first."""
    ids = Fields(config, where).ints("eos_token_id", ()) + Fields(generation or {}, where).ints("eos_token_id", ())
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """A Qwen3-MoE target: attention with a norm per head, softmax top-k routing, no shared expert."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_intermediate: int
    intermediate: int | None  # of the dense layers; None when there are none and the file does not say
    dense_layers: tuple[int, ...]  # numbers of the layers that have one plain MLP in place of experts
    norm_topk_prob: bool
    eps: float
    rope: Rope
    vocab: int
    tied: bool
    max_positions: int
    attention_bias: bool  # always False so far: True is refused
    eos_ids: tuple[int, ...]
    dtype: torch.dtype
    activation: str = "silu"

    @classmethod
    def read(cls, raw: dict, where: str, generation: dict | None = None) -> Qwen3MoeConfig:
        """From config.json (and generation_config.json for its end ids). Refused: anything that would change the
        arithmetic."""
        fields = Fields(raw, where)
        name = architecture(fields, ("Qwen3MoeForCausalLM",))
        fields.choice("model_type", ("qwen3_moe",))
        plain_weights(fields)
        full_attention(fields)
        fields.unless("a bias", attention_bias=False, mlp_bias=False)
        fields.unless("a shared expert", n_shared_experts=0, num_shared_experts=0, shared_expert_intermediate_size=0)
        fields.unless(
            "grouped or scaled routing", n_group=1, topk_group=1, routed_scaling_factor=1.0, scoring_func="softmax"
        )
        layers, heads, hidden = (
            fields.int("num_hidden_layers"),
            fields.int("num_attention_heads"),
            fields.int("hidden_size"),
        )
        experts = fields.int(fields.first("num_experts", "num_local_experts"))
        dense = _dense_layers(fields, layers)
        config = cls(
            architecture=name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads(fields, heads),
            head_dim=head_dim(fields, hidden, heads),
            experts=experts,
            experts_per_token=fields.int("num_experts_per_tok"),
            expert_intermediate=fields.int("moe_intermediate_size"),
            intermediate=fields.int("intermediate_size", REQUIRED if dense else None),
            dense_layers=dense,
            norm_topk_prob=fields.bool("norm_topk_prob", False),
            eps=fields.float("rms_norm_eps", 1e-6),
            rope=rope(fields),
            vocab=fields.int("vocab_size"),
            tied=fields.bool("tie_word_embeddings", False),
            max_positions=fields.int("max_position_embeddings", 32768),
            attention_bias=False,
            eos_ids=eos_ids(raw, generation, where),
            dtype=fields.dtype(),
            activation=fields.choice("hidden_act", ("silu",), "silu"),
        )
        if config.experts_per_token > experts:
            raise fields.refuse("num_experts_per_tok", f"at most the {experts} experts")
        return config


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head. The last switches of this list hold the one supported value; any other is refused in `read`."""

    architecture: str
    family: str  # "safeailab" | "specforge": whose layout the file has; a hint for the meaning of aux_ids
    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope: Rope
    vocab: int  # of the target
    draft_vocab: int
    layers: int
    aux_ids: tuple[int, ...] | None  # as written; weights.capture gives them a meaning
    aux_count: int
    tied: bool  # lm_head is the embedding: the file's flag, and both have the same vocabulary
    max_positions: int  # training length, not a serving limit
    dtype: torch.dtype
    use_aux: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    activation: str = "silu"

    @classmethod
    def read(cls, raw: dict, where: str) -> Eagle3Config:
        """From a head's config.json in the SafeAILab or SpecForge layout. Refused: other families and switches, by
        name."""
        fields = Fields(raw, where)
        fields.unless("the speculators layout", speculators_model_type=None, transformer_layer_config=None)
        name = architecture(fields, ("LlamaForCausalLM", "LlamaForCausalLMEagle3"))
        inner = fields.sub("eagle_config")
        family = "specforge" if name == "LlamaForCausalLMEagle3" or inner.raw else "safeailab"
        fields.choice("model_type", ("llama",), "llama")
        _plain_head(fields, inner)
        vocab = fields.int("vocab_size")
        # A plain Llama and an EAGLE-1 head have the same architecture as a SafeAILab head, but no such key.
        draft_vocab = fields.int("draft_vocab_size", REQUIRED if family == "safeailab" else vocab)
        if draft_vocab > vocab:
            raise fields.refuse("draft_vocab_size", f"at most vocab_size {vocab}")
        heads, hidden = fields.int("num_attention_heads"), fields.int("hidden_size")
        ids, count = _aux(fields, inner)
        return cls(
            architecture=name,
            family=family,
            hidden=hidden,
            target_hidden=fields.int("target_hidden_size", hidden),
            heads=heads,
            kv_heads=kv_heads(fields, heads),
            head_dim=head_dim(fields, hidden, heads),
            intermediate=fields.int("intermediate_size"),
            eps=fields.float("rms_norm_eps", 1e-6),
            rope=rope(fields, theta=10000.0),  # Llama's own default; official heads leave the key out
            vocab=vocab,
            draft_vocab=draft_vocab,
            layers=fields.choice("num_hidden_layers", (1,), 1),
            aux_ids=ids,
            aux_count=count,
            tied=fields.bool("tie_word_embeddings", False) and draft_vocab == vocab,
            max_positions=fields.int("max_position_embeddings", 2048),
            dtype=fields.dtype(),
            activation=fields.choice("hidden_act", ("silu",), "silu"),
        )

    def fits(self, hidden: int, vocab: int, where: str) -> None:
        """Refused unless made for a target of this width and vocabulary; `where` names the head's config."""
        if self.target_hidden != hidden:
            raise Refused(
                f"{where}: the head reads features of width {self.target_hidden}, the target's are {hidden} wide"
            )
        if self.vocab != vocab:
            raise Refused(f"{where}: key 'vocab_size' is {self.vocab}, the target has {vocab}")


def plain_weights(fields: Fields) -> None:
    """Refuses a quantised checkpoint, naming its method."""
    for key in ("quantization_config", "compression_config"):
        quantised = fields.sub(key)
        if quantised.raw:
            method = quantised.raw.get("quant_method", "unnamed")
            raise Refused(f"{fields.where}: key '{key}' has quant_method {shown(method)}, expected unquantised weights")


def full_attention(fields: Fields) -> None:
    """Refuses windows and chunks. Qwen files name a window size beside `use_sliding_window: false`: then it is not in
    use."""
    fields.unless("a sliding window", use_sliding_window=False)
    if fields.has("sliding_window") and fields.raw.get("use_sliding_window") is not False:
        raise fields.refuse("sliding_window", "null (a sliding window is not supported)")
    fields.unless("chunked attention", attention_chunk_size=None)
    kinds = fields.raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise fields.refuse("layer_types", "'full_attention' for every layer")


def kv_heads(fields: Fields, heads: int) -> int:
    count = fields.int("num_key_value_heads", heads)
    if heads % count:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    return count


def head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """The explicit key wins: it need not be hidden / heads."""
    if not fields.has("head_dim") and hidden % heads:
        raise fields.refuse("num_attention_heads", f"a divisor of hidden_size {hidden}, or the key 'head_dim'")
    size = fields.int("head_dim", hidden // heads)
    if size % 2:
        raise fields.refuse("head_dim", "an even number (rotary pairs)")
    return size


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    listed, step = fields.ints("mlp_only_layers", ()), fields.int("decoder_sparse_step", 1)
    if any(not 0 <= i < layers for i in listed):
        raise fields.refuse("mlp_only_layers", f"layer numbers below num_hidden_layers {layers}")
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def _aux(fields: Fields, inner: Fields) -> tuple[tuple[int, ...] | None, int]:
    """The ids as written (top level or eagle_config; both must agree) and the number of features."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids, nested = fields.ints(key, None), inner.ints(key, None)
    if ids is not None and nested is not None and ids != nested:
        raise fields.refuse(key, f"{list(nested)} as in key 'eagle_config.{key}'")
    ids = nested if ids is None else ids
    if ids is not None and not ids:
        raise (fields if fields.has(key) else inner).refuse(key, "at least one layer id")
    count = fields.int("num_aux_hidden_states", 3 if ids is None else len(ids))
    if ids is not None and count != len(ids):
        raise fields.refuse("num_aux_hidden_states", f"{len(ids)}, the number of layer ids")
    return ids, count


def _plain_head(fields: Fields, inner: Fields) -> None:
    """Refuses every switch that makes a head more than the plain single-layer EAGLE-3 layout."""
    plain_weights(fields)
    full_attention(fields)
    fields.unless("a bias", attention_bias=False, mlp_bias=False, bias=False)
    fields.unless("a scaled logit", logit_scale=1.0, final_logit_softcapping=None)
    fields.unless("block drafting", dflash_config=None, dspark_config=None, mask_token_id=None, pard_token=None)
    switches = dict(
        norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False, use_aux_norm=False
    )
    for place in (fields, inner):
        place.unless("this variant of EAGLE-3", **switches, use_aux_hidden_state=True, return_hidden_post_norm=False)
        place.unless("this variant of EAGLE-3", eh_proj_before_attn=False, parallel_draft_step=1)
    inner.unless("this variant of EAGLE-3", use_input_layernorm_in_first_layer=True, use_last_layernorm=True)
    inner.unless("this variant of EAGLE-3", use_mtp_layernorm=False, next_layer_regular=True)
    inner.unless("a parallel draft head", parallel_draft_heads_num_layers=0, parallel_draft_heads=None)
    for key in inner.raw:
        if key not in EAGLE_KEYS:
            raise inner.refuse(key, f"no such key (known: {', '.join(sorted(EAGLE_KEYS))})")
