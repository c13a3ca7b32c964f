"""Quantised checkpoints from plain tensors, and the plain ones that mean the same."""

import torch

from weights.formats import fp8, int4

KIMI_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "actorder": None,
                "dynamic": False,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
    "ignore": KIMI_IGNORE,
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def grouped(size, ignore=KIMI_IGNORE):
    """INT4 with groups of `size`."""
    group = INT4["config_groups"]["group_0"]
    weights = {**group["weights"], "group_size": size}
    return {**INT4, "config_groups": {"group_0": {**group, "weights": weights}}, "ignore": list(ignore)}


def int4_tensors(module, weight, group=32):
    """(stored tensors, the matrix they mean)."""
    words, scale = int4.pack(weight, group)
    stored = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return {f"{module}.{k}": v for k, v in stored.items()}, int4.unpack(words, scale)


def fp8_tensors(module, weight):
    """(stored tensors, the matrix they mean)."""
    codes, scale = fp8.quantise(weight)
    stored = {"weight": codes, "weight_scale_inv": scale}
    return {f"{module}.{k}": v for k, v in stored.items()}, codes.float() * fp8.spread(scale, *codes.shape)


def quantised(tensors, pack, chosen):
    """`tensors` with every matrix that `chosen(module)` packed -> (as stored, as meant)."""
    stored, meant = {}, {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if chosen(module):
            parts, meant[name] = pack(module, weight)
            stored.update(parts)
        else:
            stored[name] = meant[name] = weight
    return stored, meant


def uneven(tensors, seed=0):
    """Expert matrices with every group of 32 columns 0.1 to 1 times as large: a scale of the wrong group is loud."""
    draw = torch.Generator().manual_seed(seed)
    out = {}
    for name, weight in tensors.items():
        if ".experts." in name:
            size = 10 ** -torch.rand(weight.shape[0], -(-weight.shape[1] // 32), generator=draw)
            weight = 2 * weight * size.repeat_interleave(32, 1)[:, : weight.shape[1]]
        out[name] = weight
    return out
