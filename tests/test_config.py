"""Configs: both styles that transformers writes read alike, and what would change the arithmetic is refused by key and
value. Each test names the mutant that it kills."""

import json

import pytest
import torch

from weights import Eagle3Config, Fields, LlamaConfig, Qwen3MoeConfig, Refused, eos_ids, named, rope
from weights.formats import format_of

TARGET = named("qwen3-30b-a3b")["target"]
HEAD = named("qwen3-30b-a3b-eagle3")["draft"]
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def changed(raw, **keys):
    """`raw` with keys set, or taken out where the value is `...`."""
    return {k: v for k, v in {**raw, **keys}.items() if v is not ...}


def in_transformers_5_style(raw):
    scaling = dict(raw.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")
    extra = {"partial_rotary_factor": raw["partial_rotary_factor"]} if "partial_rotary_factor" in raw else {}
    parameters = {"rope_type": kind, "rope_theta": raw["rope_theta"], **scaling, **extra}
    names = {"torch_dtype": "dtype", "num_experts": "num_local_experts"}
    kept = {names.get(k, k): v for k, v in raw.items() if k not in ("rope_scaling", "rope_theta", *extra)}
    return {**kept, "rope_parameters": parameters}


# ------------------------------------------------------------------ both styles
@pytest.mark.parametrize("scaling", [None, {"type": "yarn", **YARN}, {"type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("reader, raw", [(Qwen3MoeConfig, TARGET), (Eagle3Config, HEAD)])
def test_styles_of_transformers_4_and_5_agree(reader, raw, scaling):
    """Mutants: rope_theta read at the top only (it falls to 10000); `type` but not `rope_type`; torch_dtype only;
    num_experts only."""
    old = changed(raw, rope_scaling=scaling, rope_theta=1234567.0, torch_dtype="float32", partial_rotary_factor=0.5)
    read = reader.read(old, "config.json")
    assert read == reader.read(in_transformers_5_style(old), "config.json")
    assert (read.rope.theta, read.rope.partial, read.dtype) == (1234567.0, 0.5, torch.float32)
    assert (read.rope.kind, read.rope.factor) == ((scaling["type"], scaling["factor"]) if scaling else ("default", 1.0))


def test_the_named_shapes():
    """Mutant: a number of the published model mistyped (checked by its sizes)."""
    c = Qwen3MoeConfig.read(TARGET, "config.json")
    attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    expert = 3 * c.hidden * c.expert_intermediate
    total = c.layers * (attention + c.experts * (expert + c.hidden)) + 2 * c.vocab * c.hidden
    one_row = total - c.layers * (c.experts - c.experts_per_token) * expert - c.vocab * c.hidden
    assert (round(total / 1e9, 1), round(2 * one_row / 1e9, 2)) == (30.5, 6.08)  # parameters, bytes a bf16 row reads
    assert (c.dense_layers, c.eos_ids, c.dtype, c.norm_topk_prob) == ((), (151645,), torch.bfloat16, True)
    h = Eagle3Config.read(HEAD, "config.json")
    assert (h.hidden, h.intermediate, h.heads, h.kv_heads, h.head_dim) == (2048, 12288, 32, 4, 128)
    assert (h.draft_vocab, h.vocab, h.aux_ids, h.aux_count, h.family) == (32000, 151936, None, 3, "specforge")


def test_a_file_serves_as_a_named_shape(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(TARGET))
    assert named(str(tmp_path / "mine.json"))["target"] == TARGET
    with pytest.raises(Refused, match="'no-such-model'.*qwen3-30b-a3b"):
        named("no-such-model")


def test_dense_layers_and_optional_numbers():
    """Mutants: decoder_sparse_step off by one; hidden / heads in place of an explicit head_dim."""
    raw = changed(TARGET, num_hidden_layers=6, mlp_only_layers=[1], decoder_sparse_step=3, norm_topk_prob=False)
    config = Qwen3MoeConfig.read(raw, "config.json")
    assert config.dense_layers == (0, 1, 3, 4) and config.norm_topk_prob is False
    assert config.head_dim == 128 != config.hidden // config.heads
    assert Qwen3MoeConfig.read(changed(TARGET, head_dim=...), "config.json").head_dim == 64


@pytest.mark.parametrize(
    "config, generation, ids",
    [(5, None, (5,)), ([5, 7], {}, (5, 7)), (5, {"eos_token_id": [7, 5]}, (5, 7)), (None, {"eos_token_id": 7}, (7,))],
)
def test_end_ids_are_the_union_of_both_files(config, generation, ids):
    """Mutants: config.json only; generation_config.json only; a single id not read as a list."""
    assert eos_ids({"eos_token_id": config}, generation, "x") == ids
    assert Qwen3MoeConfig.read(changed(TARGET, eos_token_id=config), "x", generation).eos_ids == ids


# ------------------------------------------------------------------ refusals
BAD_TARGETS = [
    ("architectures", ["LlamaForCausalLM"]),
    ("architectures", []),
    ("model_type", "qwen2_moe"),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("use_sliding_window", True),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("n_shared_experts", 1),
    ("shared_expert_intermediate_size", 512),
    ("routed_scaling_factor", 2.5),
    ("n_group", 8),
    ("num_experts_per_tok", 129),
    ("num_local_experts", 64),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", "48"),
    ("hidden_size", True),
    ("hidden_size", 2048.5),
    ("rms_norm_eps", float("nan")),
    ("norm_topk_prob", 1),
    ("num_key_value_heads", 5),
    ("mlp_only_layers", [48]),
    ("torch_dtype", "float8"),
    ("eos_token_id", "end"),
    ("tie_word_embeddings", "no"),
    ("rope_scaling", {"type": "longrope", "factor": 2.0}),
    ("rope_scaling", [4.0]),
    ("rope_scaling.factor", {"type": "yarn"}),
    ("rope_scaling.rope_type", {"factor": 4.0}),
    ("rope_scaling.mrope_section", {"type": "default", "mrope_section": [16, 24, 24]}),
    ("rope_parameters.rope_theta", {"rope_type": "default", "rope_theta": 5.0}),
    ("rope_scaling.low_freq_factor", {"type": "llama3", "factor": 8.0}),
    ("partial_rotary_factor", 1.5),
    ("partial_rotary_factor", 0.01),
    ("final_logit_softcapping", 30.0),
    ("residual_multiplier", 0.5),
]
LLAMA = named("llama-3.1-8b")["target"]
BAD_LLAMAS = [
    ("architectures", ["Qwen2ForCausalLM"]),
    ("model_type", "qwen3"),
    ("draft_vocab_size", 32000),
    ("eagle_config", {"use_aux_hidden_state": True}),
    ("hidden_act", "gelu"),
    ("attention_bias", 1),
    ("mlp_bias", "no"),
    ("sliding_window", 4096),
    ("layer_types", ["sliding_attention"]),
    ("attention_chunk_size", 8192),
    ("embedding_multiplier", 12.0),
    ("scale_depth", 1.4),
    ("no_rope_layers", [0, 1]),
    ("attention_multiplier", 0.1),
    ("partial_rotary_factor", 0.5),
    ("head_dim", 127),
    ("num_attention_heads", 33),
    ("intermediate_size", 0),
]


def refused(read, key, value):
    with pytest.raises(Refused) as error:
        read()
    text, last = str(error.value), key.split(".")[-1]
    inner = value.get(last, value.get("quant_method")) if isinstance(value, dict) else value
    assert "\n" not in text and "DIR/config.json" in text and last in text, text
    assert inner is None or str(inner) in text or key.startswith("rope") or key == "dflash_config", text


@pytest.mark.parametrize("key, value", BAD_TARGETS)
def test_a_target_that_would_be_computed_wrong_is_refused(key, value):
    """Mutants: each check of the readers taken out. The line holds file, key and value."""
    raw = changed(TARGET, **{key.split(".")[0]: value})
    refused(lambda: Qwen3MoeConfig.read(raw, "DIR/config.json"), key, value)


@pytest.mark.parametrize("key, value", BAD_LLAMAS)
def test_a_dense_target_that_would_be_computed_wrong_is_refused(key, value):
    """Mutants: each check of the reader taken out; a draft head served as a target."""
    raw = changed(LLAMA, **{key: value})
    if key == "num_attention_heads":
        raw = changed(raw, head_dim=...)
    refused(lambda: LlamaConfig.read(raw, "DIR/config.json"), key, value)


def test_dense_targets():
    """Mutants: defaults of the other family; biases not read."""
    llama = LlamaConfig.read(LLAMA, "x")
    attention = llama.hidden * llama.head_dim * (2 * llama.heads + 2 * llama.kv_heads)
    total = llama.layers * (attention + 3 * llama.hidden * llama.intermediate) + 2 * llama.vocab * llama.hidden
    assert round(total / 1e9, 2) == 8.03 and (llama.qk_norm, llama.attention_bias, llama.tied) == (False, False, False)
    assert (llama.rope.kind, llama.rope.factor, llama.eos_ids) == ("llama3", 8.0, (128001, 128008, 128009))
    raw = changed(LLAMA, architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=True, rope_scaling=...)
    qwen = LlamaConfig.read(changed(raw, tie_word_embeddings=True, max_position_embeddings=...), "x")
    assert (qwen.qk_norm, qwen.attention_bias, qwen.tied, qwen.max_positions) == (True, True, True, 32768)
    with pytest.raises(Refused, match="mlp_bias"):
        LlamaConfig.read(changed(raw, mlp_bias=True), "x")


@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "vocab_size", "rope_theta", "num_attention_heads"])
def test_a_missing_key_is_named(key):
    with pytest.raises(Refused, match=f"config.json: key '{key}' is missing"):
        Qwen3MoeConfig.read(changed(TARGET, **{key: ...}), "config.json")


def test_inert_values_are_read():
    """Mutant: a key refused for being there. What published files hold at its neutral value does not matter."""
    windowed = {**TARGET, "sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 48}
    assert Qwen3MoeConfig.read(windowed, "x") == Qwen3MoeConfig.read(TARGET, "x")


def test_formats_by_name():
    """Mutant: a quantised checkpoint read as a plain one."""
    assert format_of(TARGET, "x").__class__.__name__ == "Dense"
    with pytest.raises(Refused, match="quantization_config.*'awq'"):
        format_of({**TARGET, "quantization_config": {"quant_method": "awq"}}, "x")


def test_yarn_and_llama3_settings():
    """Mutants: truncate or an mscale dropped."""
    raw = {
        "rope_theta": 5e4,
        "rope_scaling": {"type": "yarn", **YARN, "truncate": False, "mscale": 0.707, "beta_fast": 1},
    }
    read = rope(Fields(raw, "x"))
    assert (read.truncate, read.mscale, read.mscale_all_dim, read.beta_fast) == (False, 0.707, None, 1.0)
    scaling = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **YARN}
    assert rope(Fields({"rope_theta": 5e5, "rope_scaling": scaling}, "x")).original_max_positions == 32768
