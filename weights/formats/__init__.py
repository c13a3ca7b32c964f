"""Weight formats: which stored tensors make up the experts of a layer, how they are cut, and the parameters that
result."""

from weights.fields import Fields
from weights.formats.dense import Dense, DenseExperts, ExpertNames
from weights.keys import plain_weights

FORMATS = {"dense": Dense}

__all__ = ["FORMATS", "Dense", "DenseExperts", "ExpertNames", "format_of"]


def format_of(config: dict, where: str) -> Dense:
    """The format that config.json names. Refused: a `quantization_config` without a row in FORMATS."""
    plain_weights(Fields(config, where))
    return FORMATS["dense"]()
