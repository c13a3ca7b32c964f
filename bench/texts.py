"""What a bench command feeds its pair: the demo's prompts, a file of the user's, or random ids. One that cannot be read
or is empty is refused by name."""

from engine.options import DEMO
from engine.prompts import read
from weights.config import Refused

from .oracle import random_prompt


def several(o, engine, count: int | None, most: int) -> list[list[int]]:
    """Token ids of the first `count` prompts, each cut to its first `most` tokens. Raises Refused."""
    path = o.prompts
    if path is None and engine.parts.text is None:
        vocabulary = engine.parts.target.head.vocabulary
        return [random_prompt(most, vocabulary, seed) for seed in range(count or 4)]
    found = []
    for prompt in read(path or str(DEMO / "prompts.jsonl"), "--prompts")[:count]:
        try:
            found.append(engine.encode(prompt.content)[:most])
        except Refused as error:
            raise Refused(f"{prompt.where}{error}") from None
    return found


def texts(o, engine, most: int) -> list[int]:
    """One prompt of `most` tokens, or of all there are: prompts joined until they are long enough. Raises Refused."""
    joined = []
    for ids in several(o, engine, 1 if o.prompts is None and engine.parts.text is None else None, most):
        joined += ids
        if len(joined) >= most:
            break
    return joined[:most]
