"""CUDA graphs by (batch, shape, stages): one capture function for whole cycles and for single stages.

On the CPU, or with graphs off, the same program runs eagerly and the entry says why.
"""

import contextlib
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from weights.config import Refused

from .cycle import Cycle

MODES = ("auto", "required", "off")


@dataclass
class Entry:
    """One program and what became of it; counts exclude warm-up and capture."""

    batch: int
    shape: str
    stages: tuple
    reason: str | None  # why it is not captured
    graph: Any = None
    replays: int = 0
    eager: int = 0

    def report(self):
        """The entry of the statistics: batch, shape, captured, reason, replays, eager."""
        return {
            "batch": self.batch,
            "shape": self.shape,
            "captured": self.graph is not None,
            "reason": self.reason,
            "replays": self.replays,
            "eager": self.eager,
        }


@contextlib.contextmanager
def uncollected():
    """Garbage is collected before the block and not in it: destroying a graph during a capture ends the capture. Once
    for many captures, since each look at all objects costs as much as a capture."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Graphs:
    """Programs captured on first use, all in one memory pool.

    Args:
        mode: auto (capture on CUDA), required (Refused where it cannot be), off.
        capturing: callable(list) -> iterable over it, which is walked through while programs are captured, as a
        progress bar is; None: nobody watches.
    """

    def __init__(self, mode, device, capturing=None):
        if mode not in MODES:
            raise Refused(f"graphs: {mode!r} is unknown; supported: {', '.join(MODES)}")
        self.reason = None
        if device.type != "cuda":
            self.reason = f"CUDA graphs need a CUDA device; this is {device.type}"
        elif mode == "off":
            self.reason = "graphs are off"
        if mode == "required" and self.reason:
            raise Refused(f"graphs: required, but {self.reason}")
        self.entries, self.pool, self.capture_ms = {}, None, 0.0
        self.capturing = capturing or iter

    def run(self, program, batch, shape, stages):
        """Run `program.run(stages)`, captured if it can be; `program` is an engine.cycle.Cycle or CatchUp."""
        entry = self.entries.get(self._key(program, batch, shape, stages))
        entry = entry or self.prepare(program, batch, shape, stages)
        if entry.graph is None:
            entry.eager += 1
            program.run(stages)
        else:
            entry.replays += 1
            entry.graph.replay()

    def prepare(self, *works):
        """The program's entry, captured on first use. The state is left as it was."""
        self.prepare_all([works])
        return self.entries[self._key(*works)]

    def prepare_all(self, programs):
        """Entries for a list of what `prepare` takes: (program, batch, shape, stages)."""
        missing = [works for works in programs if self._key(*works) not in self.entries]
        if self.reason is not None:
            for works in missing:
                self._enter(*works)
        elif missing:
            began = time.perf_counter()
            with uncollected():
                for works in self.capturing(missing):
                    self._enter(*works)
            self.capture_ms += (time.perf_counter() - began) * 1e3

    def _enter(self, program, batch, shape, stages):
        entry = Entry(batch, str(shape), stages, self.reason)
        if self.reason is None:
            entry.graph = self._capture(program, stages)
        self.entries[self._key(program, batch, shape, stages)] = entry

    @staticmethod
    def _key(program, batch, shape, stages):
        return batch, shape, id(program), stages

    def forget(self, programs=None):
        """Drop the captures of these programs, or all: the tensors they point to are no longer the ones in use."""
        gone = None if programs is None else {id(program) for program in programs}
        if self.reason is None:
            torch.cuda.synchronize()  # a replay launched ahead of an abort may still run
        for key in [key for key in self.entries if gone is None or key[2] in gone]:
            del self.entries[key]

    def _capture(self, program, stages):
        """Warm up on a side stream over a state that is put back afterwards, then record; inside `uncollected`."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        kept = program.state.snapshot()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            program.run(stages)
        torch.cuda.current_stream().wait_stream(side)
        program.state.restore(kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            program.run(stages)
        torch.cuda.synchronize()
        return graph

    def report(self):
        """One entry a (batch, shape) of whole cycles; its programs (with details or stamps, say) are added up."""
        merged = {}
        for entry in self.entries.values():
            if entry.stages != Cycle.stages:
                continue
            row = entry.report()
            first = merged.setdefault((entry.batch, entry.shape), row)
            if first is not row:
                first["captured"] = first["captured"] and row["captured"]
                first["replays"] += row["replays"]
                first["eager"] += row["eager"]
        return list(merged.values())
