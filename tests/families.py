"""Tiny random checkpoints of the target families besides Qwen's and Llama's, written by transformers itself."""

import json
from pathlib import Path

import torch
from toys import V

BASE = {
    "hidden_size": 64,
    "vocab_size": V,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
MIXTRAL = {
    **BASE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
}
GLM = {
    **BASE,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
GPT_OSS = {
    **BASE,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "swiglu_limit": 7.0,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 150.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
    },
}
VARIANTS = {
    "mixtral": MIXTRAL,
    "mixtral windowed, tied": {**MIXTRAL, "sliding_window": 3, "tie_word_embeddings": True},
    "glm": GLM,
    "glm air": {
        **{k: v for k, v in GLM.items() if k != "partial_rotary_factor"},
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 2,
    },
    "glm groups": {**GLM, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "norm_topk_prob": False},
    "gpt-oss": GPT_OSS,
    "gpt-oss by default, wider window": {
        **{k: v for k, v in GPT_OSS.items() if k != "layer_types"},
        "sliding_window": 9,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
    },
    "glm whole heads, dense": {
        **GLM,
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 3,
        "attention_bias": False,
    },
}


def checkpoint(folder, raw, style=4, seed=3):
    """A random checkpoint as transformers writes it; its config.json in the style of transformers 4 or its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {k: v for k, v in raw.items() if k not in ("architectures", "model_type", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw["model_type"], **given))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in sorted(model.state_dict().items()):
            noise = torch.randn(x.shape, generator=draw)
            if "norm" in name:
                x.copy_(1 + 0.3 * noise)
            elif "bias" in name or "sinks" in name:
                x.copy_(0.3 * noise if "correction" in name else noise)
            else:
                gain = (
                    8
                    if "embed" in name
                    else 4
                    if name.endswith("gate_up_proj") and raw["model_type"] == "gpt_oss"
                    else 1.5
                )
                x.copy_(noise * gain * x.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    if style == 4:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
    return str(folder)
