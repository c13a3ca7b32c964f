"""Sees when tensors below an object have been changed or replaced: captured graphs point to the old ones, and cached
rows were computed from the old values."""

import types

import torch

OPAQUE = (str, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def tensors(roots, beyond=()):
    """[(place, tensor)] of all that `roots` reach through attributes, lists, tuples and dicts; a place is (owner's id,
    name). `beyond`: objects that are not entered."""
    seen, waiting, found = {id(thing) for thing in beyond}, list(roots), []
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, OPAQUE):
            continue
        if isinstance(thing, list | tuple):
            parts = enumerate(thing)
        elif isinstance(thing, dict):
            parts = thing.items()
        elif hasattr(thing, "__dict__"):
            parts = vars(thing).items()
        else:
            continue
        seen.add(id(thing))
        for name, part in parts:
            if isinstance(part, torch.Tensor):
                found.append(((id(thing), name), part))
            else:
                waiting.append(part)
    return found


class Watch:
    """What was last seen of two sets of tensors.

    A name bound to another tensor is seen by the address of its memory, a tensor changed in place by the version that
    torch counts for autograd (it has no public name for that). Writes past torch (`.data`, a kernel of one's own) are
    not seen. Tensors that come anew are no change.
    """

    def __init__(self):
        self.places, self.values = {}, {}

    def look(self, placed, valued):
        """placed, valued: as `tensors` gives them -> (whether one of those last `placed` has gone from its place,
        whether one of those last `valued` has another value)."""
        places = {place: tensor.data_ptr() for place, tensor in placed}
        values = {place: (t.data_ptr(), 0 if t.is_inference() else t._version) for place, t in valued}
        gone, changed = not self.places.items() <= places.items(), not self.values.items() <= values.items()
        self.places, self.values = places, values
        return gone, changed
