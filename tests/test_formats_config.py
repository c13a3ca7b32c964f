"""What a quantization_config may say: which modules it covers, by the rules of the libraries that write it; what is
refused, by name; and files that contradict it."""

import copy

import pytest
import torch
from packers import FP8, INT4, fp8_tensors, grouped, int4_tensors, quantised
from toys import Noise, one_line, pair, target_config, target_tensors

from weights import Checkpoint, Refused
from weights.formats import Dense, Fp8Blocks, Int4Groups, format_of

LAYER = "model.layers.5."
KIMI = {  # module -> whether Kimi's list has it packed
    "mlp.experts.17.gate_proj": True,
    "mlp.experts.17.down_proj": True,
    "mlp.shared_experts.up_proj": False,
    "mlp.gate_proj": False,
    "mlp.gate_up_proj": False,
    "self_attn.q_a_proj": False,
    "self_attn.kv_a_proj_with_mqa": False,
}


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("module", KIMI)
def test_kimi_list(prefix, module):
    """B35: `re:` entries are patterns, with and without the prefix of a text model. Mutants: compared as plain text;
    searched anywhere in the name."""
    covered = Int4Groups.read(fields({**INT4})).covered
    assert covered.covers(prefix + LAYER + module) == KIMI[module]
    assert not covered.covers(prefix + "lm_head")


def fields(raw):
    """As format_of hands it on."""
    from weights.fields import Fields

    return Fields(raw, "here", "quantization_config.")


@pytest.mark.parametrize(
    "ignore, left, packed",
    [
        ([LAYER + "mlp.gate"], "mlp.gate", "mlp.gate_proj"),
        (["re:.*mlp\\.gate$"], "mlp.gate", "mlp.gate_proj"),
        (["language_model." + LAYER + "mlp.down_proj"], "mlp.down_proj", "mlp.up_proj"),
        (["re:model\\.layers\\.5\\.mlp\\.experts\\.1\\."], "mlp.experts.1.up_proj", "mlp.experts.11.up_proj"),
    ],
)
def test_an_exception_leaves_its_neighbours_alone(ignore, left, packed):
    """B35 (d). Mutant: an entry counts as the beginning of a name."""
    covered = Int4Groups.read(fields({**INT4, "ignore": ignore})).covered
    assert not covered.covers(LAYER + left) and covered.covers(LAYER + packed)


def test_targets_choose():
    group = {**INT4["config_groups"]["group_0"], "targets": ["re:.*mlp\\.experts.*"]}
    covered = Int4Groups.read(fields({**INT4, "config_groups": {"g": group}, "ignore": []})).covered
    assert covered.covers(LAYER + "mlp.experts.3.up_proj") and not covered.covers(LAYER + "self_attn.q_proj")


@pytest.mark.parametrize(
    "entry, left, packed",
    [
        (LAYER + "mlp.gate", "mlp.gate", "mlp.gate_proj"),
        ("mlp.gate", "mlp.gate", "mlp.gate_proj"),
        ("model.layers.5", "mlp.up_proj", None),
        ("model.layers.*.self_attn", "self_attn.q_proj", "mlp.up_proj"),
        ("gate", "mlp.gate", "mlp.up_gate"),
    ],
)
def test_fp8_exceptions(entry, left, packed):
    """As transformers reads modules_to_not_convert: whole parts of a name from its beginning, or its last ones."""
    covered = Fp8Blocks.read(fields({**FP8, "modules_to_not_convert": [entry]})).covered
    assert not covered.covers(LAYER + left)
    assert packed is None or covered.covers(LAYER + packed)
    assert covered.covers("model.layers.55.mlp.up_proj")


def changed(base, path, value):
    """A config with one key changed; path: keys with dots between them."""
    config, keys = copy.deepcopy(base), path.split(".")
    place = config
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return config


GROUP = "config_groups.group_0."
REFUSALS = [
    ({"quant_method": "awq", "bits": 4}, "quantization_config.quant_method", "'awq'"),
    ({"quant_method": "gptq", "desc_act": True}, "quantization_config.quant_method", "'gptq'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantization_config.quant_method", "'modelopt'"),
    ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method", "'bitsandbytes'"),
    ({"bits": 4}, "quantization_config.quant_method", "missing"),
    (changed(INT4, "format", "nvfp4-pack-quantized"), "quantization_config.format", "'nvfp4-pack-quantized'"),
    (changed(INT4, "format", "marlin-24"), "quantization_config.format", "'marlin-24'"),
    (changed(INT4, "quantization_status", "frozen"), "quantization_status", "'frozen'"),
    (changed(INT4, "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme", "num_bits"),
    (changed(INT4, "sparsity_config", {"format": "sparse-24"}), "sparsity_config", "sparse-24"),
    (changed(INT4, "config_groups.group_1", INT4["config_groups"]["group_0"]), "config_groups", "several"),
    (changed(INT4, GROUP + "targets", []), GROUP + "targets", "[]"),
    (changed(INT4, GROUP + "input_activations", {"num_bits": 8}), GROUP + "input_activations", "num_bits"),
    (changed(INT4, GROUP + "weights.num_bits", 8), GROUP + "weights.num_bits", "8"),
    (changed(INT4, GROUP + "weights.symmetric", False), GROUP + "weights.symmetric", "False"),
    (changed(INT4, GROUP + "weights.actorder", "group"), GROUP + "weights.actorder", "act-order"),
    (changed(INT4, GROUP + "weights.strategy", "channel"), GROUP + "weights.strategy", "'channel'"),
    (changed(INT4, GROUP + "weights.group_size", 48), GROUP + "weights.group_size", "48"),
    (changed(INT4, GROUP + "weights.type", "float"), GROUP + "weights.type", "'float'"),
    (changed(INT4, "ignore", ["re:("]), "ignore", "re:("),
    (changed(FP8, "fmt", "e5m2"), "fmt", "'e5m2'"),
    (changed(FP8, "activation_scheme", "static"), "activation_scheme", "'static'"),
    (changed(FP8, "weight_block_size", None), "weight_block_size", "[128, 128]"),
    (changed(FP8, "weight_block_size", [64, 128]), "weight_block_size", "[64, 128]"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: " ".join(case[1:]))
def test_unsupported_schemes_are_refused_by_name(toys, case):
    """When the target is opened: nothing but headers was read."""
    config, *words = case
    plain = target_config(layers=1)
    path = toys.save({**plain, "quantization_config": config}, target_tensors(plain, Noise(0)))
    with pytest.raises(Refused) as error:
        pair(path)
    one_line(error, path, *words)


def test_where_the_config_stands():
    """At the root, in the text model's part, or the same in both. Two that disagree are refused."""
    assert isinstance(format_of({}, "here"), Dense)
    assert isinstance(format_of({"quantization_config": None}, "here"), Dense)
    nested = format_of({"text_config": {"quantization_config": grouped(64)}}, "here")
    assert isinstance(nested, Int4Groups) and nested.group == 64
    assert isinstance(
        format_of({"text_config": {"quantization_config": FP8}, "quantization_config": FP8}, "x"), Fp8Blocks
    )
    with pytest.raises(Refused) as error:
        format_of({"text_config": {"quantization_config": FP8}, "quantization_config": INT4}, "here")
    one_line(error, "here", "text_config.quantization_config")


def spoilt(change, config=INT4, pack=int4_tensors, chosen=lambda m: ".experts." in m):
    """A toy target packed as `chosen` says, after change(config, tensors)."""
    plain = target_config(layers=1)
    stored, _ = quantised(target_tensors(plain, Noise(0)), pack, chosen)
    raw = {**plain, "quantization_config": copy.deepcopy(config)}
    change(raw["quantization_config"], stored)
    return raw, stored


ONE = "model.layers.0.mlp.experts.3.up_proj"
FAULTS = {
    "packed, but ignored": (lambda c, t: c["ignore"].append("re:.*experts\\.3\\."), "experts.3.down_proj", "leaves"),
    "plain, but covered": (lambda c, t: c["ignore"].remove("re:.*self_attn.*"), "self_attn.k_proj", "quantised"),
    "an expert is plain": (lambda c, t: t.update({f"{ONE}.weight": torch.zeros(32, 64)}), ONE, "unexpected"),
    "no words": (lambda c, t: t.pop(f"{ONE}.weight_packed"), f"{ONE}.weight_packed", "lacks"),
    "no scales": (lambda c, t: t.pop(f"{ONE}.weight_scale"), f"{ONE}.weight_scale", "weight_scale"),
    "groups too wide": (lambda c, t: c.update(grouped(64)), "width 32", "whole groups of 64"),
    "other groups": (
        lambda c, t: t.update({f"{ONE}.weight_scale": torch.ones(32, 4)}),
        f"{ONE}.weight_scale",
        "[32, 4]",
    ),
    "another shape": (lambda c, t: t[f"{ONE}.weight_shape"].add_(8), f"{ONE}.weight_shape", "[40, 72]"),
    "zero points": (lambda c, t: t.update({f"{ONE}.weight_zero_point": torch.zeros(4)}), "zero_point", "unexpected"),
    "act-order": (lambda c, t: t.update({f"{ONE}.weight_g_idx": torch.zeros(64)}), "weight_g_idx", "unexpected"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_contradict_their_config(toys, fault):
    """Refused by the tensor's name before weights are read (B35)."""
    change, *words = FAULTS[fault]
    path = toys.save(*spoilt(change))
    with pytest.raises(Refused) as error:
        pair(path)
    one_line(error, path, *words)


def fp8_fault(change):
    return spoilt(change, {**FP8, "modules_to_not_convert": ["lm_head"]}, fp8_tensors, lambda m: m.endswith("_proj"))


FP8_FAULTS = {
    "a plain expert": (
        lambda c, t: [t.pop(f"{ONE}.weight_scale_inv"), t.update({f"{ONE}.weight": torch.zeros(32, 64)})],
        ONE,
        "quantised",
    ),
    "no scales": (lambda c, t: t.pop(f"{ONE}.weight_scale_inv"), ONE, "weight_scale_inv"),
    "scales of other blocks": (
        lambda c, t: t.update({f"{ONE}.weight_scale_inv": torch.ones(2, 1)}),
        f"{ONE}.weight",
        "[2, 1]",
    ),
    "scales alone": (lambda c, t: t.pop(f"{ONE}.weight"), f"{ONE}.weight", "without"),
    "packed, but left out": (lambda c, t: c["modules_to_not_convert"].append("experts.3.up_proj"), ONE, "unquantised"),
}


@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_fp8_files_that_contradict_their_config(toys, fault):
    change, *words = FP8_FAULTS[fault]
    path = toys.save(*fp8_fault(change))
    with pytest.raises(Refused) as error:
        pair(path)
    one_line(error, path, *words)


def test_nothing_of_a_packed_checkpoint_is_left_over(toys):
    """The report counts what is stored, and names nothing as unexpected or skipped."""
    path = toys.save(*spoilt(lambda c, t: None))
    report = pair(path).parts.reports[0]
    shapes = [n for n in Checkpoint.open(path).names() if n.endswith("weight_shape")]
    assert (report.unexpected, report.skipped, report.missing) == ([], [], [])
    assert report.loaded == len(Checkpoint.open(path).names()) - len(shapes)
