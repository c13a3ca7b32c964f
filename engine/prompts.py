"""Prompts of a run: one argument, a text file, or a file of JSON lines. What cannot be read is refused by its line."""

import json
from dataclasses import dataclass
from pathlib import Path

from weights.config import Refused

from .text import token_ids

KINDS = ("prompt", "token_ids", "messages")


@dataclass(frozen=True)
class Prompt:
    """`content`: a text, a list of token ids or a list of chat messages; `where`: "file:line: ", for refusals."""

    content: str | list
    where: str
    seed: int | None = None

    @property
    def templated(self) -> bool:
        """Whether the chat template applies."""
        return not isinstance(self.content, str) and isinstance(self.content[0], dict)


def read(path: str, option: str = "--prompt-file") -> list[Prompt]:
    """The prompts of the file that `option` names. Raises Refused naming it, and the line where there is one."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise Refused(f"{option} {path}: cannot be read: {cause}") from None
    if not path.endswith(".jsonl"):
        prompts = [Prompt(text, f"{path}: ")] if text.strip() else []
    else:
        lines = enumerate(text.split("\n"), 1)
        prompts = [_entry(line, f"{path}:{at}: ") for at, line in lines if line.strip()]
    if not prompts:
        raise Refused(f"{option} {path}: it is empty; supported: at least one prompt")
    return prompts


def _entry(line: str, where: str) -> Prompt:
    """One JSON line; keys other than the prompt and the seed are notes, not read."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise Refused(f"{where}not JSON: {error.msg} at column {error.colno}") from None
    found = [kind for kind in KINDS if isinstance(entry, dict) and kind in entry]
    if len(found) != 1:
        raise Refused(f"{where}has {' and '.join(found) or 'no prompt'}; supported: one of {', '.join(KINDS)}")
    (kind,), seed = found, entry.get("seed")
    content = entry[kind]
    if not _fits(kind, content):
        raise Refused(f"{where}key '{kind}' is not {EXPECTED[kind]}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise Refused(f"{where}key 'seed' is {seed!r}; supported: whole numbers from 0")
    return Prompt(content, where, seed)


EXPECTED = {
    "prompt": "a text with more than spaces in it",
    "token_ids": "a list of at least one whole number from 0",
    "messages": "a list of at least one {role, content}, both texts",
}


def _fits(kind: str, content: object) -> bool:
    if kind == "prompt":
        return isinstance(content, str) and bool(content.strip())
    if not isinstance(content, list) or not content:
        return False
    if kind == "token_ids":
        return all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in content)
    return all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in content)


def encoded(prompt: Prompt, text, vocabulary: int) -> list[int]:
    """Token ids of a prompt of any length. Raises Refused saying where it stands.

    Args:
        text: engine.text.Text or None; vocabulary: ids there are.
    """
    try:
        return token_ids(prompt.content, text, vocabulary)
    except Refused as error:
        raise Refused(f"{prompt.where}{error}") from None


def chat(prompts: list[Prompt]) -> list[Prompt]:
    """Texts as the user's message of a conversation. Raises Refused for token ids, which no template can take."""
    for prompt in prompts:
        if not isinstance(prompt.content, str) and not prompt.templated:
            raise Refused(f"{prompt.where}--chat: token ids take no template; supported: texts and messages")
    return [
        Prompt([{"role": "user", "content": p.content}], p.where, p.seed) if isinstance(p.content, str) else p
        for p in prompts
    ]
