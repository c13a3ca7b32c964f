"""Weight formats: which stored tensors make up the experts of a layer, how they are cut, and the parameters that
result."""

from collections.abc import Callable

from weights.fields import Fields
from weights.formats.dense import BiasedExperts, Dense, DenseExperts, ExpertNames, Experts
from weights.formats.fp8 import Fp8Blocks, Fp8Experts
from weights.formats.int4 import Int4Experts, Int4Groups
from weights.formats.modules import quantization
from weights.formats.mxfp4 import Mxfp4, Mxfp4Experts

# quant_method of a `quantization_config` -> reader of that object
FORMATS: dict[str, Callable[[Fields], object]] = {
    "compressed-tensors": Int4Groups.read,
    "fp8": Fp8Blocks.read,
    "mxfp4": Mxfp4.read,
}

__all__ = [
    "FORMATS",
    "BiasedExperts",
    "Dense",
    "DenseExperts",
    "ExpertNames",
    "Experts",
    "Fp8Blocks",
    "Fp8Experts",
    "Int4Experts",
    "Int4Groups",
    "Mxfp4",
    "Mxfp4Experts",
    "format_of",
]


def format_of(config: dict, where: str):
    """The format that config.json names: an object with the methods of Dense. Refused: a
    `quantization_config` of a method without a row in FORMATS, or of a scheme that its row does not know."""
    fields = quantization(config, where)
    if fields is None:
        return Dense()
    return FORMATS[fields.choice("quant_method", tuple(FORMATS))](fields)
