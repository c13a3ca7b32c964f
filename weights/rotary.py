"""Rotary settings of a config.json, in both styles that transformers writes; what a kind computes is the rotary
layer's business."""

from __future__ import annotations

from dataclasses import dataclass

from weights.fields import REQUIRED, Fields, shown

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
ROPE_KEYS = (
    "type rope_type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
    "beta_fast beta_slow mscale mscale_all_dim attention_factor truncate partial_rotary_factor"
).split()


@dataclass(frozen=True)
class Rope:
    """Rotary settings as written: numbers that a kind does not use stay at their defaults."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int | None = None  # None: the config's max_position_embeddings
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None  # multiplies cos and sin; None: from the factor and the mscales
    truncate: bool = True  # yarn: floor and ceil of the correction range
    partial: float = 1.0  # share of each head's dims that rotates


def rope(fields: Fields, theta: float | object = REQUIRED, partial: float = 1.0) -> Rope:
    """Reads transformers-4 (`rope_theta`, `rope_scaling`) and -5 (`rope_parameters`) styles. `theta` and `partial` are
    the defaults when neither says. Refuses an unknown kind, an unknown key, and styles that disagree."""
    old, new = fields.sub("rope_scaling"), fields.sub("rope_parameters")
    inner = new if new.raw else old
    settings = _scaling(inner)
    if old.raw and new.raw and any(settings.get(k, v) != v for k, v in _scaling(old).items()):
        raise fields.refuse("rope_scaling", f"the same as rope_parameters {shown(new.raw)}")
    for key, name in (("rope_theta", "theta"), ("partial_rotary_factor", "partial")):
        if fields.has(key) and inner.has(key) and fields.raw[key] != inner.raw[key]:
            raise inner.refuse(key, f"{shown(fields.raw[key])} as in key '{key}'")
        if not inner.has(key):
            settings[name] = fields.float(key, {"theta": theta, "partial": partial}[name])
    if settings["partial"] > 1:
        raise fields.refuse("partial_rotary_factor", "a share of at most 1")
    return Rope(**settings)


def _scaling(inner: Fields) -> dict:
    """The settings inside rope_scaling or rope_parameters, checked against their kind."""
    inner.unless("rotary positions of several kinds (mrope)", mrope_section=None, mrope_interleaved=None)
    for key in inner.raw:
        if key not in ROPE_KEYS:
            raise inner.refuse(key, f"no such key (known: {', '.join(sorted(ROPE_KEYS))})")
    kind = inner.choice(inner.first("rope_type", "type"), ROPE_KINDS, REQUIRED if inner.has("factor") else "default")
    if kind == "default":
        inner.unless("scaling without a kind", factor=1.0)
    if kind != "yarn":
        inner.unless(f"a magnitude with kind '{kind}'", attention_factor=1.0)
    needed = 1.0 if kind == "default" else REQUIRED
    of_llama3 = REQUIRED if kind == "llama3" else None
    settings = dict(
        kind=kind,
        factor=inner.float("factor", needed),
        low_freq_factor=inner.float("low_freq_factor", of_llama3 or 1.0),
        high_freq_factor=inner.float("high_freq_factor", of_llama3 or 4.0),
        original_max_positions=inner.int("original_max_position_embeddings", of_llama3),
        beta_fast=inner.float("beta_fast", 32.0),
        beta_slow=inner.float("beta_slow", 1.0),
        mscale=inner.float("mscale", None),
        mscale_all_dim=inner.float("mscale_all_dim", None),
        attention_factor=inner.float("attention_factor", None),
        truncate=inner.bool("truncate", True),
    )
    if inner.has("rope_theta"):
        settings["theta"] = inner.float("rope_theta")
    if inner.has("partial_rotary_factor"):
        settings["partial"] = inner.float("partial_rotary_factor")
    return settings
