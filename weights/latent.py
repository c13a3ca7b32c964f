"""Latent attention (MLA) in config.json, as DeepSeek writes it and Kimi and the heads for both copy it."""

from __future__ import annotations

from dataclasses import dataclass

from weights.fields import Fields
from weights.keys import full_attention, rotary
from weights.rotary import Rope


@dataclass(frozen=True)
class Latent:
    """Sizes: a position's row holds `rank` latent elements and `turned` rotated ones, shared by all heads."""

    q_rank: int | None  # of the queries' own latent; None: queries are projected at once
    rank: int
    plain: int  # lanes of a head's query and key that do not rotate
    turned: int
    value: int  # lanes of a head's value

    @classmethod
    def read(cls, fields: Fields) -> Latent:
        """Refused: a size missing, rotating lanes that are not whole pairs."""
        sizes = cls(
            q_rank=fields.int("q_lora_rank", None),
            rank=fields.int("kv_lora_rank"),
            plain=fields.int("qk_nope_head_dim"),
            turned=fields.int("qk_rope_head_dim"),
            value=fields.int("v_head_dim"),
        )
        if sizes.turned % 2:
            raise fields.refuse("qk_rope_head_dim", "an even number (rotary pairs)")
        return sizes


def latent_rope(fields: Fields, sizes: Latent) -> Rope:
    """Rotary settings of the `turned` lanes, which all rotate, in interleaved pairs. Refused: kinds that no published
    model of this attention has, and one of YaRN's two mscales alone, which their loaders read differently."""
    fields.unless("half-split rotary lanes", rope_interleave=True)
    found = rotary(fields, sizes.turned, theta=10000.0)
    if found.partial != 1:
        raise fields.refuse("partial_rotary_factor", "1.0 or no such key (all of qk_rope_head_dim rotates)")
    inner = fields.sub("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if found.kind not in ("default", "yarn"):
        raise inner.refuse(inner.first("rope_type", "type"), "'default' or 'yarn'")
    if (found.mscale is None) != (found.mscale_all_dim is None):
        raise inner.refuse("mscale", "both 'mscale' and 'mscale_all_dim', or neither")
    return found


def latent_head(layer: Fields, hidden: int, layers: int) -> dict:
    """The keys of an EAGLE-3 head's attention. Those of experts may stand beside them, copied from the target: they are
    in use only with `use_moe`."""
    heads, sizes = layer.int("num_attention_heads"), Latent.read(layer)
    full_attention(layer)
    layer.unless("experts in a head", use_moe=False)
    layer.unless("latent attention without rotary positions", mla_use_nope=False)
    layer.unless("keys of fewer heads", num_key_value_heads=heads)
    layer.unless("a bias of latent attention", attention_bias=False)
    return dict(
        heads=heads,
        kv_heads=1,
        head_dim=sizes.turned,
        latent=sizes,
        rope=latent_rope(layer, sizes),
        windows=(None,) * layers,
        attention_bias=False,
    )
