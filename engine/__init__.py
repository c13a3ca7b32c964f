"""A CUDA-graph EAGLE-3 engine for mixture-of-experts models."""

import importlib

PLACES = {
    "Engine": "engine.engine",
    "Refused": "weights.config",
    "Sampling": "engine.request",
    "Shape": "engine.shape",
    "spawn": "engine.ranks",
}
__all__ = list(PLACES)


def __getattr__(name):
    """What the package hands out, imported when it is asked for: a command has its handler of Ctrl-C before torch."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)
