"""Tiny checkpoints of targets with latent attention, as DeepSeek and Kimi write theirs, and transformers as their
oracle."""

import json
from pathlib import Path

import torch
from oracles import Transformers
from safetensors.torch import load_file
from toys import D, Noise, V

EXPERTS, WIDTH = 8, 32
YARN = {
    **{"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}


def deepseek_config(layers=3, **changes):
    """config.json of a DeepSeek-V3 toy."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": D,
        "vocab_size": V,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 96,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": YARN,
        "max_position_embeddings": 1024,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": V - 1,
        "torch_dtype": "float32",
        **changes,
    }


V2_LITE = {
    **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None},
    **{"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "num_experts_per_tok": 3},
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
KIMI = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5}


def deepseek_tensors(config, noise):
    """Random tensors under DeepSeek's names."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
    plain, turned, value = (config[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    out = {"model.embed_tokens.weight": noise.matrix(V, D) * 8, "model.norm.weight": noise.norm(D)}
    out["lm_head.weight"] = noise.matrix(V, D)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{name}.weight"] = noise.norm(D)
        for name, tensor in latent_tensors(noise, D, heads, q_rank, rank, plain, turned, value).items():
            out[f"{at}self_attn.{name}.weight"] = tensor
        blocks = {f"{at}mlp.": config["intermediate_size"]}
        if layer >= config["first_k_dense_replace"]:
            blocks = {f"{at}mlp.experts.{e}.": config["moe_intermediate_size"] for e in range(EXPERTS)}
            blocks[f"{at}mlp.shared_experts."] = config["moe_intermediate_size"] * config["n_shared_experts"]
            out[f"{at}mlp.gate.weight"] = noise.matrix(EXPERTS, D)
            if config["scoring_func"] == "sigmoid":
                out[f"{at}mlp.gate.e_score_correction_bias"] = noise.matrix(EXPERTS, 1)[:, 0]
        for block, width in blocks.items():
            for name, shape in dict(gate=(width, D), up=(width, D), down=(D, width)).items():
                out[f"{block}{name}_proj.weight"] = noise.matrix(*shape)
    return out


def latent_tensors(noise, width, heads, q_rank, rank, plain, turned, value):
    """Random tensors of one attention block; width: columns of its input."""
    out = {"kv_a_proj_with_mqa": noise.matrix(rank + turned, width), "kv_a_layernorm": noise.norm(rank)}
    out |= {"kv_b_proj": noise.matrix(heads * (plain + value), rank), "o_proj": noise.matrix(D, heads * value)}
    rows = heads * (plain + turned)
    if q_rank is None:
        return out | {"q_proj": noise.matrix(rows, width)}
    q_norm = 2 * noise.norm(q_rank)
    return out | {
        "q_a_proj": noise.matrix(q_rank, width),
        "q_a_layernorm": q_norm,
        "q_b_proj": noise.matrix(rows, q_rank),
    }


def deepseek(toys, seed=8, **changes):
    """Directory of a random checkpoint."""
    config = deepseek_config(**changes)
    return toys.save(config, deepseek_tensors(config, Noise(seed, gain=1.5)))


def nested(toys, path):
    """A copy of a Kimi toy as Kimi-K2.5 is published: its text model's keys and tensors below, vision beside them."""
    config = json.loads((Path(path) / "config.json").read_text())
    tensors = {f"language_model.{name}": t for name, t in load_file(f"{path}/model.safetensors").items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 3)
    tensors |= {f"mm_projector.proj.{i}.weight": torch.zeros(2, 2) for i in (0, 2)}
    del config["architectures"]
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": config}
    outer |= {"vision_config": {"hidden_size": 4}, "media_placeholder_token_id": 3, "tie_word_embeddings": False}
    return toys.save(outer | {"dtype": "float32"}, tensors, generation={"eos_token_id": V - 2})


class DeepSeek(Transformers):
    """A toy in transformers. Kimi's name is unknown there, and its norms of latents ignore the config's eps: both are
    set right."""

    def __init__(self, toys, path):
        def rename(config, tensors):
            config["model_type"] = config["model_type"].replace("kimi_k2", "deepseek_v3")

        super().__init__(toys.altered(path, rename))
        for name, module in self.model.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = self.model.config.rms_norm_eps
