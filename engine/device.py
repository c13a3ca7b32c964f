"""Where a pair runs and in which numbers: devices and dtypes by their names."""

import torch

from weights.config import Refused

from .tp import own_gpu

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def device_of(name, tp=1):
    """torch.device of a name, None: CUDA where there is a GPU; with several ranks the GPU of this one. A GPU that is
    named by its number becomes the current one: kernels and graphs go there."""
    if tp > 1 and torch.cuda.is_available() and name in (None, "cuda"):
        return torch.device(own_gpu(tp, torch.cuda.device_count()))
    if tp > 1 and name not in (None, "cpu", "cuda"):
        raise Refused(f"device: {name!r} with {tp} ranks; supported: cpu, or cuda (to each rank the GPU of its number)")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Refused(f"device: {name!r} is unknown; supported: cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise Refused(f"device: {name!r} is not supported; supported: cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Refused(f"device: {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def dtype_of(name, device):
    """torch.dtype of a name, None: bfloat16 on CUDA, float32 on the CPU."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise Refused(f"dtype: {name!r} is unknown; supported: {', '.join(DTYPES)}")
    return DTYPES[name]
