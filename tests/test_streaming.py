"""Text as it comes: stop strings at every offset of a run (B27), caps (B28), characters split inside and across cycles
(B30)."""

import pytest
from test_text import saved
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from toys import V, cycle_of, follow, pair

from engine import Sampling, Shape
from engine.text import HALF

CHAINS = [Shape(k, 1, k + 1) for k in range(1, 8)]
TREES = [Shape(k, 2, min(2 * k + 2, 3 + (k - 1) * 4)) for k in range(1, 8)]
PLAIN, CHAIN = Shape(0, 1, 1), Shape(3, 1, 4)
pytestmark = pytest.mark.usefixtures("nan_memory")

TALE = "aaab aab, baaac; aabaab."  # one token a character, each its own, so that the MAP ring spells it
BYTES = [*"é漢字🙂e\u0301".encode(), 0xFF, *b"xyz ~"]
WORDS = "▁the C3 A9 ▁cat E6 BC A2 E5 AD 97 s F0 9F 99 82 ▁x FF ▁y CC 81 ▁ z".split()


def characters():
    """Tokenizer and ring: token i is the i-th character of TALE, told apart by a mark that decoding drops."""
    names = [f"{letter}#{i}" for i, letter in enumerate(TALE)] + [f"?#{i}" for i in range(len(TALE), V)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[-1]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("#[0-9]+"), ""), decoders.Fuse()])
    return tokenizer, range(len(TALE))


def byte_level():
    """Every token a byte of its own, GPT-2's way; one byte is no character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {b: chr(b) for b in printable}
    shown |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}
    assert sorted(shown.values(), key=ord) == alphabet
    others = [b for b in range(48, 256) if b not in BYTES][: V - len(BYTES)]
    tokenizer = Tokenizer(models.BPE({shown[b]: i for i, b in enumerate(BYTES + others)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, range(len(BYTES))


def byte_fallback():
    """Words, and bytes where no word is; one byte is no character."""
    names = [f"<0x{word}>" if len(word) == 2 and word.isupper() or word[0].isdigit() else word for word in WORDS]
    others = [f"<0x{b:02X}>" for b in range(0x21, 0x7F) if f"<0x{b:02X}>" not in names][: V - len(names)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names + others)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, range(len(names))


class Speaker:
    """An engine whose MAP target spells its ring over and over, and the text of any of its ids."""

    def __init__(self, toys, make):
        tokenizer, ring = make()
        self.after = cycle_of(list(ring))
        target = toys.altered(toys.map(self.after), lambda config, tensors: None)
        self.text = saved(tokenizer, target)
        self.engine = pair(target, toys.map_draft(self.after))

    def expect(self, start, stops, cap):
        """(ids, text, stop) by decoding every beginning of what is spelled after token `start`."""
        ids = follow(start, cap, self.after)
        for count in range(1, cap + 1):
            whole = self.text.decode(ids[:count])
            found = [(whole.find(stop), -len(stop), stop) for stop in stops if stop in whole]
            if found:
                at, _, stop = min(found)
                return ids[:count], whole[:at], stop
        return ids, self.text.decode(ids), None


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def speaker(request, toys):
    return Speaker(toys, request.param)


@pytest.fixture(scope="module")
def characters_speaker(toys):
    return Speaker(toys, characters)


def ends(speaker, cases, shape, cap):
    """Run cases (start, stops), four at once and the first alone as a stream; all as it should be."""
    sampling = [Sampling(max_new_tokens=cap, stop=stops, logprobs=0) for _, stops in cases]
    results = speaker.engine.generate([[start] for start, _ in cases], sampling, shape=shape)
    for (start, stops), result in zip(cases, results, strict=True):
        ids, text, stop = speaker.expect(start, stops, cap)
        assert (result.token_ids, result.text, result.stop) == (ids, text, stop), (start, stops)
        assert result.finish_reason == ("length" if stop is None else "stop")
        assert result.stats["output_tokens"] == len(ids) == len(result.logprobs)
        assert sum(result.stats["emitted_per_cycle"]) == len(ids) - 1
        assert [entry["token_id"] for entry in result.logprobs] == ids
    events = list(speaker.engine.stream([cases[0][0]], sampling[0], shape=shape, details=False))
    assert "".join(e.text for e in events) == results[0].text
    assert [t for e in events for t in e.tokens] == results[0].token_ids
    assert [len(e.logprobs) for e in events] == [len(e.tokens) for e in events]
    assert speaker.engine.pool.free == speaker.engine.pool.size


@pytest.mark.parametrize("shape", [PLAIN, *CHAINS, *TREES], ids=str)
def test_stop_strings_at_every_offset_of_a_run(characters_speaker, shape):
    """B27: strings of 1, 2 and 5 characters that begin at every place of two runs and of the border between them, four
    at once. Mutants: only the run's end looked at; text cut but ids or log-probabilities not; a window too short for a
    string that began in the cycle before."""
    at_every_offset(characters_speaker, shape)


@pytest.mark.parametrize("shape", [PLAIN, CHAINS[1], CHAINS[4], TREES[2]], ids=str)
def test_stop_strings_among_split_characters(speaker, shape):
    """The same where a token is a part of a character. Mutant: characters of the text counted as tokens."""
    at_every_offset(speaker, shape)


def at_every_offset(speaker, shape):
    reach = 2 * shape.path + 1 if shape in CHAINS else shape.path + 1
    spoken = speaker.text.decode(follow(0, 3 * reach + 20, speaker.after))
    cases = [(0, [spoken[at : at + size], "never"]) for size in (1, 2, 5) for at in range(reach)]
    cases = [case for case in cases if HALF not in case[1][0]]
    stride = 1 if shape in (CHAINS[0], CHAINS[2], CHAINS[6], TREES[2]) else 3
    for at in range(0, len(cases), 4 * stride):
        ends(speaker, cases[at : at + 4], shape, 3 * reach + 8)


@pytest.mark.parametrize("shape", [PLAIN, *CHAINS, *TREES[::3]], ids=str)
def test_stop_strings_that_overlap_themselves(characters_speaker, shape):
    """ "aab" in "aaab", "aabaab" in what begins like it, one that ends inside another. Mutant: after a mismatch the
    search goes on past the string's second chance."""
    starts = [len(TALE) - 1, 0, 4, 8]
    for stops in (["aab"], ["aabaab"], ["baaac", "aaac"], ["b aa", "aab"], ["aa", "aaa"]):
        ends(characters_speaker, [(start, stops) for start in starts], shape, 40)


@pytest.mark.parametrize("shape", [PLAIN, *CHAINS[:5], TREES[2]], ids=str)
def test_characters_are_never_shown_in_halves(speaker, shape):
    """B30: at every cap and start, so that characters split inside and across cycles, at the end and with a stop string
    pending; the pieces join to the decode of all ids. Mutants: bytes decoded cycle by cycle; the last bytes lost at the
    end; held text overtaken by text that came later."""
    engine, ring = speaker.engine, (0, 7, 14)
    for start in ring:
        for stop in ((), ("🙃", "e\u0301!", "漢漢")):
            for cap in (5, 23):
                sampling = Sampling(max_new_tokens=cap, stop=stop)
                events = list(engine.stream([start], sampling, shape=shape, details=False))
                ids = follow(start, cap, speaker.after)
                pieces, whole = [e.text for e in events], speaker.text.decode(ids)
                assert "".join(pieces) == whole
                assert sum(p.count(HALF) for p in pieces) == whole.count(HALF)
                assert [t for e in events for t in e.tokens] == ids


@pytest.mark.parametrize("shape", [PLAIN, *CHAINS, *TREES], ids=str)
def test_caps_with_text(characters_speaker, shape):
    """B28: four caps at once, and one string that is completed by the very token of the cap: it wins. Mutants: the text
    or the log-probabilities of a run that the cap cut; "length" where a stop came in the same place."""
    speaker = characters_speaker
    caps = [0, 1, shape.path, shape.path + 1, shape.path + 2, 2 * shape.path + 1, 20, 7]
    samplings = [Sampling(max_new_tokens=cap, logprobs=1) for cap in caps]
    for result, cap in zip(speaker.engine.generate([[3]] * len(caps), samplings, shape=shape), caps, strict=True):
        ids = follow(3, cap, speaker.after)
        assert (result.token_ids, result.text) == (ids, speaker.text.decode(ids))
        assert len(result.logprobs) == result.stats["output_tokens"] == cap and result.finish_reason == "length"
    for cap in range(3, 12):
        ids, _, _ = speaker.expect(3, ["never"], cap)
        last = speaker.text.decode(ids)[-2:]
        if last not in speaker.text.decode(ids)[:-1]:
            ends(speaker, [(3, [last])], shape, cap)


# ------------------------------------------------------------------ the command line
