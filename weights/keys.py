"""Readings that several configs share: attention shapes, windows, rotary settings, and what no model here computes."""

from __future__ import annotations

from weights.fields import REQUIRED, Fields, Refused, shown
from weights.rotary import Rope, rope


def plain_weights(fields: Fields) -> None:
    """Refuses a quantised draft head, naming its method."""
    for key in ("quantization_config", "compression_config"):
        quantised = fields.sub(key)
        if quantised.raw:
            method = quantised.raw.get("quant_method", "unnamed")
            raise Refused(f"{fields.where}: key '{key}' has quant_method {shown(method)}, expected unquantised weights")


def plain_llama(fields: Fields) -> None:
    """Refuses factors that relatives of Llama put into the same layers: their files differ in nothing else."""
    fields.unless("a capped logit", final_logit_softcapping=None, attn_logit_softcapping=None)
    fields.unless("a scaled residual or embedding", residual_multiplier=1.0, embedding_multiplier=1.0)
    fields.unless("a scaled residual or embedding", scale_emb=1, scale_depth=1, dim_model_base=None)
    fields.unless("another softmax scale", attention_multiplier=None, query_pre_attn_scalar=None)
    fields.unless("layers without rotary positions", no_rope_layers=None, no_rope_layer_interval=None)


def full_attention(fields: Fields) -> None:
    """Refuses windows and chunks."""
    kinds = fields.raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise fields.refuse("layer_types", "'full_attention' for every layer")
    windows(fields, 0)


def windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The window of each of the first `layers` layers, in keys; None sees all. Only `layer_types` puts a window to use,
    as in the loaders of these models: Qwen files name a size beside `use_sliding_window: false`. Refused: a window
    that might be in use without a list, chunks."""
    fields.unless("chunked attention", attention_chunk_size=None)
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        fields.unless("a sliding window without the key 'layer_types'", use_sliding_window=False)
        if fields.has("sliding_window") and fields.raw.get("use_sliding_window") is not False:
            raise fields.refuse("sliding_window", "null (a sliding window is not supported without 'layer_types')")
        return (None,) * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in known for kind in kinds):
        raise fields.refuse("layer_types", f"{' or '.join(map(shown, known))} for each of {layers} layers")
    if "sliding_attention" not in kinds[:layers]:
        fields.unless("a sliding window with layers of full attention only", use_sliding_window=False)
        return (None,) * layers
    if fields.raw.get("use_sliding_window") is False:
        raise fields.refuse("use_sliding_window", "true, since the key 'layer_types' has 'sliding_attention'")
    window = fields.int("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def expert_groups(
    fields: Fields, experts: int, experts_per_token: int, default: int | object = REQUIRED
) -> tuple[int, int]:
    """(groups of experts, how many of them may be chosen from), as DeepSeek and GLM write them; `default` of both.
    Refused: groups that are not equal, too small for a best two, or too few for the choice."""
    groups, kept = fields.int("n_group", default), fields.int("topk_group", default)
    if experts % groups or experts // groups < 2:
        raise fields.refuse("n_group", f"a divisor of the {experts} experts that leaves two or more a group")
    if kept > groups or kept * (experts // groups) < experts_per_token:
        raise fields.refuse("topk_group", f"up to {groups} groups that hold the {experts_per_token} chosen experts")
    return groups, kept


def kv_heads(fields: Fields, heads: int) -> int:
    """Key heads; refused unless they divide the query heads."""
    count = fields.int("num_key_value_heads", heads)
    if heads % count:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    return count


def head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """The explicit key wins: it need not be hidden / heads."""
    if not fields.has("head_dim") and hidden % heads:
        raise fields.refuse("num_attention_heads", f"a divisor of hidden_size {hidden}, or the key 'head_dim'")
    size = fields.int("head_dim", hidden // heads)
    if size % 2:
        raise fields.refuse("head_dim", "an even number (rotary pairs)")
    return size


def rotary(fields: Fields, size: int, theta: float | object = REQUIRED, partial: float = 1.0) -> Rope:
    """The rotary settings of heads of `size` lanes (theta, partial: where the file does not say); refused where the
    rotating share is not whole pairs."""
    found = rope(fields, theta, partial)
    if int(size * found.partial) % 2 or not int(size * found.partial):
        raise fields.refuse("partial_rotary_factor", f"a share of head_dim {size} that makes whole pairs of lanes")
    return found
