"""Heads' configs: every family's names for the same switches, each default, and every other kind of draft refused by
name. Each test names the mutant that it kills."""

import pytest
import torch
from test_config import HEAD, changed, refused
from test_heads_layouts import MODELOPT

from weights import Eagle3Config, Refused, named

SAFEAILAB = named("llama-3.1-8b-eagle3")["draft"]
LAYER = changed(HEAD, architectures=..., draft_vocab_size=...)
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "norm_before_residual": False,
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0",
    "torch_dtype": "bfloat16",
    "transformer_layer_config": LAYER,
}
IDS = "eagle_aux_hidden_state_layer_ids"


def read(raw, **keys):
    return Eagle3Config.read(changed(raw, **keys), "x")


def plain(config):
    """What it computes, without whose it is."""
    return changed(vars(config), architecture=..., family=..., guesses=...)


# ------------------------------------------------------------------ families
def test_heads_in_the_safeailab_layout():
    """Mutants: rope_theta required of heads (official ones lack it); null read as no vocabulary."""
    head = read(SAFEAILAB)
    assert (head.family, head.rope.theta, head.draft_vocab, head.head_dim) == ("safeailab", 10000.0, 32000, 128)
    assert (head.dtype, head.target_hidden, head.aux_count, head.max_positions) == (torch.float16, 4096, 3, 2048)
    assert (head.fusion, head.recycle, head.norm_before_residual, head.layers) == ("plain", "pre-norm", False, 1)
    for absent in (None, ...):
        assert read(HEAD, draft_vocab_size=absent).draft_vocab == 151936


@pytest.mark.parametrize(
    "name, family",
    [
        ("LlamaForCausalLM", "safeailab"),
        ("LlamaForCausalLMEagle3", "specforge"),
        ("LlamaForCausalLMEagle3Deep", "modelopt"),
        ("LlamaEagle3DraftModel", "nemo"),
        ("Eagle3LlamaForCausalLM", "vllm"),
        ("Eagle3MiniMaxM2ForCausalLM", "vllm"),
    ],
)
def test_flat_families_read_alike(name, family):
    """Mutant: a name left out, or one whose defaults differ."""
    head = read(HEAD, architectures=[name])
    assert head.family == family and head.architecture == name
    assert plain(head) == plain(read(HEAD)) and head.guesses == ()


@pytest.mark.parametrize("name", ["Eagle3Speculator", "Eagle3DraftModel"])
def test_the_speculators_layout_reads_alike(name):
    """Mutants: layer keys sought at the top; the target's vocabulary taken from there; its rope dropped."""
    head = read(SPECULATORS, architectures=[name])
    assert (head.family, head.guesses) == ("speculators", ()) and plain(head) == plain(read(HEAD))
    outer = dict(norm_before_fc=True, norm_output=True, target_hidden_size=4096, norm_before_residual=True)
    head = read(SPECULATORS, **outer, **{IDS: [1, 20, 40]}, torch_dtype=None)
    assert (head.fusion, head.recycle, head.norm_before_residual) == ("normed", "post-norm", True)
    assert (head.target_hidden, head.hidden, head.aux_ids, head.guesses) == (4096, 2048, (1, 20, 40), ())
    assert read(SPECULATORS, draft_vocab_size=None).draft_vocab == 32000  # the class's own default
    layer = {**LAYER, "model_type": "qwen3", "attention_bias": True, "num_hidden_layers": 2}
    head = read(SPECULATORS, transformer_layer_config=layer)
    assert (head.qk_norm, head.attention_bias, head.layers) == (True, True, 2)


def test_norm_before_residual_where_nothing_is_said():
    """True for speculators' files alone, and said aloud. Mutants: one default for all; a silent one."""
    head = read(SPECULATORS, norm_before_residual=...)
    assert head.norm_before_residual and "missing" in dict(head.guesses)["norm_before_residual"]
    assert not read(HEAD).norm_before_residual and not read(SPECULATORS).norm_before_residual
    nested = read(HEAD, eagle_config={"norm_before_residual": True})
    assert nested.norm_before_residual and nested.guesses == ()


def settled(post):
    return {"return_hidden_post_norm": post}


@pytest.mark.parametrize(
    "name, keys, recycle, doubt",
    [
        ("LlamaForCausalLMEagle3", {}, "pre-norm", False),
        ("LlamaForCausalLMEagle3", {"norm_output": False}, "pre-norm", False),
        ("LlamaForCausalLMEagle3", {"norm_output": True}, "post-norm", True),
        ("LlamaForCausalLMEagle3", {"eagle_config": settled(True)}, "post-norm", False),
        ("LlamaForCausalLMEagle3", {"norm_output": True, "eagle_config": settled(True)}, "post-norm", False),
        ("LlamaForCausalLMEagle3", {"norm_output": True, "eagle_config": settled(False)}, "pre-norm", False),
        ("LlamaForCausalLMEagle3", {"norm_output": True, "eagle_config": MODELOPT}, "post-norm", False),
        ("Eagle3LlamaForCausalLM", {"norm_output": True}, "post-norm", False),
        ("LlamaEagle3DraftModel", {"norm_output": True}, "post-norm", False),
    ],
)
def test_which_hidden_is_recycled(name, keys, recycle, doubt):
    """SpecForge's key is ambiguous and reported as such; ModelOpt's settles it. Mutants: the switch ignored; a guess in
    silence."""
    head = read(HEAD, architectures=[name], **keys)
    assert head.recycle == recycle and bool(head.guesses) == doubt
    said = dict(head.guesses).get("recycle", "")
    assert not doubt or "norm_output" in said and "return_hidden_post_norm" in said


def test_two_names_of_one_switch_must_agree():
    """Mutants: the first wins; the nested one ignored."""
    with pytest.raises(Refused, match="eagle_config.norm_output' is False, expected True"):
        read(HEAD, norm_output=True, eagle_config={"norm_output": False})
    with pytest.raises(Refused, match="eagle_config.fc_norm' is False, expected True"):
        read(HEAD, fc_norm=True, eagle_config={"fc_norm": False})
    with pytest.raises(Refused, match="norm_before_fc.*fc_norm"):
        read(HEAD, fc_norm=True, norm_before_fc=True)


@pytest.mark.parametrize(
    "keys, fusion, count",
    [
        ({"norm_before_fc": True}, "normed", 3),
        ({"eagle_config": {"norm_before_fc": True}}, "normed", 3),
        ({"fc_norm": True}, "per-feature", 3),
        ({"use_aux_norm": True}, "per-feature", 3),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "final", 1),
        ({"use_aux_hidden_state": False}, "final", 1),
        ({"eagle_config": {"use_aux_hidden_state": True, IDS: [1]}}, "plain", 1),
    ],
)
def test_fusions(keys, fusion, count):
    """Mutants: a place or an old name not read; no fc inferred from one feature."""
    head = read(HEAD, **keys)
    assert (head.fusion, head.aux_count) == (fusion, count)


def test_other_switches():
    """Mutants: each read as its default."""
    head = read(HEAD, attention_bias=True, bias=True, mlp_bias=True, logit_scale=0.5, partial_rotary_factor=0.25)
    assert (head.attention_bias, head.fc_bias, head.mlp_bias, head.logit_scale) == (True, True, True, 0.5)
    assert head.rope.partial == 0.25 and not head.qk_norm
    assert read(HEAD, model_type="qwen3").qk_norm and read(HEAD, architectures=["Eagle3Qwen3ForCausalLM"]).qk_norm
    assert read(HEAD, model_type="llama4_text", intermediate_size_mlp=16384).intermediate == 16384
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    head = read(HEAD, num_hidden_layers=2, layer_types=kinds, sliding_window=2048)
    assert head.windows == (2048, None) and read(HEAD, sliding_window=2048, use_sliding_window=False).windows == (None,)
    single = read(HEAD, architectures=["LlamaForCausalLMEagle"], eagle_config={"use_aux_hidden_state": False, IDS: []})
    assert single.fusion == "final"


def test_a_tie_flag_with_a_smaller_vocabulary_ties_nothing():
    """B05. Mutant: the flag taken as it is."""
    assert not read(HEAD, tie_word_embeddings=True).tied
    assert read(HEAD, tie_word_embeddings=True, draft_vocab_size=151936).tied


def test_layer_ids_are_found_in_both_places():
    """B01. Mutants: nested ids not read; a disagreement settled silently; count of features not from the ids."""
    ids = [1, 10, 20, 30]
    top, nested = read(HEAD, **{IDS: ids}), read(HEAD, eagle_config={IDS: ids})
    assert top == nested and (top.aux_ids, top.aux_count) == ((1, 10, 20, 30), 4)
    assert read(HEAD, num_aux_hidden_states=2).aux_count == 2
    with pytest.raises(Refused, match=r"\[1, 2, 3\].*\[1, 10, 20, 30\]"):
        read(HEAD, **{IDS: [1, 2, 3]}, eagle_config={IDS: ids})


def test_a_head_of_another_target_is_refused():
    """B07. Mutant: widths not compared; `hidden` compared in place of the target's width."""
    head = read(HEAD, target_hidden_size=4096)
    head.fits(4096, 151936, "x")
    with pytest.raises(Refused, match="4096.*2048"):
        head.fits(2048, 151936, "x")
    with pytest.raises(Refused, match="vocab_size.*151936.*32000"):
        head.fits(4096, 32000, "x")
    with pytest.raises(Refused, match="4096.*2048"):  # nothing maps the one feature to the head's width
        read(HEAD, target_hidden_size=4096, use_aux_hidden_state=False).fits(4096, 151936, "x")


def test_dynamic_rope_past_the_heads_own_length_is_refused():
    """B08. Mutant: angles that only one of the loaders would compute."""
    head = read(HEAD, rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=2048)
    head.reaches(2048, "x")
    with pytest.raises(Refused, match="dynamic.*2048.*4096"):
        head.reaches(4096, "x")


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    "name, kind",
    [
        ("PEagleDraftModel", "P-EAGLE"),
        ("PeagleLlamaForCausalLM", "P-EAGLE"),
        ("PEagleSpeculator", "P-EAGLE"),
        ("KimiK25Draft", "other drafts for DeepSeek and Kimi"),
        ("DFlashDraftModel", "DFlash"),
        ("Qwen3DSparkModel", "DSpark"),
        ("DeepseekV3ForCausalLMNextN", "MTP"),
        ("Qwen3NextMTP", "MTP"),
        ("MedusaModel", "Medusa"),
        ("LlamaForCausalLMEagle", "EAGLE-1"),
        ("EagleLlamaForCausalLM", "EAGLE-1"),
        ("Qwen3ForCausalLM", "EAGLE-3 heads"),
        (None, "EAGLE-3 heads"),
    ],
)
def test_other_kinds_of_drafts_are_refused_by_name(name, kind):
    """Mutant: a kind taken for an EAGLE-3 head, or refused without its name and what is supported."""
    with pytest.raises(Refused) as error:
        read(HEAD, architectures=[name] if name else None)
    text = str(error.value)
    assert "\n" not in text and str(name) in text and kind in text and "LlamaForCausalLMEagle3" in text, text


BAD_HEADS = [
    ("speculators_model_type", "eagle3"),
    ("transformer_layer_config", {"hidden_size": 64}),
    ("model_type", "kimi_k2"),
    ("kv_lora_rank", 512),
    ("num_experts", 8),
    ("num_hidden_layers", 0),
    ("draft_vocab_size", 200000),
    ("norm_before_residual", "yes"),
    ("mask_token_id", 7),
    ("pard_token", 7),
    ("dflash_config", {"target_layer_ids": [1]}),
    ("qkv_bias", True),
    ("sliding_window", 2048),
    ("layer_types", ["chunked_attention"]),
    ("layer_types", []),
    ("quantization_config", {"quant_method": "compressed-tensors"}),
    ("num_aux_hidden_states", 0),
    ("logit_scale", 0),
    ("final_logit_softcapping", 30.0),
    ("rope_scaling.mrope_section", {"type": "default", "mrope_section": [16, 24, 24]}),
    ("rope_scaling", {"type": "mrope", "factor": 2.0}),
    ("partial_rotary_factor", 0.03),
    *(
        (f"eagle_config.{key}", {key: value})
        for key, value in [
            ("use_input_layernorm_in_first_layer", False),
            ("use_last_layernorm", False),
            ("use_mtp_layernorm", True),
            ("next_layer_regular", False),
            ("parallel_draft_step", 4),
            ("parallel_draft_heads", {"num": 1}),
            ("eh_proj_before_attn", True),
            (IDS, []),
            ("a_switch_of_next_year", True),
        ]
    ),
]


@pytest.mark.parametrize("key, value", BAD_HEADS)
def test_a_head_that_would_be_computed_wrong_is_refused(key, value):
    """B06. Mutants: each switch ignored. The line holds file, key and value."""
    raw = changed(HEAD, **{key.split(".")[0]: value})
    refused(lambda: Eagle3Config.read(raw, "DIR/config.json"), key, value)


@pytest.mark.parametrize(
    "keys, word",
    [
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({"transformer_layer_config": ...}, "transformer_layer_config"),
        ({"transformer_layer_config": {**LAYER, "model_type": "gpt_oss"}}, "transformer_layer_config.model_type"),
        ({"transformer_layer_config": {**LAYER, "quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"eagle_config": {"use_aux_hidden_state": False, "norm_before_fc": True}}, "use_aux_hidden_state"),
        ({"eagle_config": {"use_aux_hidden_state": False, IDS: [1, 2, 3]}}, IDS),
    ],
)
def test_speculators_files_are_refused_by_their_keys(keys, word):
    """Mutants: nested keys not judged; another algorithm's file read as EAGLE-3."""
    with pytest.raises(Refused, match=word):
        read(SPECULATORS, **keys)


def test_a_plain_llama_is_no_head():
    """Mutant: an ordinary model (or an EAGLE-1 head) of the same architecture read as an EAGLE-3 head."""
    with pytest.raises(Refused, match="'draft_vocab_size' is missing"):
        read(SAFEAILAB, draft_vocab_size=...)


def test_inert_values_are_read():
    """Mutant: a key refused for being there. What published files hold at its neutral value does not matter."""
    idle = {**MODELOPT, "has_lm_head": True}
    head = read(HEAD, eagle_config=idle, norm_output=False, sliding_window=None, logit_scale=1.0)
    assert head.family == "modelopt" and plain(head) == plain(read(HEAD))
