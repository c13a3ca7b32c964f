"""Whatever ends a request early, at any line (B13), leaves the engine as it was: exceptions, Ctrl-C, a dropped
stream."""

import contextlib
import gc
import sys

import pytest
from toys import NEXT, follow, pair

from engine import Refused, Sampling, Shape

CHAIN = Shape(3, 1, 4)

pytestmark = pytest.mark.usefixtures("nan_memory")


def pages_add_up(engine):
    """Every page is in one place: free, or in a cached block that nobody holds."""
    pool = engine.pool
    cached = [page for block in pool._blocks.values() for page in block.pages]
    assert sorted([*pool._free, *cached]) == list(range(1, pool.size + 1))
    assert not any(block.users for block in pool._blocks.values()) and not pool._held
    assert pool.free == pool.size
    state = [s for s in engine.programs.states.values()]
    assert all(s.table.eq(0).all() and s.done.eq(1).all() for s in state)


def serves(engine, after=NEXT):
    pages_add_up(engine)
    assert engine.generate([3, 9], Sampling(max_new_tokens=9), shape=CHAIN).token_ids == follow(9, 9, after)


HOST = tuple(f"engine/{name}.py" for name in ("session", "cache", "engine", "asking", "request"))


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in the given files, once."""

    def __init__(self, at, files=HOST):
        self.left, self.files = at, files

    def _line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line if self.left > 0 else None

    def __call__(self, frame, event, _):
        return self._line if frame.f_code.co_filename.endswith(self.files) else None

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *args):
        sys.settrace(self.before)


def test_ctrl_c_at_any_line_leaves_the_engine_usable(toys):
    """Three prompts that share a beginning, in two slots, interrupted at one line after another of the host's code.
    Mutants: pages lost between pool and request; a flag that says busy for ever; a slot that stays seated; a block
    counted as held by a request that is gone."""
    engine = pair(toys.map(), toys.map_draft(), page_size=2, prefill_chunk=4, max_batch=2, pages=60)
    prompts = [follow(5, 10, NEXT) + [7], follow(5, 10, NEXT), follow(5, 10, NEXT) + [9, 8]]

    def run():
        engine.pool.forget()
        return engine.generate(prompts, Sampling(max_new_tokens=6), shape=CHAIN)

    run()
    count = Interrupt(10**9)
    with count:
        run()
    lines = 10**9 - count.left
    assert lines > 300
    interrupted = 0
    for at in range(1, lines, max(1, lines // 80)):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at):
            run()
            interrupted -= 1
        interrupted += 1
        serves(engine)
    assert interrupted > 70


def test_an_exception_in_the_loop_of_a_caller(toys):
    """B13: at every event of one and of four requests. Mutant: pages given back by the slot's next request only."""
    engine = pair(toys.map(), toys.map_draft())
    for number in range(7):
        with pytest.raises(KeyError):
            for at, _ in enumerate(engine.stream([9], Sampling(max_new_tokens=40), shape=CHAIN)):
                if at == number:
                    raise KeyError("the caller's own")
        serves(engine)
        with pytest.raises(KeyError):
            for at, _ in enumerate(engine.stream_all([[i] for i in range(6)], [Sampling(max_new_tokens=9)] * 6)):
                if at == number:
                    raise KeyError("the caller's own")
        serves(engine)


def test_a_dropped_stream_is_no_stream(toys):
    """A generator that nobody holds any more, one in a cycle of references, one never begun. Mutants: the engine keeps
    the events alive itself; a busy flag set before the first event."""
    engine = pair(toys.map(), toys.map_draft())
    for steps in range(4):
        events = engine.stream([9], Sampling(max_new_tokens=40), shape=CHAIN)
        for _ in range(steps):
            next(events)
        if steps:
            with pytest.raises(Refused, match="in progress"):
                engine.generate([9])
            with pytest.raises(Refused, match="in progress"):
                engine.score([9, 8])
        del events
        serves(engine)
    loop = [engine.stream([9], Sampling(max_new_tokens=40), shape=CHAIN)]
    loop.append(loop)
    next(loop[0])
    del loop
    gc.collect()
    serves(engine)


def test_a_failure_in_a_pass_frees_everything(toys):
    """The device's own error, in prefill and in a cycle. Mutant: only the caller's exceptions are cleaned up after."""
    engine = pair(toys.map(), toys.map_draft())
    forward, calls, fail_at = engine.target.forward, [], [0]

    def failing(*args):
        calls.append(1)
        if len(calls) == fail_at[0]:
            raise RuntimeError("out of memory")
        return forward(*args)

    for fail_at[0] in range(1, 6):
        calls.clear()
        engine.target.forward = failing
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([[9], [8], [7]], Sampling(max_new_tokens=30), shape=CHAIN)
        engine.target.forward = forward
        serves(engine)
