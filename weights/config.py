"""Configs of the supported models, by one name each: targets, draft heads, and the reader they are built on."""

from weights.deepseek import DeepseekConfig
from weights.eagle3 import Eagle3Config
from weights.families import Glm4MoeConfig, GptOssConfig, MixtralConfig
from weights.fields import Fields, Refused, named
from weights.rotary import Rope, rope
from weights.targets import LlamaConfig, Qwen3MoeConfig, eos_ids

__all__ = [
    "DeepseekConfig",
    "Eagle3Config",
    "Fields",
    "Glm4MoeConfig",
    "GptOssConfig",
    "LlamaConfig",
    "MixtralConfig",
    "Qwen3MoeConfig",
    "Refused",
    "Rope",
    "eos_ids",
    "named",
    "rope",
]
