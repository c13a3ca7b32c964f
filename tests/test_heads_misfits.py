"""Heads whose switches, tensors and sizes do not fit each other or their target: refused by name, never served (B06,
B07); and stored dtypes that differ from the engine's (B09)."""

import pytest
import torch
from test_heads_layouts import IDS, LAYERS, LAYOUTS, PROMPT
from toys import pair

from engine import Refused, Sampling, Shape

pytestmark = pytest.mark.usefixtures("nan_memory")


def add(name, *shape, **keys):
    def change(config, tensors):
        config.update(keys)
        if name:
            tensors[name] = torch.ones(shape)

    return change


def drop(name):
    def change(config, tensors):
        del tensors[name]

    return change


D = 64
MISFITS = [
    ("SpecForge", add("input_norm.weight", 3 * D), "unexpected.*input_norm.weight"),
    ("SpecForge", add("fc_norm.0.weight", D), "unexpected.*fc_norm.0.weight"),
    ("SpecForge", add("aux_norm_low.weight", D), "unexpected.*aux_norm_low.weight"),
    ("SpecForge", add("midlayer.self_attn.q_norm.weight", 16), "unexpected.*q_norm.weight"),
    ("SpecForge", add("midlayer.self_attn.o_proj.bias", D), "unexpected.*o_proj.bias"),
    ("SpecForge", add("fc.bias", D), "unexpected.*fc.bias"),
    ("SpecForge", add("mask_hidden", 1, 1, 3 * D), "unexpected.*mask_hidden"),
    ("SpecForge", add("layers.1.input_layernorm.weight", D), "unexpected.*layers.1.input_layernorm"),
    ("SpecForge", add(None, norm_before_fc=True), "lacks.*input_norm.weight"),
    ("SpecForge", add(None, fc_norm=True), "lacks.*fc_norm.0.weight"),
    ("SpecForge", add(None, bias=True), "lacks.*fc.bias"),
    ("SpecForge", add(None, mlp_bias=True), "lacks.*gate_proj.bias"),
    ("SpecForge", add(None, model_type="qwen3"), "lacks.*q_norm.weight"),
    ("SpecForge", add(None, num_hidden_layers=2), "layer 1 of the head has neither.*hidden_norm"),
    ("SpecForge", drop("midlayer.hidden_norm.weight"), "lacks.*hidden_norm.weight"),
    ("SpecForge", drop("d2t"), "lacks.*d2t"),
    ("SpecForge", add(None, target_hidden_size=32), "width 32.*64 wide"),
    ("SpecForge", add(None, vocab_size=96), "'vocab_size' is 96.*64"),
    ("SpecForge", add(None, num_key_value_heads=4), r"k_proj.weight has shape \[32, 128\], expected \[64, 128\]"),
    ("SpecForge", add(None, head_dim=32), r"q_proj.weight has shape \[64, 128\], expected \[128, 128\]"),
    ("vLLM", add(None, attention_bias=False), "unexpected.*bias"),
    ("vLLM", drop("model.layers.0.self_attn.q_proj.bias"), "lacks.*q_proj.bias"),
    ("speculators", add(None, norm_before_fc=False), "unexpected.*input_norm.weight"),
    ("speculators", drop("embed_tokens.weight"), r"'embed_tokens.weight' \[64, 32\].*\[64, 64\]"),
    ("ModelOpt Deep", add("midlayer.1.input_layernorm.weight", D), "layer 1 of the head has both"),
    ("ModelOpt Deep", drop("midlayer.2.hidden_norm.weight"), "layer 2 of the head has neither"),
    ("ModelOpt Deep", add(None, num_hidden_layers=2), "unexpected.*midlayer.2"),
    ("one final feature", add("fc.weight", D, 2 * D), "unexpected.*fc.weight"),
    ("NeMo", add("fc.weight", D, 2 * D), "two names of fc.weight"),
    ("SafeAILab", add(None, **{IDS: [2]}), r"fc.weight has shape \[64, 192\], expected \[64, 64\]"),
]


@pytest.mark.parametrize("name, change, words", MISFITS)
def test_switches_and_tensors_that_do_not_fit_are_refused(toys, name, change, words):
    """B06, B07. Mutants: a weight without its switch dropped, a switch without its weight left at what memory held, a
    layer's norm of either name left out, sizes compared with themselves."""
    path, _ = LAYOUTS[name].save(toys, change)
    with pytest.raises(Refused, match=words) as error:
        pair(toys.history(layers=LAYERS), path)
    assert "\n" not in str(error.value) and path in str(error.value)


def test_the_final_feature_is_not_chosen(toys):
    """Mutant: an override that feeds such a head a boundary."""
    path, _ = LAYOUTS["one final feature"].save(toys)
    with pytest.raises(Refused, match="capture-layers.*final hidden"):
        pair(toys.history(layers=LAYERS), path, capture_layers="boundary:8")


@pytest.mark.parametrize("name", ["SpecForge", "vLLM Qwen3", "one final feature", "speculators Qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layouts_run_in_half_precision(toys, name, dtype):
    """B09. Mutant: a module kept in the file's dtype."""
    path, _ = LAYOUTS[name].save(toys)
    engine = pair(toys.history(layers=LAYERS), path, dtype=dtype)
    sampling = Sampling(max_new_tokens=5)
    assert len(engine.generate(PROMPT, sampling, shape=Shape(3, 2, 8)).token_ids) == 5
    assert engine.drafter.layers[0].attention.weight.dtype == getattr(torch, dtype)
