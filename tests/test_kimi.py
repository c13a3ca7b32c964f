"""Kimi's tokenizer from files in its form: a small vocabulary of real merges, its control tokens and its template."""

import base64
import json
import re
from pathlib import Path

import pytest
from latent_toys import KIMI, deepseek, nested
from toys import V, one_line, pair

from engine import Sampling
from engine.kimi import PIECE, RUN, _pieces
from engine.text import Stream, Text
from weights.config import Refused

MERGES = [
    b"th",
    b"the",
    b" t",
    b" th",
    b" the",
    b"ll",
    b"'ll",
    b"\xe6\xbc",
    "漢".encode(),
    "漢字".encode(),
    b"12",
    b"123",
]
MERGES += [b"  ", b"\n\n", b"AB", b"ab", b"Ab"]
N = 256 + len(MERGES)
NAMES = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>"]
ID = {name: N + i for i, name in enumerate(NAMES)}
TEMPLATE = (
    "{%- for m in messages -%}{%- if m['role'] == 'user' -%}<|im_user|>user<|im_middle|>"
    "{%- elif m['role'] == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>"
    "{%- else -%}<|im_system|>system<|im_middle|>{%- endif -%}{{ m['content'] }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)


def write(folder, lines=None, **changes):
    """The files of a tokenizer in `folder`, the code beside them one that must not run."""
    folder = Path(folder)
    ranks = [bytes([i]) for i in range(256)] + MERGES
    default = [base64.b64encode(token) + f" {i}".encode() for i, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines or default) + b"\n")
    added = {str(i): {"content": name, "special": name != "<think>"} for name, i in ID.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "chat_template": TEMPLATE}
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, "bos_token": "[BOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('remote code ran')\n")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text.find(write(tmp_path_factory.mktemp("kimi")))


def split(text, ids):
    return [text.tokenizer.encoding.decode_single_token_bytes(i) for i in ids]


@pytest.mark.parametrize(
    "words, tokens",
    [
        ("the the", [b"the", b" the"]),
        ("漢字a", ["漢字".encode(), b"a"]),  # Han is cut from other letters
        ("a漢字", [b"a", "漢字".encode()]),
        ("123456", [b"123", b"4", b"5", b"6"]),
        ("12345", [b"123", b"4", b"5"]),
        ("we'll", [b"w", b"e", b"'ll"]),
        ("AB ab", [b"AB", b" ", b"ab"]),
        ("a  b", [b"a", b" ", b" ", b"b"]),  # the last space belongs to the word
        ("a\n\nb", [b"a", b"\n\n", b"b"]),
        ("?!\n", [b"?", b"!", b"\n"]),
    ],
)
def test_text_is_cut_as_kimi_cuts_it(text, words, tokens):
    """Mutants: an alternative of the pattern left out, or in another order; letters and Han in one piece."""
    got = split(text, text.encode(words))
    assert b"".join(got) == words.encode()
    assert got == tokens
    assert text.decode(text.encode(words)) == words


def test_control_tokens(text):
    """Names in a text are tokens; unnamed ones have a name by number; special ones are not shown, others are. Mutants:
    spelled out in bytes, `special` ignored, numbers off by one."""
    assert text.encode("a<|im_end|>[EOS]") == [97, ID["<|im_end|>"], ID["[EOS]"]]
    assert text.encode(f"<|reserved_token_{N + 257}|>") == [N + 257]
    assert text.decode([97, ID["[EOS]"], ID["<think>"], N + 100, 98]) == "a<think>b"
    assert len(text.encode(f"<|reserved_token_{N + 258}|>")) > 1


def test_chat(text):
    """Mutants: the template not applied, or its control tokens spelled out."""
    ids = text.chat([{"role": "system", "content": "the"}, {"role": "user", "content": "hi"}])
    named = {i: name for name, i in ID.items()}
    shown = [named.get(i) or bytes([i]).decode() if i < 256 or i in named else "the" for i in ids]
    want = "<|im_system|>system<|im_middle|>the<|im_end|><|im_user|>user<|im_middle|>hi<|im_end|>"
    assert "".join(shown) == want + "<|im_assistant|>assistant<|im_middle|>"
    assert [i for i in ids if i >= N] == [ID[n] for n in re.findall(r"<\|im_\w+\|>", "".join(shown))]


def test_template_in_a_file_of_its_own(tmp_path):
    """As later uploads have it: it comes before the config's. Mutant: only the config is read."""
    folder = write(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Text.find(folder).chat([{"role": "user", "content": "hi"}]) == [*b"hi!"]


def test_pieces_stream(text):
    """Half characters wait for the rest. Mutant: replacement characters handed out."""
    ids = [*"🙂".encode(), ID["[EOS]"], *"é".encode()]
    stream = Stream(text)
    assert [stream.push(i) for i in ids] == ["", "", "", "🙂", "", "", "é"]


def test_long_runs_are_cut_before_the_pattern():
    """Mutants: a run cut late, or a run of spaces joined to one of letters."""
    for made in ("a" * (2 * RUN + 7), " " * RUN + "b", "a" * RUN + " " * (RUN + 1), "ab " * 9, "", "x" * (PIECE + 3)):
        pieces = list(_pieces(made))
        assert "".join(pieces) == made
        assert all(len(piece) <= PIECE for piece in pieces)
        assert max((len(run) for piece in pieces for run in re.findall(r"\s+|\S+", piece)), default=0) <= RUN
    assert [len(piece) for piece in _pieces("a" * (2 * RUN + 7))] == [RUN, RUN, 7]
    assert list(_pieces(" " * RUN + "b")) == [" " * RUN + "b"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tokenizer_class": "LlamaTokenizer"}, ("tokenizer_class", "TikTokenTokenizer")),
        ({"auto_map": {"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]}}, ("auto_map", "pattern")),
        ({"added_tokens_decoder": {"5": {"content": "x"}}}, ("added_tokens_decoder", "token 5")),
        ({"added_tokens_decoder": {str(N): {"content": f"<|reserved_token_{N + 1}|>"}}}, ("two tokens one name",)),
        ({"added_tokens_decoder": {"one": {"content": "x"}}}, ("added_tokens_decoder.one",)),
        ({"lines": [b"YQ== 0", b"oops"]}, ("tiktoken.model", "line 2")),
        ({"lines": [b"YQ== 0", b"Yg== 2"]}, ("tiktoken.model", "2 ranks")),
    ],
    ids=str,
)
def test_refused(tmp_path, changes, words):
    """Mutants: each taken as Kimi's."""
    with pytest.raises(Refused) as error:
        Text(write(tmp_path, **changes))
    one_line(error, *words)


def test_served(toys):
    """A Kimi-K2.5 toy answers a text, and ends at either of its end ids. Mutant: the id of generation_config only."""
    path = nested(toys, deepseek(toys, **KIMI))
    lines = [base64.b64encode(bytes([i])) + f" {i}".encode() for i in range(V)]
    write(path, lines=lines, added_tokens_decoder={})
    engine = pair(path)
    free = engine.generate("12 3", Sampling(max_new_tokens=50, ignore_eos=True))
    assert free.stats["prompt_tokens"] == 4 and free.text == engine.parts.text.decode(free.token_ids)
    for end in engine.parts.end_ids:
        assert end in (V - 1, V - 2)
        stopped = engine.generate("12 3", Sampling(max_new_tokens=50))
        cut = [i for i, token in enumerate(free.token_ids) if token in (V - 1, V - 2)]
        assert stopped.token_ids == (free.token_ids[: cut[0] + 1] if cut else free.token_ids)
