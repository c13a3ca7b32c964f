"""Text to token ids and back: a checkpoint's own tokenizer, its chat template, and a stream that hands out text token
by token, never half a character, never what may still become a stop string."""

import re
from pathlib import Path

from weights.config import Refused

from . import kimi

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", kimi.RANKS)
HALF = "\ufffd"  # what decoders show for a character whose bytes are not all there
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a byte-fallback token: a run of them is decoded as a whole


class Text:
    """The tokenizer of the checkpoint at a directory. Raises Refused where it cannot be loaded."""

    def __init__(self, path: str | Path):
        self.where = str(path)
        if kimi.found(path):
            self.tokenizer = kimi.Kimi(path)
            return
        from transformers import AutoTokenizer  # a second of import; a run on token ids does without

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(self.where, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            cause = " ".join(str(error).split())[:200]
            raise Refused(
                f"{self.where}: its tokenizer cannot be loaded ({cause}); supported: token_ids prompts"
            ) from error

    @classmethod
    def find(cls, path: str | Path) -> "Text | None":
        """The tokenizer at `path`, None where the directory holds none."""
        return cls(path) if any((Path(path) / name).is_file() for name in TOKENIZER_FILES) else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw text, with the start token where the tokenizer puts one: one, even where a text that went
        through a template elsewhere spells it already."""
        ids, start = self.tokenizer.encode(text), self.tokenizer.bos_token_id
        return ids[1:] if start is not None and ids[:2] == [start, start] else ids

    def chat(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation under the chat template, up to where the assistant speaks. The template writes
        its own start token; none is added. Raises Refused without a template, or where it refuses the messages."""
        for at, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise Refused(f"messages: number {at} is {message!r}; supported: {{'role': text, 'content': text}}")
            if not any(isinstance(message.get(key), str | list) for key in ("content", "tool_calls")):
                raise Refused(f"messages: number {at} has no content; supported: {{'role': text, 'content': text}}")
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refused(
                f"{self.where}: the tokenizer has no chat template; give a raw prompt instead, without --chat"
            )
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            cause = " ".join(str(error).split())[:200]
            raise Refused(f"messages: the chat template of {self.where} refuses them: {cause}") from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def ends_inside(self, ids: list[int], text: str) -> bool:
        """Whether later tokens may still change the end of `text` = decode(ids)."""
        return text.endswith(HALF) or bool(BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(ids[-1]) or ""))


def token_ids(prompt: str | list, text: Text | None, vocabulary: int) -> list[int]:
    """Token ids of a prompt: a text, a list of ids, or a list of chat messages. Raises Refused.

    Args:
        text: None where the checkpoint has no tokenizer; vocabulary: ids there are.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        if text is None:
            raise Refused("messages: this checkpoint has no tokenizer; supported: token ids")
        prompt = text.chat(prompt)
    elif isinstance(prompt, str):
        if text is None:
            raise Refused("prompt: this checkpoint has no tokenizer; supported: token ids")
        prompt = text.encode(prompt) if prompt.strip() else []
    elif not isinstance(prompt, list):
        kind = type(prompt).__name__
        raise Refused(f"prompt: it is a {kind}; supported: a text, a list of ids or a list of chat messages")
    if not prompt:
        raise Refused("prompt: it is empty; supported: at least one token")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise Refused(f"prompt: token id {token!r}; supported: whole numbers from 0 to {vocabulary - 1}")
    return prompt


class Stream:
    """Text of one request, token by token. The pieces join to `text`: the decode of all ids, cut before a stop string.

    Text is settled once no later token can change it; settled text is handed out except for an end that a stop string
    may begin with. Decoding starts a few settled tokens back: a decoder that strips a leading space then strips theirs.
    """

    def __init__(self, text: Text, stop: tuple[str, ...] | list[str] = ()):
        self.source, self.stops = text, tuple(stop)
        self.ids: list[int] = []
        self.settled, self.tail, self.sent = "", "", 0
        self.back, self.read = 0, 0  # ids[:read] are settled; decoding starts at ids[back]
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """Everything so far, handed out or not."""
        return self.settled + self.tail

    def push(self, token: int) -> str:
        """Take one token and return the text it releases. Sets `stopped` when the token completes a stop string."""
        self.ids.append(token)
        before = self.source.decode(self.ids[self.back : self.read])
        now = self.source.decode(self.ids[self.back :])
        self.tail = now[len(before) :]
        if self._cut():
            return self._release(len(self.settled))
        if self.tail and not self.source.ends_inside(self.ids, now):
            self.settled, self.tail = self.settled + self.tail, ""
            self.back, self.read = self.read, len(self.ids)
        return self._release(len(self.settled) - self._held())

    def finish(self) -> str:
        """What was still held back."""
        self.settled, self.tail = self.text, ""
        return self._release(len(self.settled))

    def _cut(self) -> bool:
        """End the text before the first stop string in it, if there is one; only what is new is searched."""
        start = max(0, len(self.settled) - max(map(len, self.stops), default=0) + 1)
        recent = self.settled[start:] + self.tail
        found = [(at, stop) for stop in self.stops if (at := recent.find(stop)) >= 0]
        if not found:
            return False
        at, self.stopped = min(found, key=lambda hit: (hit[0], -len(hit[1])))
        self.settled, self.tail = self.settled[:start] + recent[:at], ""
        return True

    def _held(self) -> int:
        """Length of the longest end of the settled text that begins a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        for size in range(min(longest, len(self.settled)), 0, -1):
            end = self.settled[-size:]
            if any(stop.startswith(end) for stop in self.stops):
                return size
        return 0

    def _release(self, upto: int) -> str:
        piece = self.settled[self.sent : upto]
        self.sent = max(self.sent, upto)
        return piece
