"""Structs of csrc as ctypes sees them."""

import ctypes

import torch


def structure(name, **fields):
    """A ctypes struct: p, f, i, z = names of pointers, floats, ints and sizes, in the order of the C struct."""
    kinds = {"p": ctypes.c_void_p, "f": ctypes.c_float, "i": ctypes.c_int, "z": ctypes.c_size_t}
    listed = [(field, kinds[kind]) for kind, names in fields.items() for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": listed})


def filled(kind, **fields):
    """A struct of such a kind; tensors stand for their pointers, None for null."""
    return kind(**{k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in fields.items()})
