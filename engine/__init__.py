"""A CUDA-graph EAGLE-3 engine for mixture-of-experts models."""

from weights.config import Refused

from .engine import Engine, Sampling
from .ranks import spawn
from .shape import Shape

__all__ = ["Engine", "Refused", "Sampling", "Shape", "spawn"]
