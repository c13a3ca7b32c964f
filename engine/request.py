"""One request: what was asked, what has come, and the cuts that only the host can make (stop strings)."""

import hashlib
import math
import time
from collections import Counter
from dataclasses import dataclass, field

from weights.config import Refused

from .buffers import State
from .shape import Shape
from .text import Stream


def _whole(x):
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _number(x):
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


RANGES = (
    ("max_new_tokens", _whole, "whole numbers from 0"),
    ("temperature", lambda x: _number(x) and 0 <= x <= 1e30, "numbers from 0 (greedy)"),
    ("top_k", lambda x: _whole(x) and x < 1 << 63, "whole numbers from 0 (off)"),
    ("top_p", lambda x: _number(x) and 0 < x <= 1, "numbers above 0 and up to 1 (off)"),
    ("min_p", lambda x: _number(x) and 0 <= x <= 1, "numbers from 0 (off) to 1"),
    ("seed", _whole, "whole numbers from 0"),
    ("logprobs", lambda x: x is None or _whole(x), "whole numbers from 0, or None"),
)


@dataclass(frozen=True)
class Sampling:
    """How one request is decoded. Raises Refused for values outside what is supported.

    temperature: 0, or below kernels.sampling.TINY: greedy; top_k (0: off), top_p (1: off), min_p (0: off) then filter
    what is drawn from, in that order (kernels.sampling); seed: with the request's index in the caller's list, all that
    its draws depend on. stop: strings that end the text (left out of it); stop_ids: further ids that end it (kept);
    ignore_eos: the checkpoint's own end ids do not end it. logprobs: report each token's log-probability and so many of
    the most likely ones, from the target before temperature and filters.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        for name, fits, words in RANGES:
            value = getattr(self, name)
            if not fits(value):
                raise Refused(f"{name} is {value!r}; supported: {words}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise Refused(f"stop is {list(self.stop)!r}; supported: non-empty strings")
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in self.stop_ids):
            raise Refused(f"stop_ids is {list(self.stop_ids)!r}; supported: token ids")


@dataclass
class Result:
    """What a request came to. `cycles` holds one (emitted, matched, steps) for every cycle that emitted something,
    `shapes` the shape of each; `shape` is that of most of them."""

    prompt_tokens: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    stop: str | int | None
    cycles: list[tuple[int, int, int]]
    shape: object
    prefill_ms: float | None
    first_token_ms: float | None
    decode_ms: float | None
    shapes: list[Shape] = field(default_factory=list)
    logprobs: list[dict] | None = None  # one for each token: {token_id, logprob, top: [[id, logprob], ...]}
    reused_tokens: int = 0  # of the prompt: their rows were in the cache
    stats: dict = field(default_factory=dict)


class Request:
    """A request in progress.

    Args:
        index: its place in the caller's list; ids: prompt token ids; end_ids: ids that end it; limit: tokens it may
        emit; text: the tokenizer (engine.text.Text) or None.
    """

    def __init__(self, index, ids, sampling, end_ids, limit, text):
        if len(end_ids) > State.STOPS:
            raise Refused(f"stop_ids: {len(end_ids)} end ids (the checkpoint's included); at most {State.STOPS}")
        if sampling.stop and text is None:
            raise Refused(f"stop is {list(sampling.stop)!r}, but this checkpoint has no tokenizer; supported: stop_ids")
        self.index, self.ids, self.sampling, self.end_ids, self.limit = index, ids, sampling, end_ids, limit
        self.stream = None if text is None else Stream(text, sampling.stop)
        self.token_ids, self.cycles, self.shapes, self.pages = [], [], [], []
        self.logprobs = None if sampling.logprobs is None else []
        self.finish_reason, self.stop = (None, None) if limit else ("length", None)
        self.failure = None  # where its logits were not finite
        self.prefill_ms, self.reused = None, 0  # rows of its prompt that were in the cache
        self.begin()

    def begin(self):
        """Start its clock: it has a slot, and the wait for one is over."""
        self.began = self.first = self.last = time.perf_counter()

    @property
    def finished(self):
        """Whether it has ended."""
        return self.finish_reason is not None

    @property
    def draws(self):
        """What its slot draws with (engine.rules.Draws.seat); the key depends on the seed and the index alone."""
        s = self.sampling
        digest = hashlib.blake2b(f"{s.seed} {self.index}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
        return {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p, "key": key}

    def note(self, logprobs):
        """Take the log-probabilities of the tokens just received; returns them, None where it did not ask."""
        if self.logprobs is None:
            return None
        self.logprobs += logprobs
        return logprobs

    def receive(self, tokens, matched=0, shape=None):
        """Take what a cycle emitted, up to the first cut; shape None: the prefill's own token, in no cycle.

        Args:
            tokens: ids emitted; matched: how many of them were drafted; shape: the cycle's.

        Returns:
            (tokens kept, text released); text None without a tokenizer.
        """
        kept, pieces = [], []
        for token in tokens:
            kept.append(token)
            self.token_ids.append(token)
            if self.stream is not None:
                pieces.append(self.stream.push(token))
            self._cut(token)
            if self.finished:
                break
        self.last = time.perf_counter()
        if shape is None:
            self.first = self.last
        elif kept:
            self.cycles.append((len(kept), min(matched, len(kept)), shape.steps))
            self.shapes.append(shape)
        if self.finished and self.stream is not None:
            pieces.append(self.stream.finish())
        return kept, None if self.stream is None else "".join(pieces)

    def fail(self, place):
        """End it: no token follows. Returns the text still held back, None without a tokenizer."""
        self.finish_reason, self.failure = "error", place
        return None if self.stream is None else self.stream.finish()

    def _cut(self, token):
        if token in self.end_ids:
            self.finish_reason, self.stop = "stop", token
        elif self.stream is not None and self.stream.stopped is not None:
            self.finish_reason, self.stop = "stop", self.stream.stopped
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"

    def result(self, shape):
        """The finished request as a Result; shape: its own where no cycle ran."""
        started = bool(self.token_ids)
        ran = Counter(self.shapes).most_common(1)
        return Result(
            prompt_tokens=len(self.ids),
            token_ids=self.token_ids,
            text=None if self.stream is None else self.stream.text,
            finish_reason=self.finish_reason,
            stop=self.stop,
            cycles=self.cycles,
            shape=ran[0][0] if ran else shape,
            shapes=self.shapes,
            prefill_ms=self.prefill_ms,
            first_token_ms=(self.first - self.began) * 1e3 if started else None,
            decode_ms=(self.last - self.first) * 1e3 if started else None,
            logprobs=self.logprobs,
            reused_tokens=self.reused,
        )
