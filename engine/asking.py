"""What is asked of an engine: prompts and samplings as rank 0 has them, all checked before any of it runs."""

import contextlib

from weights.config import Refused

from .request import Request
from .text import token_ids


def ids_of(parts, prompt):
    """Token ids of a prompt (a text, a list of ids, a list of chat messages), of any length. Raises Refused."""
    return token_ids(prompt, parts.text, parts.target.head.vocabulary)


def encoded(parts, prompt):
    """The same of a prompt that leaves room for a new token."""
    ids = ids_of(parts, prompt)
    if len(ids) >= parts.max_context:
        raise Refused(f"prompt: {len(ids)} tokens leave no room for a new one; the context holds {parts.max_context}")
    return ids


def several(prompt):
    """Whether `prompt` is a list of prompts rather than one."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return isinstance(prompt[0], str | list)


@contextlib.contextmanager
def named(index, count):
    """What is refused inside is said of prompt `index`, where there are several."""
    try:
        yield
    except Refused as error:
        if count == 1:
            raise
        raise Refused(f"prompt {index}: {str(error).removeprefix('prompt: ')}") from None


def requests_of(parts, prompts, samplings):
    """A Request of each prompt, in order; of several, what is refused is said with its index.

    Args:
        parts: engine.loading.Parts; samplings: a list of Sampling, one for each.
    """
    asked = parts.tp.word(lambda: _asked(parts, prompts, samplings))
    return [request_of(parts, index, *one) for index, one in enumerate(asked)]


def _asked(parts, prompts, samplings):
    """[(ids, sampling)], all of it checked."""
    if len(samplings) != len(prompts):
        raise Refused(f"sampling: {len(samplings)} for {len(prompts)} prompts; supported: one, or one for each")
    requests = []
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        with named(index, len(prompts)):
            ids = encoded(parts, prompt)
            request_of(parts, index, ids, sampling)
            requests.append((ids, sampling))
    return requests


def request_of(parts, index, ids, sampling):
    """The Request `index` of prompt `ids`. Raises Refused for what the vocabulary does not have."""
    vocabulary = parts.target.head.vocabulary
    for token in sampling.stop_ids:
        if token >= vocabulary:
            raise Refused(f"stop_ids: {token} is outside the vocabulary of {vocabulary}")
    if (sampling.logprobs or 0) > vocabulary:
        raise Refused(f"logprobs is {sampling.logprobs}; supported: 0 to {vocabulary}, the vocabulary")
    own = () if sampling.ignore_eos else parts.end_ids
    limit = min(sampling.max_new_tokens, parts.max_context - len(ids))
    return Request(index, ids, sampling, frozenset(own) | set(sampling.stop_ids), limit, parts.text)
