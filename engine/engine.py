"""The engine as research code sees it: load a pair, generate, stream."""

import contextlib
import dataclasses
import inspect

from weights.config import Refused

from .asking import encoded, ids_of, named, requests_of, several
from .auto import AUTO, Auto
from .cache import Pool
from .chooser import Fixed
from .graph import Graphs
from .loading import Options, load
from .logprobs import wanted
from .programs import Programs
from .report import statistics
from .request import Sampling
from .rules import rule_of
from .score import score
from .session import NonFinite, Session
from .shape import PLAIN, Shape
from .watch import Watch, tensors

DEFAULT_SHAPE = Shape(3, 1, 4)

__all__ = ["Engine", "Sampling", "Shape"]


class Engine:
    """A target, a drafter and their cache, ready to decode. Build one with `Engine.load`."""

    def __init__(self, parts, options, shape, graphs, capturing=None):
        self.parts, self.options, self.shape = parts, options, shape
        self.graphs = Graphs(graphs, parts.device, capturing)
        columns = -(-(parts.max_context + options.reserve) // options.page_size)
        self.programs = Programs(parts, columns, self.graphs)
        unit = parts.prefix_unit if options.prefix_cache else None
        self.pool = Pool(parts.cache.pages, parts.cache.page_size, unit)
        self._events, self._watch = None, Watch()
        self.auto = Auto(self)

    @classmethod
    def load(
        cls, target=None, draft=None, shape=None, *, shapes=(), costs=None, graphs="auto", progress=None, announce=None,
        capturing=None, **options,
    ):  # fmt: skip
        """Load a pair of checkpoints.

        Args:
            target, draft: directory or hub id; draft also "random:NAME" or None (plain decoding).
            shape: Shape of a cycle; default (3, 1, 4) with a draft, plain without; "auto": before each cycle the one of
            most expected tokens per second.
            shapes: Shapes to prepare ahead; with "auto" those it may take besides plain decoding, engine.auto.GRID by
            default. costs: engine.cost.CostTable that "auto" goes by, None: measured, or kept from an earlier start.
            graphs: "auto", "required", "off".
            progress: callable(bytes done, bytes in all); announce: callable(line), told the memory needed and there
            before a weight is read; capturing: callable(list) -> iterable over it, a progress bar around the programs
            that are captured ahead of a cycle; options: the other fields of engine.loading.Options.

        Raises Refused (one line) for anything that cannot be served right.
        """
        unknown = set(options) - {f.name for f in dataclasses.fields(Options)}
        if unknown:
            raise Refused(f"Engine.load: unknown option {sorted(unknown)[0]!r}")
        paths = {name: str(path) for name, path in (("target", target), ("draft", draft)) if path is not None}
        options = Options(**paths, **options)
        parts = load(options, progress, announce)
        own = shape or (DEFAULT_SHAPE if parts.drafter is not None else PLAIN)
        engine = cls(parts, options, own, graphs, capturing)
        engine.auto = Auto(engine, tuple(shapes), costs)
        for ahead in (engine.shape, *shapes):
            engine._check(ahead)
        for ahead in shapes if shape != AUTO else (AUTO,):
            engine.prepare(ahead)
        return engine

    def prepare(self, shape, requests=1, profile=None, samplings=(), rows=None):
        """Capture the cycle of `shape` for so many requests at once ahead of its first use; nothing on the CPU.

        samplings: how these requests are decoded, where not greedily; rows: (fewest, most) tokens of one of them, those
        that a cycle drafts counted, None: any.
        """
        self._idle()
        self._check(shape)
        self._look()
        batch, rule = self.batch(requests), rule_of(samplings)
        chooser = self._chooser(shape, batch, rule)
        detail, stamped = wanted(samplings) is not None, profile is not None
        self.programs.prepare(batch, chooser.shapes, rows, detail=detail, stamped=stamped, rule=rule)

    def batch(self, requests):
        """Slots for so many requests: a power of two, at most max_batch."""
        return min(self.options.max_batch, 1 << (max(1, requests) - 1).bit_length())

    @property
    def target(self):
        """The target model."""
        return self.parts.target

    @property
    def cache(self):
        """The paged cache, which a drafter of one's own may need to build (engine.drafters.history)."""
        return self.parts.cache

    @property
    def drafter(self):
        """The drafter: assign any object with the Drafter protocol (engine.drafters). The old one is let go."""
        return self.parts.drafter

    @drafter.setter
    def drafter(self, drafter):
        self._idle()
        for name in ("extend", "propose"):
            if drafter is not None and not callable(getattr(drafter, name, None)):
                kind = type(drafter).__name__
                raise Refused(f"drafter: {kind} has no {name}(); supported: the protocol of engine.drafters, or None")
        if drafter is not self.parts.drafter:
            self.programs.drop(self.parts.drafter)
            self.auto.forget()
            self.pool.forget()  # its prefixes hold the old one's rows
            self.parts.drafter = drafter
            self.parts.cache.adopt("draft", getattr(drafter, "cache_rows", None))

    def forget(self):
        """Drop every captured graph and cached prefix. Needed only after weights were written past torch: through
        `.data` or by kernels of one's own; every other change is seen when the next request begins."""
        self._idle()
        self.programs.forget()
        self.pool.forget()

    def _look(self):
        """Drop what was captured over tensors that have gone, and prefixes computed from weights that have changed."""
        beyond = (self, self.parts, self.cache, self.programs, self.pool)
        target, draft = tensors([self.target], beyond), tensors([self.drafter], beyond)
        rows = target if getattr(self.drafter, "cache_rows", None) is None else target + draft
        gone, changed = self._watch.look(target + draft, rows)
        if gone:
            self.programs.forget()
        if changed:
            self.pool.forget()

    def encode(self, prompt):
        """Token ids of a prompt: a text, a list of ids, or a list of chat messages. Raises Refused."""
        return encoded(self.parts, prompt)

    def score(self, prompt):
        """Teacher-forced scores of a text, a list of ids or of messages; no stream may be in progress.

        Returns:
            engine.score.Score: .token_ids, .logprobs [n - 1], .boundaries [n, F], .layers.

        Raises Refused for what is no prompt, or longer than the context or the cache.
        """
        self._idle()
        ids, most = self.parts.tp.word(lambda: ids_of(self.parts, prompt)), self.parts.max_context
        if len(ids) > most:
            raise Refused(f"score: {len(ids)} tokens; the context holds {most}")
        self.pool.demand(len(ids))
        self._look()
        pages, (target, _) = [], self.programs.for_prompts(None)
        try:
            if self.pool.take(len(ids), into=pages) is None:
                need, free = self.pool.pages_for(len(ids)), self.pool.free
                raise Refused(f"score: {len(ids)} tokens need {need} pages of the cache, {free} are free")
            return score(target, self.cache, ids, pages, self.parts.prefill_chunk, self.parts.device)
        finally:
            self.pool.give_back(pages)
            self.pool.settle()

    def generate(self, prompt, sampling=None, *, shape=None, profile=None):
        """Decode one prompt, or a list of prompts `max_batch` at a time.

        Args:
            prompt: text, list of ids, list of messages, or a list of those; sampling: Sampling, or one for each.
            shape: Shape for this call, or "auto"; profile: engine.profile.Profile that takes the stages' times.

        Returns:
            Result (engine.request), or a list of them in the order of the prompts.

        Raises NonFinite (engine.session) when all have ended, where logits were not finite: its `results` has the
        others' results.
        """
        many = several(prompt)
        prompts = prompt if many else [prompt]
        samplings = sampling if isinstance(sampling, list) else [sampling or Sampling()] * len(prompts)
        shape = shape or self.shape
        requests = requests_of(self.parts, prompts, samplings)
        own = PLAIN if shape == AUTO else shape
        try:
            with contextlib.closing(self._session(requests, shape, profile=profile)) as events:
                for _ in events:
                    pass
        except NonFinite as error:
            error.results = _results(requests, own)
            raise
        results = _results(requests, own)
        return results if many else results[0]

    def stream(self, prompt, sampling=None, *, shape=None, details=True):
        """Decode one prompt cycle by cycle; leaving the loop early frees everything the request held.

        Yields:
            engine.session.Event: .tokens .text .tree .accepted .features. The first is the prefill's own token, without
            a tree. details False: neither trees nor features are gathered.
        """
        requests = requests_of(self.parts, [prompt], [sampling or Sampling()])
        return self._session(requests, shape or self.shape, detail=details)

    def stream_all(self, prompts, samplings, *, shape=None, profile=None, details=False):
        """Decode a list of prompts, yielding the Event of whichever request moved; .request.index tells which."""
        requests = requests_of(self.parts, prompts, samplings)
        return self._session(requests, shape or self.shape, detail=details, profile=profile)

    def _session(self, requests, shape, detail=False, profile=None):
        """The events' generator; requests: of `requests_of`, shape: a Shape or AUTO."""
        self._idle()
        self._check(shape)
        batch = self.batch(len(requests))
        chooser = self._chooser(shape, batch, rule_of(r.sampling for r in requests))
        return self._events_of(requests, batch, chooser, detail, profile)

    def run(self, prompts, samplings, chooser, *, profile=None, details=False):
        """As `stream_all`, each cycle's shape chosen by `chooser` (engine.chooser)."""
        self._idle()
        requests = requests_of(self.parts, prompts, samplings)
        return self._events_of(requests, self.batch(len(requests)), chooser, details, profile)

    def _chooser(self, shape, batch, rule):
        return self.auto.chooser(batch, rule) if shape == AUTO else Fixed(shape)

    def _events_of(self, requests, batch, chooser, detail, profile):
        """Check that all of it can be served, then hand out the events' generator."""
        chunk = self.parts.prefill_chunk
        session = Session(self.programs, self.pool, requests, batch, chooser, chunk, detail=detail, profile=profile)
        for index, request in enumerate(requests):
            with named(index, len(requests)):
                self.pool.demand(session.rows(request))
        return self._run(session)

    def _run(self, session):
        self._idle()
        self._look()
        session.prepare()
        self._events = session.events()
        yield from self._events

    def _idle(self):
        state = self._events and inspect.getgeneratorstate(self._events)  # no flag that an interruption could leave set
        if state in (inspect.GEN_SUSPENDED, inspect.GEN_RUNNING):
            raise Refused("engine: another request is in progress; finish or close its stream first")

    def _check(self, shape):
        """Refused where this pair cannot run `shape`."""
        if shape == AUTO:
            return self.auto.candidates()
        if not isinstance(shape, Shape):
            raise Refused(f"shape: {shape!r}; supported: engine.Shape(steps, topk, draft_tokens), or {AUTO!r}")
        if shape.steps and self.parts.drafter is None:
            raise Refused(f"shape {shape}: needs a draft, and there is none; supported without: {PLAIN}")
        if shape.rows_past_prefix > self.options.reserve:
            raise Refused(f"shape {shape}: writes {shape.rows_past_prefix} rows past the prefix")
        if (vocabulary := getattr(getattr(self.parts.drafter, "config", None), "draft_vocab", None)) is not None:
            if shape.topk > vocabulary:
                raise Refused(f"shape {shape}: topk is {shape.topk}, the draft vocabulary has {vocabulary} tokens")

    def fits(self, shape):
        """Whether this pair can run `shape`."""
        try:
            self._check(shape)
        except Refused:
            return False
        return True


def _results(requests, shape):
    """What finished requests came to, None for those that failed; shape: theirs where no cycle ran."""
    results = [None if request.failure else request.result(shape) for request in requests]
    for result in filter(None, results):
        result.stats = statistics(result)
    return results
