"""Text and its stream: pieces join to the decode of all ids, no half characters, stop strings wherever they fall."""

import importlib.util
import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_kernels_available

from engine.text import HALF, Stream, Text
from weights.config import Refused

SPOKEN = "aé漢字 🙂 e\u0301 done"
BYTES = list(SPOKEN.encode())


def byte_level() -> Tokenizer:
    """Token i is byte i; token 256 starts a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}  # GPT-2's table
    tokenizer = Tokenizer(models.BPE({shown[b]: b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Token i is <0xII>; then a few words whose leading space is a block, stripped at the start of a text."""
    words = {f"<0x{b:02X}>": b for b in range(256)} | {"▁the": 257, "▁cat": 258, "▁": 259, "s": 260}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def saved(tokenizer: Tokenizer, path, **extra) -> Text:
    tokenizer.add_special_tokens(["<start>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", tokenizer.token_to_id("<start>"))]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<start>", **extra).save_pretrained(path)
    return Text.find(path)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def text(request, tmp_path_factory) -> Text:
    return saved(request.param(), tmp_path_factory.mktemp("tokenizer"))


def pieces(text: Text, ids, stop=()) -> tuple[list[str], Stream]:
    stream, out = Stream(text, stop), []
    for token in ids:
        out.append(stream.push(token))
        if stream.stopped:
            break
    return [*out, stream.finish()], stream


CASES = {
    "spoken": BYTES,
    "invalid byte inside": BYTES[:9] + [0xFF] + BYTES[9:],
    "half a character at the end": [*b"ab", *"🙂".encode()[:3]],
    "two halves": [*"🙂".encode()[:2], *"🙂".encode()[:3], *b"x"],
    "special tokens": [256, *BYTES[:6], 256, *BYTES[6:], 256],
}


@pytest.mark.parametrize("ids", CASES.values(), ids=CASES)
@pytest.mark.parametrize("stop", [(), ("never",), ("🙃",)], ids=["", "never", "🙃"])
def test_pieces_join_to_the_whole(text, ids, stop):
    out, stream = pieces(text, ids, stop)
    whole = text.decode(ids)
    assert "".join(out) == stream.text == whole
    assert "".join(out).count(HALF) == whole.count(HALF)


def test_characters_stream_when_they_are_whole(tmp_path):
    out, _ = pieces(saved(byte_level(), tmp_path), BYTES)
    assert [piece for piece in out if piece] == list(SPOKEN)


def test_leading_spaces_survive(tmp_path):
    text = saved(byte_fallback(), tmp_path)
    special = text.tokenizer.bos_token_id
    for ids in itertools.product([257, 258, 259, 260, special, 0x41], repeat=5):
        out, _ = pieces(text, ids)
        assert "".join(out) == text.decode(list(ids))


def test_stop_strings_at_every_offset(text):
    """Text ends before the stop string; the token that completed it is the last one taken (B27)."""
    for stop, before in itertools.product(["x", "ab", "漢字", "aab"], range(8)):
        ids = [*(b"-" * before), *stop.encode(), *b"tail"]
        out, stream = pieces(text, ids, ("zzz", stop))
        assert stream.stopped == stop and "".join(out) == stream.text == "-" * before
        assert stream.ids == ids[: before + len(stop.encode())]


def test_a_stop_string_that_overlaps_itself(text):
    out, stream = pieces(text, b"aaab", ("aab",))
    assert ("".join(out), stream.stopped, len(stream.ids)) == ("a", "aab", 4)


def test_the_first_of_several_stop_strings_counts(text):
    _, stream = pieces(text, b"xabcd", ("bc", "abcd", "abc"))
    assert (stream.text, stream.stopped) == ("x", "abc")


def test_nothing_of_a_stop_string_is_handed_out_early(tmp_path):
    text = saved(byte_level(), tmp_path)
    stream = Stream(text, ("stop",))
    assert [stream.push(byte) for byte in b"so sto!"] == ["", "so", " ", "", "", "", "sto!"]


def test_a_held_end_is_flushed(text):
    out, stream = pieces(text, b"one sto", ("stop",))
    assert "".join(out) == "one sto" and stream.stopped is None


def test_chat_template(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    text = saved(byte_level(), tmp_path, chat_template=template)
    start = text.tokenizer.bos_token_id
    assert text.chat([{"role": "user", "content": "hi"}]) == [start, *b"user:hi;assistant:"]
    assert text.encode("hi") == [start, *b"hi"]


def test_without_a_template_chat_is_refused(text):
    with pytest.raises(Refused, match="no chat template.*without --chat"):
        text.chat([{"role": "user", "content": "hi"}])


def test_no_tokenizer(tmp_path):
    assert Text.find(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Refused, match="cannot be loaded") as refusal:
        Text.find(tmp_path)
    assert "\n" not in str(refusal.value)


def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name():
    """A version of ours inside the range that transformers accepts would make it call into the wrong package."""
    assert importlib.util.find_spec("kernels").origin.endswith("kernels/__init__.py")
    assert not is_kernels_available()
