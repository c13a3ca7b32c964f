"""Structs of csrc as ctypes sees them."""

import ctypes


def structure(name, **fields):
    """A ctypes struct: p, f, i, z = names of pointers, floats, ints and sizes, in the order of the C struct."""
    kinds = {"p": ctypes.c_void_p, "f": ctypes.c_float, "i": ctypes.c_int, "z": ctypes.c_size_t}
    listed = [(field, kinds[kind]) for kind, names in fields.items() for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": listed})
