"""Configs of EAGLE-3 heads: of the Llama type as SafeAILab, SpecForge, ModelOpt, NeMo, vLLM and speculators write
them, of latent attention (MLA) as TorchSpec and ModelOpt do. Each switch is read under every name, each default as the
family's own reader has it, and everything else refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from weights.fields import REQUIRED, Fields, Refused, shown
from weights.keys import head_dim, kv_heads, plain_llama, plain_weights, rotary, windows
from weights.latent import Latent, latent_head
from weights.rotary import Rope

FAMILIES = {  # architecture -> whose layout the file has
    "LlamaForCausalLM": "safeailab",
    "LlamaForCausalLMEagle3": "specforge",
    "LlamaForCausalLMEagle3Deep": "modelopt",
    "LlamaForCausalLMEagle": "modelopt",
    "LlamaEagle3DraftModel": "nemo",
    "Eagle3Speculator": "speculators",
    "Eagle3DraftModel": "speculators",
    "Eagle3LlamaForCausalLM": "vllm",
    "Eagle3Qwen3ForCausalLM": "vllm",
    "Eagle3MiniMaxM2ForCausalLM": "vllm",
    "Eagle3Qwen2_5vlForCausalLM": "vllm",
    "Eagle3Qwen3vlForCausalLM": "vllm",
    "Eagle3DeepseekV2ForCausalLM": "torchspec",
    "Eagle3DeepseekV3ForCausalLM": "torchspec",
}
LATENT = tuple(name for name, family in FAMILIES.items() if family == "torchspec")  # heads with latent attention
STRANGERS = (  # architectures of drafts that this engine does not run: pattern, what they are
    (r"^P-?eagle", "P-EAGLE heads (all positions in one pass)"),
    (r"dflash|dspark", "block drafters (DFlash, DSpark)"),
    (r"mtp|nextn", "multi-token prediction modules (MTP)"),
    (r"medusa", "Medusa heads"),
    (r"deepseek|kimi", "other drafts for DeepSeek and Kimi"),
    (r"^eagle(?!3)|eagle$|eagledraft", "EAGLE-1 and EAGLE-2 heads"),
)
_KINDS = {  # latent attention or not -> `model_type` of the layer: those that may be, the default
    False: (("llama", "qwen3", "llama4_text"), "llama"),
    True: (("kimi_k2", "deepseek_v3", "deepseek_v2"), "deepseek_v3"),
}
MODELOPT_KEYS = (
    "use_input_layernorm_in_first_layer use_last_layernorm use_mtp_layernorm next_layer_regular parallel_draft_step "
    "parallel_draft_heads_num_layers parallel_draft_heads return_hidden_post_norm eh_proj_before_attn has_lm_head"
).split()
EAGLE_KEYS = (  # all that eagle_config may hold
    "eagle_aux_hidden_state_layer_ids use_aux_hidden_state norm_before_residual norm_before_fc fc_norm norm_output "
    "use_aux_norm"
).split() + MODELOPT_KEYS
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head."""

    architecture: str
    family: str  # a value of FAMILIES; "modelopt" also for a file that has ModelOpt's keys
    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # with latent attention the lanes that rotate
    latent: Latent | None  # None: grouped-query attention
    intermediate: int
    eps: float
    rope: Rope
    vocab: int  # of the target
    draft_vocab: int
    layers: int
    windows: tuple[int | None, ...]  # keys that each layer sees, None: all
    aux_ids: tuple[int, ...] | None  # as written; weights.capture gives them a meaning
    aux_count: int  # features that are fused
    fusion: str  # "plain", "normed" (one norm over all), "per-feature" (a norm each), "final" (no fusion at all)
    fc_bias: bool
    norm_before_residual: bool  # the residual stream starts with the normed hidden
    recycle: str  # "pre-norm" or "post-norm": the hidden that the next step gets
    tied: bool  # lm_head is the embedding: the file's flag, and both have the same vocabulary
    max_positions: int  # training length, not a serving limit
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    logit_scale: float
    dtype: torch.dtype
    activation: str
    guesses: tuple[tuple[str, str], ...]  # what the file leaves open: (field above, how it is read in a sentence)

    @classmethod
    def read(cls, raw: dict, where: str) -> Eagle3Config:
        """From a head's config.json. Refused: other kinds of drafts, and switches that are not understood, by name."""
        fields = Fields(raw, where)
        inner = fields.sub("eagle_config")
        name, family = _layout(fields, inner)
        layer = fields.sub("transformer_layer_config") if family == "speculators" else fields
        _only_known(fields, inner, layer)
        kind = layer.choice("model_type", *_KINDS[name in LATENT])
        vocab = layer.int("vocab_size")
        draft_vocab = fields.int("draft_vocab_size", _default_vocabulary(name, family, vocab))
        if draft_vocab > vocab:
            raise fields.refuse("draft_vocab_size", f"at most vocab_size {vocab}")
        hidden, layers = layer.int("hidden_size"), layer.int("num_hidden_layers", 1)
        attention = latent_head if name in LATENT else _grouped
        ids, count, fusion = _features(fields, inner)
        residual, residual_guess = _residual(fields, inner, family)
        recycle, recycle_guess = _recycle(fields, inner, family)
        guesses = (("norm_before_residual", residual_guess), ("recycle", recycle_guess))
        return cls(
            architecture=name,
            family=family,
            hidden=hidden,
            target_hidden=fields.int("target_hidden_size", hidden),
            **attention(layer, hidden, layers),
            intermediate=layer.int("intermediate_size_mlp" if kind == "llama4_text" else "intermediate_size"),
            eps=layer.float("rms_norm_eps", 1e-6),
            vocab=vocab,
            draft_vocab=draft_vocab,
            layers=layers,
            aux_ids=ids,
            aux_count=count,
            fusion=fusion,
            fc_bias=layer.bool("bias", False),
            norm_before_residual=residual,
            recycle=recycle,
            tied=layer.bool("tie_word_embeddings", False) and draft_vocab == vocab,
            max_positions=layer.int("max_position_embeddings", 2048),
            mlp_bias=layer.bool("mlp_bias", False),
            qk_norm="qwen3" in kind or name == "Eagle3Qwen3ForCausalLM",
            logit_scale=layer.float("logit_scale", 1.0),
            dtype=(fields if fields.has("torch_dtype") or fields.has("dtype") else layer).dtype(),
            activation=layer.choice("hidden_act", ("silu",), "silu"),
            guesses=tuple((field, guess) for field, guess in guesses if guess),
        )

    def fits(self, hidden: int, vocab: int, where: str) -> None:
        """Refused unless made for a target of this width and vocabulary; `where` names the head's config."""
        if self.target_hidden != hidden:
            raise Refused(
                f"{where}: the head reads features of width {self.target_hidden}, the target's are {hidden} wide"
            )
        if self.vocab != vocab:
            raise Refused(f"{where}: key 'vocab_size' is {self.vocab}, the target has {vocab}")
        if self.fusion == "final" and self.hidden != hidden:
            raise Refused(f"{where}: the head takes the target's hidden of width {hidden} as its own of {self.hidden}")

    def reaches(self, positions: int, where: str) -> None:
        """Refused where the head's rotary angles at so many positions would depend on how the loader reads the file:
        dynamic scaling past the head's own length."""
        if self.rope.kind == "dynamic" and positions > self.max_positions:
            raise Refused(
                f"{where}: key 'rope_scaling' is of kind 'dynamic' and the head was made for {self.max_positions} "
                f"positions, {positions} are served; lower max_context"
            )


def _grouped(layer: Fields, hidden: int, layers: int) -> dict:
    """The keys of grouped-query attention."""
    heads = layer.int("num_attention_heads")
    size = head_dim(layer, hidden, heads)
    layer.unless("latent attention (MLA) under this architecture", kv_lora_rank=None, q_lora_rank=None)
    layer.unless("experts in a head", num_experts=0, num_local_experts=0, n_routed_experts=0)
    layer.unless("a bias of q, k and v under this name", qkv_bias=False)
    return dict(
        heads=heads,
        kv_heads=kv_heads(layer, heads),
        head_dim=size,
        latent=None,
        rope=rotary(layer, size, theta=10000.0),  # Llama's own default; official heads leave the key out
        windows=windows(layer, layers),
        attention_bias=layer.bool("attention_bias", False),
    )


def _layout(fields: Fields, inner: Fields) -> tuple[str, str]:
    """(architecture, family). Refused: every other kind of draft, by what it is."""
    names = fields.raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    stranger = next((what for pattern, what in STRANGERS if re.search(pattern, str(name), re.IGNORECASE)), None)
    if name in LATENT:
        stranger = None
    if name == "LlamaForCausalLMEagle" and _switch(fields, inner, "use_aux_hidden_state") is False:
        stranger = None  # an EAGLE-3 layer over the target's one final hidden, not EAGLE-1
    if stranger or name not in FAMILIES:
        supported = f"EAGLE-3 heads: {', '.join(map(shown, FAMILIES))}"
        raise fields.refuse("architectures", f"{supported}" + (f" ({stranger} are not supported)" if stranger else ""))
    family = FAMILIES[name]
    if family == "safeailab" and inner.raw:
        family = "specforge"
    if family == "specforge" and any(inner.has(key) for key in MODELOPT_KEYS):
        family = "modelopt"
    return name, family


def _default_vocabulary(name: str, family: str, vocab: int) -> object:
    """A plain Llama and an EAGLE-1 head have the same architecture as a SafeAILab head, but no draft_vocab_size;
    speculators' own class has 32000, all others the target's vocabulary."""
    if name == "LlamaForCausalLM":
        return REQUIRED if family == "safeailab" else vocab
    return 32000 if family == "speculators" else vocab


def _switch(fields: Fields, inner: Fields, *names: str) -> bool | None:
    """A flag under any of its names, at top level or in eagle_config; None where nothing is said. Refused: two that
    disagree."""
    said = [(place, name, place.bool(name)) for name in names for place in (fields, inner) if place.has(name)]
    for place, name, value in said[1:]:
        if value != said[0][2]:
            first = f"{said[0][0].path}{said[0][1]}"
            raise place.refuse(name, f"{shown(said[0][2])} as in key '{first}'")
    return said[0][2] if said else None


def _features(fields: Fields, inner: Fields) -> tuple[tuple[int, ...] | None, int, str]:
    """Ids as written (top level or eagle_config; both must agree), number of features, how they are fused."""
    ids, nested = fields.ints(IDS, None), inner.ints(IDS, None)
    if ids is not None and nested is not None and ids != nested:
        raise fields.refuse(IDS, f"{list(nested)} as in key 'eagle_config.{IDS}'")
    place, ids = (fields, ids) if ids is not None else (inner, nested)
    one, each = (bool(_switch(fields, inner, *n)) for n in (("norm_before_fc",), ("fc_norm", "use_aux_norm")))
    if one and each:
        raise Refused(
            f"{fields.where}: keys 'norm_before_fc' and 'fc_norm' are both true, expected at most one of them"
        )
    if _switch(fields, inner, "use_aux_hidden_state") is False:
        if ids:
            raise place.refuse(IDS, "none, since 'use_aux_hidden_state' is false: such a head reads the final hidden")
        if one or each:
            raise Refused(
                f"{fields.where}: 'use_aux_hidden_state' is false, expected no norm before fc: there is no fc"
            )
        fields.choice("num_aux_hidden_states", (1,), 1)
        return None, 1, "final"
    if ids is not None and not ids:
        raise place.refuse(IDS, "at least one layer id")
    count = fields.int("num_aux_hidden_states", 3 if ids is None else len(ids))
    if ids is not None and count != len(ids):
        raise fields.refuse("num_aux_hidden_states", f"{len(ids)}, the number of layer ids")
    return ids, count, "normed" if one else "per-feature" if each else "plain"


def _residual(fields: Fields, inner: Fields, family: str) -> tuple[bool, str | None]:
    """norm_before_residual and what was guessed. Where nothing is said: false (SafeAILab, SGLang, TensorRT-LLM, vLLM);
    but vLLM, which is what serves speculators' files, takes true for those, and the library's own class has false."""
    said = _switch(fields, inner, "norm_before_residual")
    if said is None and family == "speculators":
        return True, (
            "key 'norm_before_residual' is missing: read as true, as vLLM reads this format; speculators' own default "
            "is false"
        )
    return bool(said), None


def _recycle(fields: Fields, inner: Fields, family: str) -> tuple[str, str | None]:
    """Which hidden the next step gets, and what was guessed. `norm_output` means the normed one to SGLang, vLLM,
    TensorRT-LLM, NeMo and speculators; SpecForge's trainer may have recycled the other under the same key."""
    said = _switch(fields, inner, "return_hidden_post_norm")  # ModelOpt's name, which means one thing
    if said is not None:
        return "post-norm" if said else "pre-norm", None
    if not _switch(fields, inner, "norm_output"):
        return "pre-norm", None
    if family != "specforge":
        return "post-norm", None
    return "post-norm", (
        "key 'norm_output' is true: read as recycling the normed hidden, as servers do; SpecForge's trainer may have "
        "recycled the other (key 'return_hidden_post_norm', true or false in eagle_config, settles it)"
    )


def _only_known(fields: Fields, inner: Fields, layer: Fields) -> None:
    """Refuses what would make a head more than EAGLE-3 layers."""
    if layer is fields:
        fields.unless("the speculators layout under this architecture", speculators_model_type=None)
        fields.unless("the speculators layout under this architecture", transformer_layer_config=None)
    elif not layer.raw:
        raise fields.refuse("transformer_layer_config", "the settings of the head's layers")
    fields.choice("speculators_model_type", ("eagle3",), "eagle3")
    for place in (fields, layer):
        plain_weights(place)
    plain_llama(layer)
    fields.unless("block drafting", dflash_config=None, dspark_config=None)
    fields.unless("P-EAGLE", mask_token_id=None, pard_token=None)
    fields.unless("this variant of EAGLE-3", eh_proj_before_attn=False)
    inner.unless("a head without the norm of the token embedding", use_input_layernorm_in_first_layer=True)
    inner.unless("a head without a final norm", use_last_layernorm=True)
    inner.unless("this variant of EAGLE-3", use_mtp_layernorm=False, next_layer_regular=True, eh_proj_before_attn=False)
    for place in (fields, inner):  # with one step the number of their layers means nothing
        place.unless("drafting by parallel (Medusa) heads", parallel_draft_step=1, parallel_draft_heads=None)
    for key in inner.raw:
        if key not in EAGLE_KEYS:
            raise inner.refuse(key, f"no such key (known: {', '.join(sorted(EAGLE_KEYS))})")
