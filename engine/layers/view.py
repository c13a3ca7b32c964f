"""The same weights under another table of operations: what lets a prompt's passes run other kernels than decoding."""

import copy

from kernels import Ops


def view(model, ops):
    """A copy of `model` (a target, a drafter or a layer) that calls `ops`; every tensor is shared with the original.

    Weights changed in place count in both. Objects from elsewhere, e.g. a user's own drafter, are returned as they are.
    """
    return _view(model, ops, {})


def _view(item, ops, done):
    if isinstance(item, Ops):
        return ops
    if isinstance(item, list):
        return [_view(x, ops, done) for x in item]
    if not type(item).__module__.startswith("engine."):
        return item
    if id(item) not in done:
        done[id(item)] = twin = copy.copy(item)
        for name, value in vars(item).items():
            if isinstance(value, Ops | list) or hasattr(value, "__dict__"):
                object.__setattr__(twin, name, _view(value, ops, done))
    return done[id(item)]
