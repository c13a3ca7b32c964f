"""A delay of known length that runs where the work runs: the test of every clock that claims to time a stage."""

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def _spin(nanoseconds):
    end = globaltimer().to(tl.int64) + nanoseconds
    now = end - nanoseconds
    while now < end:
        now = globaltimer().to(tl.int64)


class Spin:
    """Call it to keep the device's stream (on the CPU: the thread) busy for `ms`."""

    def __init__(self, ms, device):
        self.ms, self.device = ms, device

    def __call__(self):
        if self.device.type == "cuda":
            _spin[(1,)](round(self.ms * 1e6), num_warps=1)
            return
        end = time.perf_counter_ns() + round(self.ms * 1e6)
        while time.perf_counter_ns() < end:
            pass


class DelayedTarget:
    """A target that spins in every pass of a cycle, and in none over a prompt."""

    def __init__(self, real, spin):
        self.real, self.spin = real, spin

    def __getattr__(self, name):
        if name == "real":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.real, name)

    def forward(self, batch, cache):
        """The real one's; a batch with ancestor bits is a cycle's."""
        if batch.tree is not None:
            self.spin()
        return self.real.forward(batch, cache)
