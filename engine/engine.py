"""The engine as research code sees it: load a pair, generate, stream."""

import contextlib
import dataclasses

from weights.config import Refused

from .cache import Pool
from .graph import Graphs
from .loading import Options, load
from .report import statistics
from .request import Request, Sampling
from .session import Programs, Session
from .shape import PLAIN, Shape

DEFAULT_SHAPE = Shape(3, 1, 4)

__all__ = ["Engine", "Sampling", "Shape"]


class Engine:
    """A target, a drafter and their cache, ready to decode. Build one with `Engine.load`."""

    def __init__(self, parts, options, shape, graphs):
        self.parts, self.options, self.shape = parts, options, shape
        self.graphs = Graphs(graphs, parts.device)
        columns = -(-(parts.max_context + options.reserve) // options.page_size)
        self.programs = Programs(parts, columns, self.graphs)
        self.pool = Pool(parts.cache.pages, parts.cache.page_size)
        self._busy = False

    @classmethod
    def load(cls, target=None, draft=None, shape=None, *, shapes=(), graphs="auto", progress=None, **options):
        """Load a pair of checkpoints.

        Args:
            target, draft: directory or hub id; draft also "random:NAME" or None (plain decoding).
            shape: Shape of a cycle; default (3, 1, 4) with a draft, plain without.
            shapes: Shapes to prepare ahead; graphs: "auto", "required", "off".
            progress: callable(bytes done, bytes in all); options: the other fields of engine.loading.Options.

        Raises Refused (one line) for anything that cannot be served right.
        """
        unknown = set(options) - {f.name for f in dataclasses.fields(Options)}
        if unknown:
            raise Refused(f"Engine.load: unknown option {sorted(unknown)[0]!r}")
        paths = {name: str(path) for name, path in (("target", target), ("draft", draft)) if path is not None}
        options = Options(**paths, **options)
        parts = load(options, progress)
        engine = cls(parts, options, shape or (DEFAULT_SHAPE if parts.drafter is not None else PLAIN), graphs)
        for wanted in (engine.shape, *shapes):
            engine._check(wanted)
        for wanted in shapes:
            engine.prepare(wanted)
        return engine

    def prepare(self, shape, requests=1, profile=None):
        """Capture the cycle of `shape` for so many requests at once ahead of its first use; nothing on the CPU."""
        self._idle()
        self._check(shape)
        drafter = None if shape == PLAIN else self.parts.drafter
        self.programs.prepare(self._batch(requests), shape, drafter, stamped=profile is not None)

    def _batch(self, requests):
        """Slots for so many requests: a power of two, at most max_batch."""
        return min(self.options.max_batch, 1 << (max(1, requests) - 1).bit_length())

    @property
    def target(self):
        """The target model."""
        return self.parts.target

    @property
    def drafter(self):
        """The drafter: assign any object with the Drafter protocol."""
        return self.parts.drafter

    @drafter.setter
    def drafter(self, drafter):
        self._idle()
        self.parts.drafter = drafter
        self.parts.cache.adopt("draft", getattr(drafter, "cache_rows", None))

    def encode(self, prompt):
        """Token ids of a prompt: a text, a list of ids, or a list of chat messages. Raises Refused."""
        text, vocabulary = self.parts.text, self.parts.target.head.vocabulary
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            if text is None:
                raise Refused("messages: this checkpoint has no tokenizer; supported: token ids")
            prompt = text.chat(prompt)
        elif isinstance(prompt, str):
            if text is None:
                raise Refused("prompt: this checkpoint has no tokenizer; supported: token ids")
            prompt = text.encode(prompt) if prompt.strip() else []
        if not isinstance(prompt, list) or not prompt:
            raise Refused("prompt: it is empty; supported: at least one token")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise Refused(f"prompt: token id {token!r}; supported: whole numbers from 0 to {vocabulary - 1}")
        if len(prompt) >= self.parts.max_context:
            raise Refused(
                f"prompt: {len(prompt)} tokens leave no room for a new one; the context holds {self.parts.max_context}"
            )
        return prompt

    def generate(self, prompt, sampling=None, *, shape=None, profile=None):
        """Decode one prompt, or a list of prompts `max_batch` at a time.

        Args:
            prompt: text, list of ids, list of messages, or a list of those; sampling: Sampling, or one for each.
            shape: Shape for this call; profile: engine.profile.Profile that takes the stages' times.

        Returns:
            Result (engine.request), or a list of them in the order of the prompts.
        """
        several = _several(prompt)
        prompts = prompt if several else [prompt]
        samplings = sampling if isinstance(sampling, list) else [sampling or Sampling()] * len(prompts)
        if len(samplings) != len(prompts):
            raise Refused(f"sampling: {len(samplings)} for {len(prompts)} prompts; supported: one, or one for each")
        shape = shape or self.shape
        requests = [self._request(i, p, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
        with contextlib.closing(self._session(requests, shape, profile=profile)) as events:
            for _ in events:
                pass
        results = [request.result(shape) for request in requests]
        for result in results:
            result.stats = statistics(result)
        return results if several else results[0]

    def stream(self, prompt, sampling=None, *, shape=None, details=True):
        """Decode one prompt cycle by cycle; leaving the loop early frees everything the request held.

        Yields:
            engine.session.Event: .tokens .text .tree .accepted .features. The first is the prefill's own token, without
            a tree. details False: neither trees nor features are gathered.
        """
        request = self._request(0, prompt, sampling or Sampling())
        return self._session([request], shape or self.shape, detail=details)

    def stream_all(self, prompts, samplings, *, shape=None, profile=None, details=False):
        """Decode a list of prompts, yielding the Event of whichever request moved; .request.index tells which."""
        requests = [self._request(i, p, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
        return self._session(requests, shape or self.shape, detail=details, profile=profile)

    def _request(self, index, prompt, sampling):
        ids, vocabulary = self.encode(prompt), self.parts.target.head.vocabulary
        for token in sampling.stop_ids:
            if token >= vocabulary:
                raise Refused(f"stop_ids: {token} is outside the vocabulary of {vocabulary}")
        own = () if sampling.ignore_eos else self.parts.end_ids
        limit = min(sampling.max_new_tokens, self.parts.max_context - len(ids))
        return Request(index, ids, sampling, frozenset(own) | set(sampling.stop_ids), limit, self.parts.text)

    def _session(self, requests, shape, detail=False, profile=None):
        """Check that all of it can be served, then hand out the events' generator."""
        self._idle()
        self._check(shape)
        batch = self._batch(len(requests))
        chunk = self.options.prefill_chunk
        session = Session(self.programs, self.pool, requests, batch, shape, chunk, detail=detail, profile=profile)
        rows = [session.rows(request) for request in requests]
        for need in rows:
            self.pool.demand(need)
        return self._run(session, self.pool.pages_for(max(rows, default=1)))

    def _run(self, session, columns):
        self._idle()
        self._busy = True
        try:
            session.state.widen(columns)
            yield from session.events()
        finally:
            self._busy = False

    def _idle(self):
        if self._busy:
            raise Refused("engine: another request is in progress; finish or close its stream first")

    def _check(self, shape):
        """Refused where this pair cannot run `shape`."""
        if not isinstance(shape, Shape):
            raise Refused(f"shape: {shape!r}; supported: engine.Shape(steps, topk, draft_tokens)")
        if shape.steps and self.parts.drafter is None:
            raise Refused(f"shape {shape}: needs a draft, and there is none; supported without: {PLAIN}")
        if shape.rows_past_prefix > self.options.reserve:
            raise Refused(f"shape {shape}: writes {shape.rows_past_prefix} rows past the prefix")
        if (vocabulary := getattr(getattr(self.parts.drafter, "config", None), "draft_vocab", None)) is not None:
            if shape.topk > vocabulary:
                raise Refused(f"shape {shape}: topk is {shape.topk}, the draft vocabulary has {vocabulary} tokens")


def _several(prompt):
    """Whether `prompt` is a list of prompts rather than one."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return isinstance(prompt[0], str | list)
