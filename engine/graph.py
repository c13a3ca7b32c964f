"""CUDA graphs by (batch, shape, stages): one capture function for whole cycles and for single stages.

On the CPU, or with graphs off, the same program runs eagerly and the entry says why.
"""

from dataclasses import dataclass
from typing import Any

import torch

from weights.config import Refused

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


class Graphs:
    """Programs captured on first use, all in one memory pool.

    Args:
        mode: auto (capture on CUDA), required (Refused where it cannot be), off.
    """

    def __init__(self, mode, device):
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

    def run(self, program, batch, shape, stages):
        """Run `program.run(stages)`, captured if it can be; `program` is an engine.cycle.Cycle or CatchUp."""
        key = (batch, shape, id(program), stages)
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(batch, str(shape), stages, self.reason)
            if self.reason is None:
                entry.graph = self._capture(program, stages)
        if entry.graph is None:
            entry.eager += 1
            program.run(stages)
        else:
            entry.replays += 1
            entry.graph.replay()

    def _capture(self, program, stages):
        """Warm up on a side stream over a state that is put back afterwards, then record."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        keep = program.state.snapshot()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            program.run(stages)
        torch.cuda.current_stream().wait_stream(side)
        program.state.restore(keep)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            program.run(stages)
        end.record()
        end.synchronize()
        self.capture_ms += start.elapsed_time(end)
        return graph

    def report(self):
        """One entry a program of whole cycles."""
        return [e.report() for e in self.entries.values() if e.stages != ("catch_up",)]
