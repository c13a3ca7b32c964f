"""What bytes on disk mean: checkpoints, their names and cuts, their configs. Knows no model code."""

from weights.checkpoint import AnyCheckpoint, Checkpoint, RandomCheckpoint
from weights.config import Eagle3Config, Fields, LlamaConfig, Qwen3MoeConfig, Refused, Rope, eos_ids, named, rope
from weights.cut import Cut
from weights.declared import Report
from weights.heads import Renamed, head_names
from weights.hub import resolve
from weights.source import Source

__all__ = [
    "AnyCheckpoint",
    "Checkpoint",
    "Cut",
    "Eagle3Config",
    "Fields",
    "LlamaConfig",
    "Qwen3MoeConfig",
    "RandomCheckpoint",
    "Refused",
    "Renamed",
    "Report",
    "Rope",
    "Source",
    "eos_ids",
    "head_names",
    "named",
    "resolve",
    "rope",
]
