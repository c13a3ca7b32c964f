"""Mixtral, GLM-4.5 and gpt-oss: the configs of published files, what is refused, and what a checkpoint must hold."""

import json

import pytest
import torch
from families import GLM, GPT_OSS, MIXTRAL, checkpoint
from safetensors.torch import load_file, save_file
from test_config import changed, in_transformers_5_style, refused
from toys import one_line, pair

from engine import Refused, loading
from kernels import REFERENCE
from weights import Eagle3Config, Qwen3MoeConfig, named
from weights.config import Glm4MoeConfig, GptOssConfig, MixtralConfig

NAMED = {
    "gpt-oss-120b": named("gpt-oss-120b")["target"],
    "glm-4.5": named("glm-4.5")["target"],
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
}
READERS = {"gpt-oss-120b": GptOssConfig, "glm-4.5": Glm4MoeConfig, "mixtral-8x7b": MixtralConfig}


def parameters(config):
    """Matrices of a target, in billions."""
    attention = config.hidden * config.head_dim * 2 * (config.heads + config.kv_heads)
    total = config.layers * attention + 2 * config.vocab * config.hidden
    sparse = config.layers - len(config.dense_layers)
    total += sparse * config.experts * (3 * config.hidden * config.expert_intermediate + config.hidden)
    total += len(config.dense_layers) * 3 * config.hidden * (config.intermediate or 0)
    return round((total + sparse * 3 * config.hidden * getattr(config, "shared_intermediate", 0)) / 1e9, 1)


def test_the_named_shapes():
    """Mutant: a number of a published model mistyped (checked by its sizes)."""
    oss, glm, mixtral = (READERS[name].read(NAMED[name], "config.json") for name in READERS)
    qwen = Qwen3MoeConfig.read(named("qwen3-235b-a22b")["target"], "config.json")
    found = [parameters(config) for config in (oss, glm, qwen, mixtral)]
    assert found == [116.8, 352.8, 235.1, 46.7]
    assert (glm.rope.partial, glm.scale, glm.dense_layers, glm.qk_norm) == (0.5, 2.5, (0, 1, 2), True)
    assert (glm.attention_bias, glm.out_bias, glm.draft_layers) == (True, False, 1)
    assert mixtral.windows == (None,) * 32 and mixtral.eos_ids == (2,) and mixtral.intermediate is None
    assert oss.windows == (128, None) * 18 and (oss.sinks, oss.out_bias, oss.activation) == (
        True,
        True,
        "clamped_swiglu",
    )
    assert (oss.rope.kind, oss.rope.factor, oss.rope.truncate, oss.rope.theta) == ("yarn", 32.0, False, 150000.0)
    for name, target in (("qwen3-235b-a22b", qwen), ("glm-4.5", glm), ("gpt-oss-120b", oss)):
        head = Eagle3Config.read(named(f"{name}-eagle3")["draft"], "config.json")
        head.fits(target.hidden, target.vocab, "config.json")
        assert head.draft_vocab == 32000


@pytest.mark.parametrize("name, gigabytes", [("glm-4.5", 705.6), ("qwen3-235b-a22b", 470.2), ("gpt-oss-120b", 65.2)])
def test_the_named_targets_declare_their_parameters(name, gigabytes):
    """Random weights by name. Mutant: a matrix that the config's sizes count and the model does not hold, or twice."""
    opened = loading.open_target(loading.Options(random=name))
    plan = loading.Plan(opened, None, None, 64, REFERENCE, loading.TP(), torch.bfloat16)
    _, source, _, _ = plan.build("meta")
    assert round(source.nbytes / 1e9, 1) == gigabytes


@pytest.mark.parametrize("name", READERS)
def test_styles_of_transformers_4_and_5_agree(name):
    """Mutants: rope_theta or the rotating share read at the top only; other names of counts."""
    raw = changed(NAMED[name], torch_dtype="float32", rope_theta=1234.0)
    read = READERS[name].read(raw, "config.json")
    assert read == READERS[name].read(in_transformers_5_style(raw), "config.json")
    assert (read.rope.theta, read.dtype) == (1234.0, torch.float32)


BAD = {
    "mixtral-8x7b": [
        ("architectures", ["MistralForCausalLM"]),
        ("model_type", "mistral"),
        ("attention_bias", True),
        ("n_shared_experts", 1),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", False),
        ("layer_types", ["sliding_attention"]),
        ("use_sliding_window", False),
        ("sliding_window", 0),
        ("partial_rotary_factor", 0.5),
        ("num_experts_per_tok", 9),
        ("num_experts", 16),
        ("hidden_act", "gelu"),
    ],
    "gpt-oss-120b": [
        ("architectures", ["GptOssForCausalLMEagle3"]),
        ("model_type", "mixtral"),
        ("swiglu_limit", 6.0),
        ("swiglu_alpha", 1.0),
        ("attention_bias", "both"),
        ("n_shared_experts", 1),
        ("scoring_func", "sigmoid"),
        ("experts_per_token", 8),
        ("num_experts", 32),
        ("layer_types", ["chunked_attention"]),
        ("layer_types", ["full_attention"]),
        ("sliding_window", 0),
        ("use_sliding_window", False),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling.attn_factor", {"type": "yarn", "factor": 32.0, "attn_factor": 1.2}),
    ],
    "glm-4.5": [
        ("architectures", ["Glm4MoeLiteForCausalLM"]),
        ("model_type", "glm4"),
        ("mlp_bias", True),
        ("rope_interleave", True),
        ("moe_layer_freq", 2),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("n_group", 7),
        ("n_group", 160),
        ("topk_group", 2),
        ("n_shared_experts", -1),
        ("first_k_dense_replace", "3"),
        ("routed_scaling_factor", 0.0),
        ("num_experts_per_tok", 161),
        ("sliding_window", 4096),
        ("layer_types", ["sliding_attention"]),
        ("use_qk_norm", "yes"),
        ("num_mtp_layers", 2),
    ],
}


@pytest.mark.parametrize("name, key, value", [(n, *case) for n, cases in BAD.items() for case in cases])
def test_a_target_that_would_be_computed_wrong_is_refused(name, key, value):
    """Mutants: each check of the readers taken out. The line holds file, key and value."""
    refused(
        lambda: READERS[name].read(changed(NAMED[name], **{key.split(".")[0]: value}), "DIR/config.json"), key, value
    )


def test_groups_too_few_for_the_choice_are_refused():
    """Mutant: experts of groups that may not be chosen from fill the choice."""
    raw = changed(GLM, n_group=4, topk_group=1)
    refused(lambda: Glm4MoeConfig.read(raw, "DIR/config.json"), "topk_group", 1)


def edited(folder, change):
    """The checkpoint of `folder` after change(config, tensors)."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


MLP = "model.layers.1.mlp."
MISFITS = {
    "no correction": (GLM, lambda c, t: t.pop(f"{MLP}gate.e_score_correction_bias"), "lacks.*e_score_correction_bias"),
    "a norm without its switch": (GLM, lambda c, t: c.update(use_qk_norm=False), "unexpected.*_norm.weight"),
    "biases without their switch": (GLM, lambda c, t: c.update(attention_bias=False), "unexpected.*proj.bias"),
    "two shared experts": (GLM, lambda c, t: c.update(n_shared_experts=2), r"\[32, 64\], expected \[64, 64\]"),
    "no shared expert": (GLM, lambda c, t: c.update(n_shared_experts=0), "unexpected.*shared_experts"),
    "two dense layers": (GLM, lambda c, t: c.update(first_k_dense_replace=2), "lacks.*layers.1.mlp.down_proj"),
    "no sinks": (
        GPT_OSS,
        lambda c, t: t.pop("model.layers.2.self_attn.sinks"),
        r"lacks.*layers.2.self_attn.sinks \[4\]",
    ),
    "no bias of the router": (GPT_OSS, lambda c, t: t.pop(f"{MLP}router.bias"), r"lacks.*router.bias \[8\]"),
    "no output bias": (GPT_OSS, lambda c, t: t.pop("model.layers.0.self_attn.o_proj.bias"), "lacks.*o_proj.bias"),
    "experts not transposed": (
        GPT_OSS,
        lambda c, t: t.update({f"{MLP}experts.gate_up_proj": torch.zeros(8, 96, 64)}),
        r"tensor model.layers.1.mlp.experts.gate_up_proj has shape \[8, 96, 64\], expected \[8, 64, 96\]$",
    ),
    "an expert too many": (
        MIXTRAL,
        lambda c, t: t.update({"model.layers.0.block_sparse_moe.experts.8.w1.weight": torch.zeros(48, 64)}),
        "unexpected.*experts.8.w1",
    ),
    "a bias that is not read": (
        MIXTRAL,
        lambda c, t: t.update({"model.layers.0.block_sparse_moe.gate.bias": torch.zeros(8)}),
        "unexpected.*gate.bias",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_checkpoints_that_do_not_fit_are_refused(tmp_path, name):
    """Mutants: a tensor left at what memory held, or dropped."""
    raw, change, words = MISFITS[name]
    checkpoint(tmp_path, raw)
    with pytest.raises(Refused, match=words) as error:
        pair(edited(tmp_path, change))
    one_line(error, str(tmp_path))


def test_layers_for_multi_token_prediction_are_skipped_by_name(tmp_path):
    """The layer after the last. Mutants: it refuses the file; every unknown layer is skipped."""
    checkpoint(tmp_path, GLM)
    extra = {f"model.layers.3.{n}.weight": torch.ones(64) for n in ("enorm", "hnorm", "shared_head.norm")}
    report = pair(edited(tmp_path, lambda c, t: t.update(extra))).parts.reports[0]
    assert report.skipped == sorted(extra) and report.unexpected == []
    with pytest.raises(Refused, match="unexpected.*layers.4.enorm"):
        pair(edited(tmp_path, lambda c, t: t.update({"model.layers.4.enorm.weight": torch.ones(64)})))


def test_a_correction_stays_fp32(tmp_path):
    """Whatever the model's dtype. Mutant: rounded with the rest: experts that differ by 1e-4 then tie (B39)."""
    opened = loading.open_target(loading.Options(target=checkpoint(tmp_path, GLM)))
    plan = loading.Plan(opened, None, None, 64, REFERENCE, loading.TP(), torch.bfloat16)
    target, source, _, _ = plan.build(torch.device("cpu"))
    source.fill()
    router = target.layers[1].mlp.router
    stored = load_file(tmp_path / "model.safetensors")[f"{MLP}gate.e_score_correction_bias"]
    assert router.gate.dtype == torch.bfloat16 and torch.equal(router.correction, stored)
