"""Requests in batch slots: seats them, prefills, launches cycles and hands out what they emitted.

The host launches cycle c+1 before it reads cycle c; ends are seen on the device, so the cycle ahead of an end emits
nothing for it, and what it emits past a stop string (which only the host sees) is dropped.
"""

import time
from collections import deque
from dataclasses import dataclass

import torch

from .buffers import MAX_NODES, State
from .cycle import Cycle, prefill
from .logprobs import Logprobs, wanted
from .rules import rule_of
from .shape import PLAIN


class NonFinite(RuntimeError):
    """The target's logits were NaN or infinite: where, of each request that it ended.

    results: of Engine.generate's prompts, None for one that it ended.
    """

    results = None

    @classmethod
    def of(cls, requests):
        """What the requests of a session ended with; None where nothing."""
        said = [f"{request.failure} of request {request.index}" for request in requests if request.failure]
        return cls("; ".join(f"non-finite logits at {place}" for place in said)) if said else None


@dataclass
class TreeView:
    """Copies of one cycle's tree: tokens, parents (root -1), depths, target_ids [T]; aux [T, F]; logits [T, V]."""

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    target_ids: torch.Tensor
    aux: torch.Tensor
    logits: torch.Tensor


@dataclass
class Event:
    """What one cycle gave one request; tree and accepted None for the prefill's own token, features without details.
    One that fails (finish_reason "error") ends without tokens.

    tokens: ids kept; text: what they release; accepted: node indices of the path; features [len(tokens), F], row k
    under emitted token k; logprobs: one entry a token (engine.logprobs) where the request asked for them.
    """

    request: object
    tokens: list[int]
    text: str | None
    tree: TreeView | None = None
    accepted: list[int] | None = None
    features: torch.Tensor | None = None
    logprobs: list[dict] | None = None


class Session:
    """Runs a list of requests to their ends, `batch` at a time. Non-finite logits end the request whose they are; when
    the others have come to their ends, NonFinite is raised.

    chooser: names the shape of each cycle (engine.auto); the drafter catches up first where it must. Where any of its
    shapes drafts, plain cycles keep the drafter's backlog. profile: an engine.profile.Profile that takes the stages'
    times, or None.
    """

    def __init__(self, programs, pool, requests, batch, chooser, prefill_chunk, *, detail=False, profile=None):
        self.programs, self.pool, self.parts = programs, pool, programs.parts
        self.requests, self.names = list(requests), {}
        self.waiting, self.batch, self.chooser, self.chunk = deque(requests), batch, chooser, prefill_chunk
        self.detail, self.profile = detail, profile
        self.drafter = self.parts.drafter if any(s != PLAIN for s in chooser.shapes) else None
        self.margin = max(s.rows_past_prefix for s in chooser.shapes)
        self.state, self.slots, self.launched = programs.state(batch), [None] * batch, 0
        cuda = self.parts.device.type == "cuda"
        self.ends = [torch.cuda.Event() if cuda else None for _ in range(self.state.AHEAD)]
        self.rule, self.logprobs = rule_of(r.sampling for r in requests), wanted(r.sampling for r in requests)
        self.lag = 1  # rows the drafter may be behind, at most
        self.flight = deque()  # cycles launched and not yet read

    def prepare(self):
        """Capture every program that may come, so that no cycle has to wait for it."""
        if waiting := [request for request in self.requests if request.limit > 1]:
            shapes, stamped = self.chooser.shapes, self.profile is not None
            rows = (
                min(len(r.ids) for r in waiting) + min(s.rows_past_prefix for s in shapes),
                max(map(self.rows, waiting)),
            )
            self.programs.prepare(self.batch, shapes, rows, detail=self._logits(), stamped=stamped, rule=self.rule)

    def events(self):
        """Generator of Event; closing it frees every page and empties every slot."""
        try:
            self.state.turn.zero_()  # after whatever an earlier session has left on the stream
            ahead = self.state.AHEAD - 1 if self.parts.device.type == "cuda" else 0
            while self.waiting or any(self.slots) or self.flight:
                yield from self._seat()
                if any(r and not r.finished for r in self.slots):
                    self.flight.append(self._launch())
                if self.flight and (len(self.flight) > ahead or not any(r and not r.finished for r in self.slots)):
                    yield from self._read(self.flight.popleft())
                self._release()
            if (failed := NonFinite.of(self.requests)) is not None:
                raise failed
        except BaseException:  # the caller's exception or Ctrl-C, a closed or forgotten generator
            self._abandon()
            raise

    def _seat(self):
        """Prefill waiting requests into free slots while pages last."""
        while self.waiting and None in self.slots:
            request = self.waiting[0]
            if request.finished:  # nothing was asked for
                self.waiting.popleft()
                yield Event(request, [], None if request.stream is None else "")
                continue
            names = self._names(request)
            request.reused = self.pool.cached(names)
            if self.pool.take(self.rows(request), names, request.pages) is None:
                return
            self.waiting.popleft()
            slot = self.slots.index(None)
            self.slots[slot] = request
            event = self._prefill(slot, request)
            if request.failure is None:
                self.pool.keep(request.pages, names)
            yield event

    def _names(self, request):
        """Names of the blocks of its prompt, for reuse; worked out once, however long it waits."""
        if request.index not in self.names:
            self.names[request.index] = self.pool.names(request.ids, self.drafter is not None)
        return self.names[request.index]

    def rows(self, request):
        """Cache rows a request can ever need: the committed ones, and what the widest cycle writes past them."""
        return len(request.ids) + request.limit - 1 + self.margin

    def _prefill(self, slot, request):
        p, s, graphs = self.parts, self.state, self.programs.graphs
        captured = graphs.capture_ms
        request.begin()
        tokens = torch.tensor([request.ids], device=p.device)
        columns = self.programs.prompt_columns(len(request.pages))
        table = torch.zeros(1, columns, dtype=torch.int32, device=p.device)
        table[0, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32, device=p.device)
        target, drafter = self.programs.for_prompts(self.drafter)
        logits = torch.zeros(1, target.head.vocabulary, device=p.device) if self._logits() else None
        forward = self.programs.forward(target)
        best, lse, feature = prefill(
            target, drafter, p.cache, tokens, table, self.chunk, request.reused, logits, p.begin_prompt, forward
        )
        if not bool(torch.isfinite(lse)):
            return self._failed(request, f"position {len(request.ids) - 1}")
        request.began += (graphs.capture_ms - captured) / 1e3  # a first piece of its width: booked under capture
        request.prefill_ms = (time.perf_counter() - request.began) * 1e3
        s.draws.seat(slot, **request.draws)
        position = torch.full_like(best, len(request.ids))
        first = self.rule.first(p.ops, best, logits, position, s.draws.slot(slot))
        end_ids = sorted(request.end_ids)
        limit = len(request.ids) + request.limit - 1
        s.start(slot, request.pages, len(request.ids), limit, first, feature, end_ids)
        kept, text = request.receive([int(first)])
        asked = self.logprobs is not None
        numbers = Logprobs(logits[None], lse[None], first[None], self.logprobs) if asked else None
        logprobs = request.note(numbers and numbers.entries(0, kept, request.sampling.logprobs or 0))
        return Event(request, kept, text, features=feature.clone() if self.detail else None, logprobs=logprobs)

    def _logits(self):
        """Whether whole rows of logits are needed."""
        return self.detail or self.logprobs is not None or self.rule.logits

    def _launch(self):
        shape = self.chooser.choose([r for r in self.slots if r and not r.finished], self.lag)
        columns = self._columns(shape)
        behind = self.drafter is not None and self.lag > (self.chooser.backlog - 1 if shape == PLAIN else shape.path)
        if behind:
            catch_up = self.programs.catch_up(self.batch, self.drafter, self.lag - 1, columns)
            self.programs.graphs.run(catch_up, self.batch, "catch-up", catch_up.stages)
            self.lag = 1
        stamped = self.profile is not None
        keep = self._logits()
        cycle = self.programs.cycle(
            self.batch, shape, self.drafter, detail=keep, stamped=stamped, rule=self.rule, columns=columns
        )
        self.programs.graphs.run(cycle, self.batch, shape, Cycle.stages)
        self.lag = shape.path if shape != PLAIN else self.lag + 1
        row = self.launched % self.state.AHEAD
        self.launched += 1
        if self.ends[row] is not None:
            self.ends[row].record()
        report = Report(self.state.host[row], self.ends[row], list(self.slots), shape, behind)
        if self.detail:
            report.tree = {n: getattr(cycle.tree, n).clone() for n in DETAILS}
        if self.logprobs is not None:
            report.logprobs = Logprobs.of(cycle.tree, self.state.emitted, self.logprobs)
        return report

    def _columns(self, shape):
        """Columns of the page table that hold all rows which a cycle of `shape` may see or write, whatever the cycles
        that are under way emit."""
        ahead = sum(report.shape.path for report in self.flight)
        rows = [min(len(r.ids) + len(r.token_ids) + ahead, len(r.ids) + r.limit) - 1 for r in self.slots if r]
        return self.programs.width(max(rows) + shape.rows_past_prefix)

    def _read(self, report):
        """Hand out one cycle's tokens, request by request."""
        rows, stamps = report.read()
        self.parts.tp.check()
        if self.profile is not None:
            self.profile.add(stamps)
        for slot, request in enumerate(report.requests):
            if request is None or request.finished:
                continue
            emitted, count, matched, _, fault, agreed, compared, chain, missed = rows(slot)
            if report.caught_up:
                self.chooser.foreseen(request, agreed, compared)
            if count:
                self.chooser.cycle(request, report.shape, matched, chain, missed)
                kept, text = request.receive(emitted[:count], matched, report.shape)
                numbers, most = report.logprobs, request.sampling.logprobs or 0
                logprobs = request.note(numbers and numbers.entries(slot, kept, most))
                yield Event(request, kept, text, *self._details(report, slot, len(kept)), logprobs)
            if fault and not request.finished:
                yield self._failed(request, f"position {len(request.ids) + len(request.token_ids) - 1}")

    def _failed(self, request, place):
        """The last Event of a request that ends at `place` without a further token."""
        return Event(request, [], request.fail(place), logprobs=request.note([]))

    def _details(self, report, slot, count):
        if not self.detail:
            return None, None, None
        t = {name: x[slot] for name, x in report.tree.items()}
        path = t.pop("path")[:count]
        t["parents"] = torch.where(torch.arange(len(t["parents"]), device=path.device) == 0, -1, t["parents"])
        return TreeView(**t), path.tolist(), t["aux"][path]

    def _release(self):
        """Free the slots and pages of requests that have ended."""
        for slot, request in enumerate(self.slots):
            if request is not None and request.finished:
                self.state.clear(slot)
                self.pool.give_back(request.pages)
                self.slots[slot], request.pages = None, []

    def _abandon(self):
        """End what has not ended, wherever it was interrupted: every slot empty, every page given back."""
        for request in self.requests:
            if not request.finished:
                request.finish_reason = "abort"
            self.pool.give_back(request.pages)
            request.pages = []
        if any(self.slots):
            for slot in range(self.batch):
                self.state.clear(slot)
            self.slots = [None] * self.batch
        self.pool.settle()


DETAILS = ("tokens", "parents", "depths", "target_ids", "aux", "logits", "path")


class Report:
    """What one launched cycle will have emitted, on its way to the host; caught_up: a catch-up went before it.

    Args:
        block: [W] a row of State.host that no other cycle writes before this one is read; end: the CUDA event after the
        cycle, None on the CPU, where it has ended.
    """

    def __init__(self, block, end, requests, shape, caught_up):
        self.block, self.end, self.requests, self.shape, self.caught_up = block, end, requests, shape, caught_up
        self.tree = self.logprobs = None

    def read(self):
        """Wait for it -> function of a slot: (emitted list, accept_len, matched, done, fault, agreed, compared, chain,
        missed), and the times of its stages."""
        if self.end is not None:
            self.end.synchronize()
        block, width = self.block.tolist(), State.WIDTH

        def of(slot):
            own = block[slot * width : (slot + 1) * width]
            return own[:MAX_NODES], *own[MAX_NODES:]

        return of, block[-State.STAMPS :]
