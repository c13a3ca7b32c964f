"""Calls of operations as real cycles make them: their arguments kept, the bytes that each must move counted."""

import dataclasses
import inspect
from dataclasses import dataclass

import torch

from kernels import REFERENCE, Ops, attend, moe

SMALL = 4 << 20  # bytes; a smaller argument is copied, and put back before every turn where the call changes it
# arguments that are not read whole: of experts those that were chosen, of a cache what is committed and what is written
EXPERTS = ("gate_up", "gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias")
CACHED = ("qkv", "attention", "attend", "mla_qkv", "mla_attention")
PARTLY = dict.fromkeys(("experts", "experts_int4", "experts_fp8", "experts_mxfp4", "moe", "moe_int4"), EXPERTS)
PARTLY |= dict.fromkeys(CACHED, ("k_plane", "v_plane", "plane", "cos_sin", "pages")) | {"commit": ("storage", "pages")}
PARTLY |= dict.fromkeys(("embed", "embed_share", "draft_input"), ("table",))
COMPOSED = {  # noted whole, and in their parts
    "attend": (attend.composed, "qkv", "attention"),
    "moe": (moe.composed, "route", "experts"),
    "moe_int4": (moe.composed_int4, "route", "experts_int4"),
}


@dataclass
class Call:
    """One call of a field as a cycle made it; kept: (argument, its value before the call) of what it changes."""

    args: tuple
    kept: list[tuple[torch.Tensor, torch.Tensor]]
    nbytes: int


def tensors(x):
    """Tensors in nested tuples."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for part in x:
            yield from tensors(part)


def own_copy(x, lasting: set[int]):
    """The same with every small tensor copied, but for those whose storage is `lasting`: weights and caches."""
    if isinstance(x, torch.Tensor):
        if x.nbytes >= SMALL or x.untyped_storage().data_ptr() in lasting:
            return x
        return x.clone().pin_memory() if x.is_pinned() else x.clone()
    return type(x)(own_copy(part, lasting) for part in x) if isinstance(x, tuple | list) else x


def traffic(field: str, args: tuple, out) -> int:
    """Bytes that a call must move: arguments and results, of a cache or of experts what is touched."""
    named = dict(inspect.signature(getattr(REFERENCE, field)).bind(*args).arguments)
    partly = PARTLY.get(field, ())
    whole = tuple(value for name, value in named.items() if name not in partly)
    total = sum(t.nbytes for t in tensors(whole)) + sum(t.nbytes for t in tensors(out))
    if partly is EXPERTS:
        ids = named["ids"] if "ids" in named else REFERENCE.route(*args[:7])[1]
        stacks = [named[name] for name in EXPERTS if named.get(name) is not None]
        total += int(ids.unique().numel()) * sum(stack.nbytes // stack.shape[0] for stack in stacks)
    elif field in CACHED:
        rows, prefix = args[0].shape[0], named.get("prefix")  # written by projections; read, with what is committed
        if named.get("window"):
            prefix = prefix.clamp(max=named["window"])
        written = 0 if field.endswith("attention") else rows
        read = 0 if prefix is None else int(prefix.sum()) + rows
        planes = [named[name] for name in ("k_plane", "v_plane", "plane") if name in named]
        total += (written + read) * sum(plane[0].nbytes for plane in planes)
    elif "table" in partly:
        table, ids = named["table"], named["ids"]
        total += table.nbytes if ids is None else ids.numel() * table[0].nbytes
    elif field == "commit":
        rows = named["storage"]
        moved = int(named["accept_lens"].sum())
        total += 2 * moved * rows.nbytes // rows.shape[2]
    return total


class Recorder:
    """A table of operations that notes every call: {(field, sizes): [Call]}. Runs eagerly; waits for the device."""

    def __init__(self, ops: Ops):
        self.calls, self.on, self.lasting = {}, False, set()
        own = {f.name: self._noted(f.name, getattr(ops, f.name)) for f in dataclasses.fields(ops)}
        for name, (composed, first, second) in COMPOSED.items():
            own[name] = self._noted(name, composed(own[first], own[second]))
        self.ops = dataclasses.replace(ops, **own)

    def _noted(self, field, operation):
        def call(*args):
            if not self.on:
                return operation(*args)
            copied = own_copy(args, self.lasting)  # a cycle's buffers hold other things when this is timed
            before = own_copy(args, self.lasting)
            out = operation(*args)
            self.on = False  # once more, for what it changes; its parts are noted
            own = list(tensors(args))
            largest = max(own, key=lambda t: t.nbytes) if own else None
            sizes = [own[0], largest] if own and largest is not own[0] else own[:1]
            key = field, ",".join("x".join(map(str, t.shape)) for t in sizes)
            operation(*copied)
            self.on = True
            pairs = zip(tensors(copied), tensors(before), strict=True)
            kept = [(t, b) for t, b in pairs if t.nbytes < SMALL and not torch.equal(t, b)]
            self.calls.setdefault(key, []).append(Call(copied, kept, traffic(field, args, out)))
            return out

        return call
