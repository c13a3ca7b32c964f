"""A CUDA-graph EAGLE-3 engine for mixture-of-experts models."""

from weights.config import Refused

from .engine import Engine, Sampling
from .shape import Shape

__all__ = ["Engine", "Refused", "Sampling", "Shape"]
