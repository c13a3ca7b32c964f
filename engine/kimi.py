"""Kimi's tokenizer, built from its own `tiktoken.model` and `tokenizer_config.json`: the code beside them is not run.

It has what engine.text asks of a tokenizer. The scheme is the one of Moonshot's tokenization_kimi.py (K2, K2-Thinking,
K2.5): ranks 0..n-1, then 258 control tokens; text is cut into pieces that tiktoken can take before its pattern sees it.
"""

import base64
import binascii
import re
from pathlib import Path

from weights.fields import Fields, Refused, read_json

RANKS, CONFIG, TEMPLATE = "tiktoken.model", "tokenizer_config.json", "chat_template.jinja"
CONTROL = 258  # control tokens after the ranks: 256 reserved and two more
PIECE, RUN = 400_000, 25_000  # characters tiktoken gets at once, and those in a row of spaces or of none
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def found(folder):
    """Whether `folder` holds a tokenizer of this kind and none that transformers reads by itself."""
    folder = Path(folder)
    return (folder / RANKS).is_file() and not (folder / "tokenizer.json").is_file()


def _ranks(path):
    """{token bytes: rank} of lines "base64 rank". Refused: another form, ranks that are not 0..n-1."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line:
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise Refused(
                    f"{path}: line {number} is {line[:40]!r}, expected a token in base64 and its rank"
                ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise Refused(f"{path}: its {len(ranks)} ranks are not the numbers from 0 on, each once")
    return ranks


def _pieces(text):
    """`text` in pieces of at most PIECE characters without more than RUN spaces, or others, in a row."""
    for start in range(0, len(text), PIECE):
        part, begin = text[start : start + PIECE], 0
        for run in re.finditer(r"\s+|\S+", part):
            for at in range(run.start() + RUN, run.end(), RUN):
                yield part[begin:at]
                begin = at
        yield part[begin:]


class Kimi:
    """The tokenizer at `folder`. Refused: files of another form, or of another tokenizer that uses tiktoken."""

    bos_token_id = None  # a raw text gets no start token; the chat template writes its own

    def __init__(self, folder):
        import tiktoken

        self.folder = Path(folder)
        config = Fields(read_json(self.folder / CONFIG), str(self.folder / CONFIG))
        self._only_kimi(config)
        ranks = _ranks(self.folder / RANKS)
        named = self._named(config)
        names = {i: f"<|reserved_token_{i}|>" for i in range(len(ranks), len(ranks) + CONTROL)}
        outside = [i for i in named if i not in names]
        if outside:
            known = f"{len(ranks)} to {len(ranks) + CONTROL - 1}"
            raise Refused(f"{config.where}: key 'added_tokens_decoder' names token {outside[0]}, expected {known}")
        names |= {i: entry.str("content") for i, entry in named.items()}
        shown = {i for i, entry in named.items() if not entry.bool("special", False)}
        self.hidden = frozenset(names.keys() - shown)
        if len(set(names.values())) != len(names):
            raise Refused(f"{config.where}: key 'added_tokens_decoder' gives two tokens one name")
        special = {name: i for i, name in names.items()}
        self.encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        template = self.folder / TEMPLATE
        self.chat_template = (
            template.read_text(encoding="utf-8") if template.is_file() else config.str("chat_template", None)
        )
        self.words = {key: config.raw[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token")
                      if isinstance(config.raw.get(key), str)}  # fmt: skip

    @staticmethod
    def _only_kimi(config):
        config.choice("tokenizer_class", ("TikTokenTokenizer",))
        code = config.sub("auto_map").raw.get("AutoTokenizer")
        code = code[0] if isinstance(code, list) and code else code
        if code is not None and "tokenization_kimi.TikTokenTokenizer" not in str(code):
            raise config.refuse("auto_map", "a tokenizer of tokenization_kimi, whose pattern is known")

    @staticmethod
    def _named(config):
        """{id: its entry} of added_tokens_decoder."""
        entries, named = config.sub("added_tokens_decoder"), {}
        for key in entries.raw:
            if not key.isdecimal():
                raise entries.refuse(key, "token ids as keys")
            named[int(key)] = entries.sub(key)
        return named

    def encode(self, text, add_special_tokens=True):
        """Token ids; names of control tokens in the text count as those tokens."""
        return [i for piece in _pieces(text) for i in self.encoding.encode(piece, allowed_special="all")]

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        """The text of `ids`; control tokens that the config calls special are left out where that is asked."""
        kept = [i for i in ids if not (skip_special_tokens and i in self.hidden)]
        return self.encoding.decode(kept, errors="replace")

    def convert_ids_to_tokens(self, token):
        """Nothing: a token is bytes, and a half character shows at the end of the text itself."""
        return ""

    def apply_chat_template(self, messages, add_generation_prompt=True, tokenize=False):
        """The text of a conversation under the template, rendered as transformers renders templates."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            [messages], chat_template=self.chat_template, add_generation_prompt=add_generation_prompt, **self.words
        )
        return rendered[0]
