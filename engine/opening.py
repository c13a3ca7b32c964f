"""Opening the two checkpoints of a pair: which config a target's architecture has, and what a draft is named by.
Nothing but headers is read."""

from dataclasses import dataclass

from weights import AnyCheckpoint, Checkpoint, Refused, Renamed, head_names, named, resolve
from weights.config import (
    DeepseekConfig,
    Eagle3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from weights.formats import format_of

CONFIGS = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen3ForCausalLM": LlamaConfig,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "DeepseekV2ForCausalLM": DeepseekConfig,
    "DeepseekV3ForCausalLM": DeepseekConfig,
    "KimiK25ForConditionalGeneration": DeepseekConfig,
    "MixtralForCausalLM": MixtralConfig,
    "Glm4MoeForCausalLM": Glm4MoeConfig,
    "GptOssForCausalLM": GptOssConfig,
}


@dataclass(frozen=True)
class Opened:
    """A checkpoint with its config read: `config` of weights.config, `folder` None for random weights."""

    checkpoint: object
    config: object
    folder: object


def config_of(checkpoint):
    """Where the keys of a checkpoint's config stand, for messages."""
    return f"{checkpoint.where}/config.json"


def _reduced(raw, layers):
    """The config with fewer layers, or as it is (None)."""
    if layers is None:
        return raw
    if "text_config" in raw:
        return {**raw, "text_config": _reduced(raw["text_config"], layers)}
    if layers > (most := raw.get("num_hidden_layers", layers)):
        raise Refused(f"layers: {layers}; supported: 1 to {most}, those of the architecture")
    return {**raw, "num_hidden_layers": layers}


def open_target(options):
    """The target's checkpoint and config; nothing but headers is read."""
    if options.random is not None:
        found = named(options.random)
        if "target" not in found:
            raise Refused(f"random: {options.random!r} describes a draft head; supported there: --draft random:NAME")
        checkpoint, folder = AnyCheckpoint(_reduced(found["target"], options.layers)), None
    elif options.layers is not None:
        raise Refused(f"layers: {options.layers} needs random weights; supported: with --random")
    else:
        folder = resolve(options.target)
        checkpoint = Checkpoint.open(folder)
    names = checkpoint.config.get("architectures")
    reader = CONFIGS.get(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if reader is None:
        raise Refused(
            f"{config_of(checkpoint)}: key 'architectures' is {names!r}; supported targets: {', '.join(CONFIGS)}"
        )
    config = reader.read(checkpoint.config, config_of(checkpoint), checkpoint.generation)
    return Opened(format_of(checkpoint.config, config_of(checkpoint)).view(checkpoint), config, folder)


def open_draft(options):
    """The drafter's checkpoint (under canonical names) and config, None where there is none."""
    if options.draft is None or options.draft == "none":
        return None
    if options.draft.startswith("random:"):
        found = named(options.draft.removeprefix("random:"))
        if "draft" not in found:
            raise Refused(f"draft: {options.draft!r} names a target config; supported there: --random NAME")
        raw = found["draft"]
        own = {"lm_head.weight", "d2t"} if raw.get("draft_vocab_size") else {"lm_head.weight"}
        later = range(1, raw.get("num_hidden_layers", 1))
        norms = {f"layers.{i}.input_layernorm.weight" for i in later}
        checkpoint, folder = AnyCheckpoint(raw, present=own | norms), None
    else:
        folder = resolve(options.draft)
        checkpoint = Checkpoint.open(folder)
        checkpoint = Renamed(checkpoint, head_names(checkpoint))
    return Opened(checkpoint, Eagle3Config.read(checkpoint.config, config_of(checkpoint)), folder)
