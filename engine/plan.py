"""How a pair is built: once on "meta" to check and count, once for real; over how many ranks, and how the draft is."""

import contextlib
import time
from dataclasses import dataclass, replace

import torch

from kernels import Ops
from weights import Refused, Source
from weights.capture import Capture
from weights.cut import SIZES, Misfit
from weights.formats import format_of
from weights.heads import tolerated

from .drafters import DRAFTERS
from .opening import Opened
from .sharing import Dealt, Lent
from .targets import TARGETS
from .tp import TP
from .watch import tensors

DRAFT_TP = ("cut", "replicated", "auto")
MEASURED = 20  # collectives timed


@dataclass(frozen=True)
class Plan:
    """How to build both models on a device; run once on "meta" to check and count, once for real."""

    target: Opened
    draft: Opened | None
    capture: Capture | None
    length: int  # positions of the rotary tables
    ops: Ops
    tp: TP
    dtype: torch.dtype
    draft_tp: TP = TP()
    expert_parallel: bool = False

    def alone(self):
        """The same on one device."""
        return replace(self, tp=TP(), draft_tp=TP())

    def build(self, device):
        """-> target, its Source, drafter or None, its Source or None; memory is allocated, nothing is read."""
        tp, opened = self.tp, self.target
        source = Source(opened.checkpoint, device, self.dtype, tp.rank, tp.size)
        experts = format_of(opened.checkpoint.config, f"{opened.checkpoint.where}/config.json")
        experts = Dealt(experts) if self.expert_parallel else experts
        layers = () if self.capture is None else self.capture.boundaries
        make = TARGETS[opened.config.architecture]
        target = make(opened.config, source, layers, self.length, experts, self.ops, tp)
        if self.draft is None:
            return target, source, None, None
        found, own = self.draft.checkpoint, self.draft_tp
        head = Source(found, device, self.dtype, own.rank, own.size, tolerates=tolerated)
        lender = target if own.size == tp.size else Lent(target, source)
        make = DRAFTERS[self.draft.config.architecture]
        return target, source, make(self.draft.config, head, lender, self.length, self.ops, own), head


def divided(plan, draft_tp):
    """Build on "meta", which reads nothing; where the ranks cannot hold the pair, Refused with the numbers that could.

    Returns:
        plan, plan.build("meta"), and the reason why its draft is cut or replicated: None where both can be.
    """
    try:
        return plan, plan.build("meta"), None if draft_tp == "auto" else f"{draft_tp}, as asked"
    except Misfit as misfit:
        if draft_tp == "auto" and plan.draft is not None:
            with contextlib.suppress(Misfit):
                plan = replace(plan, draft_tp=TP())
                return plan, plan.build("meta"), "replicated, for its sizes do not divide"
        whole = plan.alone().build("meta")
        parts = [whole[1]] if plan.draft is None or draft_tp == "replicated" else [whole[1], whole[3]]
        works = ", ".join(str(n) for n in SIZES if all(part.fits(n) for part in parts))
        raise Refused(f"tp: {plan.tp.size}: {misfit.fault}; sizes that work for the whole pair: {works}") from None


def faster(plan, dry, device):
    """The plan whose draft pass is faster, cut (`plan`, with its dry build) or replicated, by the bytes it reads and
    the collectives it waits for, both timed now; all ranks take rank 0's clock. Returns as `divided` does."""
    tp = plan.tp
    collective, speed = tp.every(_measure(tp, plan.target.config.hidden, device, plan.dtype))[0]
    whole = replace(plan, draft_tp=TP())
    other = whole.build("meta")
    collectives = 2 * plan.draft.config.layers + 2  # attention, MLP; embedding, head
    cut, replicated = _read(dry[2]) / speed + collectives * collective, _read(other[2]) / speed
    times = f"{1e6 * cut:.0f} us a pass cut ({collectives} collectives of {1e6 * collective:.1f} us), "
    times += f"{1e6 * replicated:.0f} us replicated"
    if replicated <= cut:
        return whole, other, f"replicated: {times}"
    return plan, dry, f"cut: {times}"


def _read(drafter):
    """Bytes of weights that a pass of a drafter reads."""
    held = {id(tensor): tensor.nbytes for _, tensor in tensors([drafter])}
    return sum(held.values()) - drafter.embedding.weight.nbytes


def _measure(tp, hidden, device, dtype):
    """Seconds of one collective of a row, bytes per second of a large read."""
    words = 1 << (26 if device.type == "cuda" else 22)  # past a GPU's cache
    row, large = torch.zeros(1, hidden, device=device, dtype=dtype), torch.zeros(words, device=device)
    return _seconds(lambda: tp.all_reduce(row), device), large.nbytes / _seconds(large.sum, device)


def _seconds(work, device):
    """Of one `work`, the mean over a number of them back to back; on CUDA in a graph, as a cycle has them."""
    work()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(MEASURED):
            work()
        return (time.perf_counter() - began) / MEASURED
    torch.cuda.synchronize(device)
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        for _ in range(MEASURED):
            work()
    graph.replay()  # the first one is slower
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / MEASURED
